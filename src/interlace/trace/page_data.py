"""Data of the page's script: panels of rows of spans, with names, sites and arrows.

    data = page_data([Run((program,), simulated, executor.timeline(), before=serial)])

A panel is a run from one source (predicted, measured): its parts, one above the other on one scale,
are the schedule that it is compared with, if any, and its own. Names and sites stand there once,
and Programs are numbered through all runs (`numbered`), so keys of ops and sites are
`program:op` and `program:site`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from interlace.cost.timeline import KINDS, Interval, Timeline
from interlace.ir import Program, Site
from interlace.trace.tracks import Run, arrows, ranks_of, title, tracks

SOURCES = ("measured", "predicted")
COLOURS = 10
"""Colours of sites; the style has as many."""
PageSite = tuple[int, int]
"""A Program's place in the page, and a site's id."""


def parts(runs: Sequence[Run]) -> Iterator[Run]:
    """All runs, then what they are compared with."""
    return chain(runs, (run.before for run in runs if run.before is not None))


def numbered(runs: Sequence[Run]) -> list[Program]:
    """The Programs of a page, in the order of their numbers."""
    return [program for part in parts(runs) for program in part.programs]


def first_numbers(runs: Sequence[Run]) -> dict[int, int]:
    """The number of the first Program of each run and of what it is compared with, by `id`."""
    found: dict[int, int] = {}
    place = 0
    for part in parts(runs):
        found.setdefault(id(part), place)
        place += len(part.programs)
    return found


def site_groups(runs: Sequence[Run]) -> dict[PageSite, int]:
    """A number of each site, which has a colour: the same for the same site of both schedules that
    are compared."""
    first = first_numbers(runs)
    found: dict[PageSite, int] = {}
    known: dict[tuple[int, int, str], int] = {}
    for run in runs:
        for part in reversed(run.parts):
            for place, program in enumerate(part.programs, first[id(part)]):
                for site in program.sites:
                    key = id(run), site.id, site.module
                    found[place, site.id] = known.setdefault(key, len(known))
    return found


def page_data(runs: Sequence[Run]) -> dict[str, object]:
    """Everything that the page's script reads."""
    data = _Data(runs)
    panels = [
        data.panel(run, source)
        for source in SOURCES
        for run in runs
        if run.timeline(source) is not None
    ]
    locs = [[data.name(str(op.loc)) for op in program.ops] for program in data.programs]
    modules = [[data.name(op.loc.module) for op in program.ops] for program in data.programs]
    return {
        "panels": panels,
        "names": list(data.names),
        "kinds": KINDS,
        "sites": [data.site(key) for key in data.places],
        "locs": locs,
        "modules": modules,
    }


class _Data:
    """Names and sites as they are met; both stand in the page once."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.programs = numbered(runs)
        self.first = first_numbers(runs)
        self.groups = site_groups(runs)
        self.places: dict[PageSite, int] = {key: i for i, key in enumerate(self.groups)}
        self.names: dict[str, int] = {}

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def panel(self, run: Run, source: str) -> dict[str, object]:
        shown = [(part, it) for part in run.parts if (it := part.timeline(source)) is not None]
        _, own = shown[-1]
        drawn = [self._part(part, timeline) for part, timeline in shown]
        return {
            "title": title(own, run.name),
            "source": source,
            "run": run.name,
            "makespan": max(timeline.makespan_s for _, timeline in shown) * 1e6,
            "parts": drawn,
        }

    def _part(self, part: Run, timeline: Timeline) -> dict[str, object]:
        """A schedule's rows; times in microseconds from its first span."""
        origin = min((span.start_s for span in timeline.spans), default=0.0)
        owner = {
            rank: place
            for place, program in enumerate(part.programs, self.first[id(part)])
            for rank in ranks_of(program)
        }
        rows: list[dict[str, object]] = []
        for track in tracks(timeline):
            program = owner.get(track.rank, -1)
            spans: list[list[float]] = []
            for span in track.spans:
                site = -1
                if span.site is not None:
                    site = self.places.setdefault((program, span.site), len(self.places))
                start, length = _microseconds(span.start_s - origin), _microseconds(span.seconds)
                label, kind = self.name(span.name), KINDS.index(span.kind)
                spans.append([start, length, span.op_index, label, site, kind])
            row = {"title": track.title, "rank": track.rank, "program": program, "spans": spans}
            rows.append(row)
        return {
            "label": part.label,
            "makespan": timeline.makespan_s * 1e6,
            "rows": rows,
            "exposed": {r: _flat(timeline.exposed(r), origin) for r in timeline.ranks},
            "arrows": [[a.kind, a.name, *a.source, *a.target] for a in arrows(part.programs)],
        }

    def site(self, key: PageSite) -> dict[str, object]:
        """A site; a span may name one that no Program here knows."""
        sites = self.programs[key[0]].sites if key[0] >= 0 else ()
        site = next((site for site in sites if site.id == key[1]), Site(id=key[1], kind=""))
        return {
            "program": key[0],
            "id": site.id,
            "kind": site.kind,
            "module": site.module,
            "strategy": site.strategy,
            "group": self.groups.setdefault(key, len(self.groups)),
        }


def _flat(intervals: Iterable[Interval], origin: float) -> list[list[float]]:
    return [[_microseconds(s - origin), _microseconds(e - s)] for s, e in intervals]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
