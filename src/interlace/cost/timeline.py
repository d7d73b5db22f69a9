"""Timelines: when each op of each rank ran, predicted by the simulator or measured by an Executor.

>>> spans = (
...     Span(0, "main", 0, "aten.mm.out", 0.0, 3.0, kind="compute"),
...     Span(0, "comm", 1, "all_gather", 1.0, 5.0, kind="comm", site=1),
... )
>>> Timeline(spans).figures(rank=0).overlap_s
2.0
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from interlace.errors import ParseError

SCHEMA = 1
KINDS = ("compute", "comm", "sync", "memory")

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one rank, from when its stream reached it, so with waits for peers, to its end."""

    rank: int
    """The global rank."""
    stream: str
    """The stream of that rank."""
    op_index: int
    """The place of the op in its Program."""
    name: str
    """The op in a few words."""
    start_s: float
    """Seconds since the run began,"""
    end_s: float
    """and when it was done."""
    site: int | None = None
    """The site that the op serves."""
    kind: str = "compute"
    """`compute`, `comm`, `sync` or `memory`."""

    @property
    def seconds(self) -> float:
        """Seconds that the op took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Figures:
    """Busy time of a rank (or the mean over ranks), and the communication that compute hid."""

    makespan_s: float
    """From the first start to the last end."""
    compute_s: float
    """Time in which some stream computed."""
    comm_s: float
    """Time in which some stream communicated."""
    overlap_s: float
    """Time in which both happened at once."""

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hid."""
        return self.comm_s - self.overlap_s

    @property
    def hidden(self) -> float:
        """The fraction of communication that ran under compute; 0 where there was none."""
        return self.overlap_s / self.comm_s if self.comm_s > 0 else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """The spans of a run, in any order."""

    spans: tuple[Span, ...]
    """An entry for each op of each rank."""
    name: str = ""
    source: str = "predicted"
    """`predicted` or `measured`."""

    def __repr__(self) -> str:
        told = f"{len(self.ranks)} ranks, {len(self.spans)} spans, {self.makespan_s * 1e3:.3f} ms"
        return f"<Timeline {self.name!r}, {self.source}: {told}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans, sorted."""
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end, over all ranks."""
        return _makespan(self.spans)

    def streams(self, rank: int) -> tuple[str, ...]:
        """The streams of a `rank`, in order of first use."""
        mine = sorted((s for s in self.spans if s.rank == rank), key=lambda s: s.op_index)
        return tuple(dict.fromkeys(span.stream for span in mine))

    def of(self, *, rank: int | None = None, site: int | None = None) -> Timeline:
        """The part that belongs to a `rank`, to a `site`, or to both."""
        kept = tuple(
            span
            for span in self.spans
            if (rank is None or span.rank == rank) and (site is None or span.site == site)
        )
        return Timeline(kept, self.name, self.source)

    def exposed(self, rank: int) -> list[Interval]:
        """The intervals in which a `rank` communicated and computed nothing."""
        comm, compute = (
            union((s.start_s, s.end_s) for s in self.spans if (s.rank, s.kind) == (rank, kind))
            for kind in ("comm", "compute")
        )
        ends = [-math.inf, *(end for _, end in compute)]
        starts = [*(start for start, _ in compute), math.inf]
        return intersection(comm, list(zip(ends, starts, strict=True)))

    def figures(self, rank: int | None = None) -> Figures:
        """The figures of a `rank`; without one, means over the ranks (and the makespan of all)."""
        if rank is not None:
            return _figures([span for span in self.spans if span.rank == rank])
        by_rank: dict[int, list[Span]] = {}
        for span in self.spans:
            by_rank.setdefault(span.rank, []).append(span)
        each = [_figures(spans) for spans in by_rank.values()]
        num = max(len(each), 1)
        return Figures(
            self.makespan_s,
            sum(figures.compute_s for figures in each) / num,
            sum(figures.comm_s for figures in each) / num,
            sum(figures.overlap_s for figures in each) / num,
        )

    def to_json(self) -> str:
        """The timeline as JSON text: a header and one row for each span."""
        rows = [
            [s.rank, s.stream, s.op_index, s.name, s.start_s, s.end_s, s.site, s.kind]
            for s in self.spans
        ]
        header = {"schema": SCHEMA, "name": self.name, "source": self.source}
        return json.dumps({**header, "spans": rows})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """A timeline from the `text` that `to_json` wrote.

        Raises:
            ParseError: it is another text.
        """
        try:
            fields: Any = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise ParseError(
                    f"timeline schema {fields['schema']!r}: this version of interlace reads schema "
                    f"{SCHEMA}; write the timeline again with it"
                )
            spans = tuple(map(_span, fields["spans"]))
            return cls(spans, fields["name"], fields["source"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ParseError(
                f"this is no timeline ({type(error).__name__}: {error}): give the JSON that "
                "`interlace simulate --out` or `Timeline.to_json` wrote"
            ) from error


def _span(row: Sequence[Any]) -> Span:
    rank, stream, op_index, name, start, end, site, kind = row
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    return Span(rank, stream, op_index, name, float(start), float(end), site, kind)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The intervals that two unions have in common."""
    found: list[Interval] = []
    for start, end in one:
        for at in range(bisect_right(other, start, key=itemgetter(1)), len(other)):
            if other[at][0] >= end:
                break
            found.append((max(start, other[at][0]), min(end, other[at][1])))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The time that disjoint intervals cover."""
    return sum(end - start for start, end in intervals)


def _makespan(spans: Sequence[Span]) -> float:
    if not spans:
        return 0.0
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def _figures(spans: Sequence[Span]) -> Figures:
    compute = union((s.start_s, s.end_s) for s in spans if s.kind == "compute")
    comm = union((s.start_s, s.end_s) for s in spans if s.kind == "comm")
    overlap = length(intersection(compute, comm))
    return Figures(_makespan(spans), length(compute), length(comm), overlap)
