"""Timelines as tracks: what is drawn in one row, and the arrows between rows.

A track is one stream of one rank. An arrow says that an op waited for another: `record` and `wait`
of an event, `notify` and `expect` of a signal, a send and its receive. Arrows need the Program, and
bind as the house semantics have it: a wait to the last record listed before it, an expect to the
first notify of that writer that reaches its value, the k-th send to the k-th receive.

    >>> tracks(timeline)[0].rank, tracks(timeline)[0].stream
    (0, 'main')
    >>> arrows(programs)[0]
    Arrow(kind='event', name='e1', source=(0, 7), target=(0, 9))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from interlace.cost.timeline import Span, Timeline
from interlace.ir import (
    Expect,
    Fused,
    Group,
    Index,
    Notify,
    Op,
    Others,
    Program,
    Record,
    Recv,
    Send,
    Wait,
    Where,
)
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
    notifies: dict[tuple[object, ...], list[tuple[int, OpKey]]] = defaultdict(list)
    expects: list[tuple[tuple[object, ...], int, OpKey, str]] = []
    sends: dict[tuple[str, int, int], list[OpKey]] = defaultdict(list)
    recvs: dict[tuple[str, int, int], list[OpKey]] = defaultdict(list)
    for program in programs:
        for rank in (program.rank,) if program.rank is not None else program.world:
            where = program.where(rank)
            records: dict[str, int] = {}
            for index, op in _flat(program.ops):
                key = (rank, index)
                match op:
                    case Record(event=event):
                        records[event] = index
                    case Wait(event=event):
                        if event in records:
                            found.append(Arrow("event", event, (rank, records[event]), key))
                    case Notify(signal=signal, peer=peer, team=team, value=value):
                        for reader in _ranks(where, team, peer):
                            notifies[signal, team, rank, reader].append((value, key))
                    case Expect(signal=signal, peer=peer, team=team, value=value):
                        for writer in _ranks(where, team, peer):
                            expects.append(((signal, team, writer, rank), value, key, signal))
                    case Send(peer=peer, team=team):
                        sends[team, rank, _ranks(where, team, peer)[0]].append(key)
                    case Recv(peer=peer, team=team):
                        recvs[team, _ranks(where, team, peer)[0], rank].append(key)
                    case _:
                        pass
    for channel, value, key, signal in expects:
        source = next((at for raised, at in notifies[channel] if raised >= value), None)
        if source is not None:
            found.append(Arrow("signal", signal, source, key))
    for channel, targets in recvs.items():
        for source, target in zip(sends[channel], targets, strict=False):
            found.append(Arrow("message", channel[0], source, target))
    return tuple(sorted(found, key=lambda arrow: (arrow.target, arrow.source)))


def _flat(ops: Sequence[Op]) -> Iterator[tuple[int, Op]]:
    """Every op with its place; what a group or a fused op holds stands at that op's place."""
    for index, op in enumerate(ops):
        yield index, op
        if isinstance(op, Group | Fused):
            for item in op.ops if isinstance(op, Group) else op.members:
                yield index, item


def _ranks(where: Where, team: str, peer: Index | Others) -> list[int]:
    """The global ranks that a peer stands for."""
    member = where.member(team)
    if isinstance(peer, Others):
        return [rank for i, rank in enumerate(member.ranks) if i != member.index]
    return [member.ranks[where.index(peer)]]


def texts(programs: Sequence[Program]) -> dict[int, tuple[str, ...]]:
    """Each rank's ops as text, one line an op, by place; ranks of one Program share the lines."""
    found: dict[int, tuple[str, ...]] = {}
    for program in programs:
        lines = tuple(print_op(op, program) for op in program.ops)
        for rank in (program.rank,) if program.rank is not None else program.world:
            found[rank] = lines
    return found
