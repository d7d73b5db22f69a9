"""Tracks of runs, the arrows between these, and the writing of files.

    plain = Run((serial,), measured=before, label="serial")
    runs = [Run((forward,), predicted, measured, "forward", before=plain)]

A track is one stream of one rank. An arrow says that an op waited for another: `record` and `wait`
of an event, `notify` and `expect` of a signal, a send and its receive (`ir/order.py`).

    >>> tracks(timeline)[0].rank, tracks(timeline)[0].stream
    (0, 'main')
    >>> arrows(programs)[0]
    Arrow(kind='event', name='e1', source=(0, 7), target=(0, 9))
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.cost.timeline import Span, Timeline
from interlace.errors import InterlaceError
from interlace.ir import Meetings, Program, bindings, spots

OpKey = tuple[int, int]
"""A global rank, and an op's place in the list of that rank's Program."""


@dataclass(frozen=True, slots=True)
class Run:
    """A Program (or a set of them), how it was predicted to run and how it ran."""

    programs: tuple[Program, ...] = ()
    predicted: Timeline | None = None
    measured: Timeline | None = None
    name: str = ""
    label: str = "overlapped"
    """Name of the schedule beside the one that it is compared with."""
    before: Run | None = None
    """The run that it is compared with, such as the serial schedule of the same graph."""

    @property
    def parts(self) -> list[Run]:
        """The run that it is compared with, if any, and the run itself."""
        return [self] if self.before is None else [self.before, self]

    def timeline(self, source: str) -> Timeline | None:
        """The timeline of a source, `predicted` or `measured`."""
        return self.predicted if source == "predicted" else self.measured

    @property
    def timelines(self) -> list[Timeline]:
        """The timelines there are, predicted first."""
        return [timeline for timeline in (self.predicted, self.measured) if timeline is not None]


@dataclass(frozen=True, slots=True)
class Track:
    """The spans that stand in one row: a stream of a rank, in order of start.

    Spans of a stream follow one another; where two overlap all the same, as the clocks of measured
    ones may have it, the later one goes to a second `lane`.
    """

    rank: int
    stream: str
    lane: int
    spans: tuple[Span, ...]

    @property
    def title(self) -> str:
        """The name of the row."""
        return f"rank {self.rank} · {self.stream}" + (f" ({self.lane + 1})" if self.lane else "")


def tracks(timeline: Timeline) -> tuple[Track, ...]:
    """The rows of a timeline: by rank, then stream (`main`, then in order of first use), then
    lane."""
    found: list[Track] = []
    for rank in timeline.ranks:
        for stream in sorted(timeline.streams(rank), key=lambda stream: stream != "main"):
            mine = (s for s in timeline.spans if s.rank == rank and s.stream == stream)
            for lane, spans in enumerate(_lanes(mine)):
                found.append(Track(rank, stream, lane, tuple(spans)))
    return tuple(found)


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.op_index)):
        for lane in lanes:
            if lane[-1].end_s <= span.start_s:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


@dataclass(frozen=True, slots=True)
class Arrow:
    """`target` could not go on before `source` was done."""

    kind: str
    """`event`, `signal` or `message`."""
    name: str
    source: OpKey
    target: OpKey


def arrows(programs: Sequence[Program]) -> tuple[Arrow, ...]:
    """The arrows between the ops of all ranks of these Programs, in order of their targets."""
    found: list[Arrow] = []
    meetings = Meetings[OpKey]()
    for program in programs:
        ops, bound = dict(spots(program.ops)), bindings(program.ops)
        events = [(source[0], at[0], ops[at].ordering().waits) for at, source in bound.items()]
        for rank in ranks_of(program):
            where = program.where(rank)
            found += [Arrow("event", event or "", (rank, a), (rank, b)) for a, b, event in events]
            for (index, _), op in ops.items():
                meetings.add(where, op.ordering(), (rank, index))
    for level in meetings.levels():
        if level.notify is not None:
            found.append(Arrow("signal", level.signal[0], level.notify, level.expect))
    for message in meetings.deliveries():
        if message.send is not None and message.recv is not None:
            found.append(Arrow("message", message.channel[0].name, message.send, message.recv))
    return tuple(sorted(found, key=lambda arrow: (arrow.target, arrow.source)))


def ranks_of(program: Program) -> Sequence[int]:
    """The global ranks that run a Program."""
    return (program.rank,) if program.rank is not None else program.world


def title(timeline: Timeline, run: str = "") -> str:
    """The name of a timeline of a run."""
    if run:
        return f"{run} · {timeline.source}"
    return f"{timeline.source} · {timeline.name}" if timeline.name else timeline.source


def write_whole(path: str | Path, text: str) -> Path:
    """Writes a file beside its place and moves it there, so that nobody reads half of it."""
    path = Path(path)
    if path.is_dir():
        raise InterlaceError(f"cannot write {path}: it is a directory, so name a file in it")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # ranks may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InterlaceError(f"cannot write {path}: {error.strerror or error}") from error
    return path
