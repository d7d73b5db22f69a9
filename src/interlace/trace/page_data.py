"""What the page draws, as plain data: runs with their Programs, spans as rows of numbers.

    runs = [Run((forward,), predicted, measured, "forward"), Run((backward,), None, timeline)]
    page_data(runs)["panels"][0]["rows"]

Names and sites stand there once; Programs are numbered through all runs, and so are the keys of ops
and sites (`program:op`, `program:site`) in the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.cost.timeline import KINDS, Timeline
from interlace.ir import Site
from interlace.trace.runs import Run, all_programs, title
from interlace.trace.tracks import arrows, tracks

SiteKey = tuple[int, int]
"""A Program's place in the page, and a site's id."""


def page_data(runs: Sequence[Run]) -> dict[str, object]:
    """Everything that the page's script reads."""
    programs = all_programs(runs)
    sites = {(i, site.id): site for i, program in enumerate(programs) for site in program.sites}
    places: dict[SiteKey, int] = {key: i for i, key in enumerate(sites)}
    names: dict[str, int] = {}
    panels: list[dict[str, object]] = []
    first = 0
    for run in runs:
        owner = {
            rank: i
            for i, program in enumerate(run.programs, start=first)
            for rank in ((program.rank,) if program.rank is not None else program.world)
        }
        between = [[a.kind, a.name, *a.source, *a.target] for a in arrows(run.programs)]
        for timeline in run.timelines:
            panels.append(_panel(timeline, owner, places, names, run.name) | {"arrows": between})
        first += len(run.programs)
    unknown = Site(id=0, kind="")  # a span may name a site that no Program here knows
    return {
        "panels": panels,
        "names": list(names),
        "kinds": KINDS,
        "sites": [_site(key, sites.get(key, unknown)) for key in places],
        "locs": [[str(op.loc) for op in program.ops] for program in programs],
    }


def _panel(
    timeline: Timeline,
    owner: dict[int, int],
    places: dict[SiteKey, int],
    names: dict[str, int],
    name: str,
) -> dict[str, object]:
    """A timeline's rows; times in microseconds from its first span."""
    origin = min((span.start_s for span in timeline.spans), default=0.0)
    rows: list[dict[str, object]] = []
    for track in tracks(timeline):
        program = owner.get(track.rank, -1)
        spans: list[list[float]] = []
        for span in track.spans:
            site = -1
            if span.site is not None:
                site = places.setdefault((program, span.site), len(places))
            start, length = round((span.start_s - origin) * 1e6, 3), round(span.seconds * 1e6, 3)
            label = names.setdefault(span.name, len(names))
            spans.append([start, length, span.op_index, label, site, KINDS.index(span.kind)])
        row = {"title": track.title, "rank": track.rank, "program": program, "spans": spans}
        rows.append(row)
    return {
        "title": title(timeline, name),
        "source": f"{name} {timeline.source}".strip(),
        "rows": rows,
        "makespan": timeline.makespan_s * 1e6,
    }


def _site(key: SiteKey, site: Site) -> dict[str, object]:
    return {
        "program": key[0],
        "id": key[1],
        "kind": site.kind,
        "module": site.module,
        "strategy": site.strategy,
    }
