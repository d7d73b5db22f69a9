"""Figures of a page: its head, and the tables of overlap and of sites.

A figure of several ranks is their mean; the head sums these over the runs, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from interlace.cost.timeline import Figures, Timeline
from interlace.ir import Program, Site
from interlace.trace.figures import SiteFigures, figures_rows, milliseconds, site_figures
from interlace.trace.page_data import SOURCES, PageSite, first_numbers
from interlace.trace.tracks import Run, ranks_of

SITES = ("", "program", "site", "module", "kind", "strategy", "serial", "predicted", "gain")


def head_figures(runs: Sequence[Run]) -> list[tuple[str, list[Figures]]]:
    """Each source that all runs have, with sums over the runs: of the schedules that they are
    compared with, if all have one, and of their own. A comparison comes first."""
    rows: list[tuple[str, list[Figures]]] = []
    for source in SOURCES:
        own = [run.timeline(source) for run in runs]
        before = [run.before and run.before.timeline(source) for run in runs]
        if own and all(own):
            rows.append((source, [_total(each) for each in (before, own) if all(each)]))
    return sorted(rows, key=lambda row: -len(row[1]))


def _total(timelines: Sequence[Timeline | None]) -> Figures:
    each = [astuple(timeline.figures()) for timeline in timelines if timeline is not None]
    return Figures(*map(sum, zip(*each, strict=True)))


def overlap_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row for each rank of each timeline, and for its ranks together: what `HEADINGS` names."""
    rows: list[tuple[str, ...]] = []
    for source in SOURCES:
        for run in runs:
            shown = [(part, it) for part in run.parts if (it := part.timeline(source))]
            for part, timeline in shown:
                words = run.name, part.label if len(shown) > 1 else "", source
                name = " ".join(filter(None, words))
                rows += [(name, *cells) for _, *cells in figures_rows([timeline])]
    return rows


def site_headings(runs: Sequence[Run]) -> tuple[str, ...]:
    """The columns of the table of sites: with measured times where there are any."""
    source = _source(runs)
    measured = ("measured",) if source == "measured" else ()
    return (*SITES, *measured, f"exposed, {source}", "reason")


def site_rows(runs: Sequence[Run]) -> dict[PageSite, tuple[str, ...]]:
    """Cells of the sites of all runs; what they took is that of the slowest rank."""
    source, first = _source(runs), first_numbers(runs)
    rows: dict[PageSite, tuple[str, ...]] = {}
    for run in runs:
        took = _slowest(run, source)
        for place, program in enumerate(run.programs):
            for site in program.sites:
                mine = took.get((place, site.id))
                measured = "" if mine is None else milliseconds(mine.took_s)
                rows[first[id(run)] + place, site.id] = (
                    *_known(program, site),
                    *(measured,) * (source == "measured"),
                    "" if mine is None else milliseconds(mine.exposed_s),
                    site.reason,
                )
    return rows


def _source(runs: Sequence[Run]) -> str:
    return "measured" if any(run.measured for run in runs) else "predicted"


def _slowest(run: Run, source: str) -> dict[PageSite, SiteFigures]:
    """Figures of each site of each Program of a run, on the rank where it took longest."""
    timeline = run.timeline(source)
    if timeline is None:
        return {}
    owner = {rank: i for i, program in enumerate(run.programs) for rank in ranks_of(program)}
    found: dict[PageSite, SiteFigures] = {}
    for (rank, site), took in site_figures(timeline).items():
        key = owner.get(rank, -1), site
        found[key] = max(found.get(key, took), took, key=lambda it: it.took_s)
    return found


def _known(program: Program, site: Site) -> tuple[str, ...]:
    """The cells that `SITES` names."""
    gain = ""
    if site.serial_ms and site.predicted_ms:
        gain = f"{site.serial_ms / site.predicted_ms:.2f}x"
    return (
        *("", program.name, str(site.id), site.module, site.kind),
        " ".join(filter(None, (site.strategy, site.protocol))),
        *(_ms(site.serial_ms), _ms(site.predicted_ms), gain),
    )


def _ms(value: float | None) -> str:
    return "" if value is None else milliseconds(value / 1e3)
