"""Figures of a page: its head, and the tables of overlap and of sites.

The head has the sums over all runs of the page (`totals`): forward and backward, say, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from interlace.cost.timeline import Figures, Timeline
from interlace.ir import Program, Site
from interlace.trace.figures import SiteFigures, figures_rows, milliseconds, site_figures
from interlace.trace.page_data import SOURCES, PageSite, first_numbers
from interlace.trace.tracks import Run, ranks_of

SITES = ("", "program", "site", "module", "kind", "strategy", "serial", "predicted", "gain")


Totals = tuple[str, list[tuple[str, Figures]]]
"""A source, and schedules' labels with their figures summed over all runs: makespans one after
another, the rest over ranks as well."""


def total(timelines: Sequence[Timeline]) -> Figures:
    """The sum of some timelines of one source."""
    each = [astuple(timeline.figures()) for timeline in timelines]
    return Figures(*map(sum, zip(*each, strict=True)))


def totals(runs: Sequence[Run], source: str) -> list[tuple[str, Figures]]:
    """Totals of the schedules compared with, if all runs have one, and of the runs; none if one
    was not seen."""
    own = [timeline for run in runs if (timeline := run.timeline(source))]
    before = [it for run in runs if run.before and (it := run.before.timeline(source))]
    if not runs or len(own) < len(runs):
        return []
    ours = runs[0].label if before else "", total(own)
    if len(before) < len(runs) or runs[0].before is None:
        return [ours]
    return [(runs[0].before.label, total(before)), ours]


def head_totals(runs: Sequence[Run]) -> list[Totals]:
    """Totals of each source that all runs have, a comparison first: the page's head."""
    known = [(source, found) for source in SOURCES if (found := totals(runs, source))]
    return sorted(known, key=lambda item: -len(item[1]))


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


# -- sites --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SiteRow:
    """A site's row in the table, and where it stands in the page."""

    place: PageSite
    cells: tuple[str, ...]


def site_headings(runs: Sequence[Run]) -> tuple[str, ...]:
    """The columns of the table of sites: with measured times where there are any."""
    source = _source(runs)
    measured = ("measured",) if source == "measured" else ()
    return (*SITES, *measured, f"exposed, {source}", "reason")


def site_rows(runs: Sequence[Run]) -> list[SiteRow]:
    """The sites of all runs; what they took is that of the slowest rank."""
    source, first = _source(runs), first_numbers(runs)
    rows: list[SiteRow] = []
    for run in runs:
        took = _slowest(run, source)
        for place, program in enumerate(run.programs):
            for site in program.sites:
                mine = took.get((place, site.id))
                measured = "" if mine is None else milliseconds(mine.took_s)
                cells = (
                    *_known(program, site),
                    *(measured,) * (source == "measured"),
                    "" if mine is None else milliseconds(mine.exposed_s),
                    site.reason,
                )
                rows.append(SiteRow((first[id(run)] + place, site.id), cells))
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
