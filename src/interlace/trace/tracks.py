"""Timelines as tracks: what is drawn in one row, and the arrows between rows.

A track is one stream of one rank. An arrow says that an op waited for another: `record` and `wait`
of an event, `notify` and `expect` of a signal, a send and its receive (`ir/order.py`).

    >>> tracks(timeline)[0].rank, tracks(timeline)[0].stream
    (0, 'main')
    >>> arrows(programs)[0]
    Arrow(kind='event', name='e1', source=(0, 7), target=(0, 9))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.cost.timeline import Span, Timeline
from interlace.ir import Meetings, Program, bindings, spots
from interlace.ir.text.printer import print_op

OpKey = tuple[int, int]
"""A global rank, and an op's place in the list of that rank's Program."""


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
        """How the row is called."""
        return f"rank {self.rank} · {self.stream}" + (f" ({self.lane + 1})" if self.lane else "")


def tracks(timeline: Timeline) -> tuple[Track, ...]:
    """The rows of a timeline: by rank, then stream in order of first use, then lane."""
    found: list[Track] = []
    for rank in timeline.ranks:
        for stream in timeline.streams(rank):
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
        for rank in (program.rank,) if program.rank is not None else program.world:
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


def texts(programs: Sequence[Program]) -> dict[int, tuple[str, ...]]:
    """Each rank's ops as text, one line an op, by place; ranks of one Program share the lines."""
    found: dict[int, tuple[str, ...]] = {}
    for program in programs:
        lines = tuple(print_op(op, program) for op in program.ops)
        for rank in (program.rank,) if program.rank is not None else program.world:
            found[rank] = lines
    return found
