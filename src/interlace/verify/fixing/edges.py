"""Edits that order two ops: an event on one rank, a signal or a barrier between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from interlace.ir.ops import Collective, Expect, Fused, FusedMember, Notify, Op, Record, Wait
from interlace.ir.program import Program, spots
from interlace.ir.types import Index, Others, RankIndex
from interlace.verify.accesses.memory import ByteAccess
from interlace.verify.fixing.edits import Edit, Fix
from interlace.verify.happens_before.source import LoweredProgram

RankPair = tuple[int, int]


class OpPlace(NamedTuple):
    """An op of a Program, its begin (-1) or its return, with its stream."""

    program: int
    at: int
    stream: str
    member: int = -1
    """The member of a Fused; -1: the whole op."""


class Edges:
    """The ops and names of one set of Programs, and what can be added to order the ops."""

    def __init__(self, sources: Sequence[LoweredProgram]) -> None:
        self.sources = sources
        self._taken: set[str] | None = None

    def point(self, source: LoweredProgram, index: int) -> OpPlace:
        """The place of an op."""
        ops = source.program.ops
        op = ops[index] if 0 <= index < len(ops) else None
        stream = op.stream if op is not None else source.streams[0].partition(", part")[0]
        return OpPlace(source.number, index, stream)

    def names(self, letter: str) -> Iterator[str]:
        """Names that no event, signal or buffer of the set has."""
        if self._taken is None:
            programs = [source.program for source in self.sources]
            self._taken = {name for program in programs for name in program.buffers()}
            for ordering in [op.ordering() for program in programs for _, op in spots(program.ops)]:
                self._taken |= {name for name in (ordering.records, ordering.waits) if name}
                levels = (ordering.raises, ordering.expects)
                self._taken |= {level.signal for level in levels if level is not None}
        taken = self._taken
        return (name for name in (f"{letter}{n}" for n in count(1)) if name not in taken)

    def order(self, one: OpPlace, two: OpPlace, ranks: set[RankPair]) -> list[Fix]:
        """One before two, on each of these pairs of ranks."""
        cross = {(a, b) for a, b in ranks if a != b}
        event: Fix = ()
        if len(cross) < len(ranks):
            # An event leads only from the op that is listed first to the other.
            if one.program != two.program or one.at >= two.at or one.stream == two.stream:
                return []
            event = self.event(one, two, next(self.names("e")))
        if not cross:
            recorded = self.recorded_between(one, two)
            waits = [Wait(event=name, stream=two.stream) for name in recorded]
            return [*((self.before(two, wait),) for wait in waits), event]
        return [(*event, *signals) for signals in self.signals(one, two, cross)]

    def recorded_between(self, one: OpPlace, two: OpPlace) -> list[str]:
        """An event recorded after one op already, which a Wait before the other would see."""
        last: dict[str, str] = {}
        for op in self.sources[one.program].program.ops[max(one.at, 0) : two.at]:
            for member in op.steps:
                if (event := member.ordering().records) is not None:
                    last[event] = op.stream
        return [name for name, stream in last.items() if stream == one.stream][:1]

    def event(self, one: OpPlace, two: OpPlace, name: str) -> Fix:
        """Orders one op of a rank before another on another stream."""
        return (
            self.after(one, Record(event=name, stream=one.stream)),
            self.before(two, Wait(event=name, stream=two.stream)),
        )

    def member(self, point: OpPlace, entry: ByteAccess) -> OpPlace:
        """The place of the member that does the access, if the op is a Fused."""
        items = self.sources[point.program].items
        if 0 <= point.at < len(items) and items[point.at].is_fused:
            return point._replace(member=items[point.at].position(entry.item))
        return point

    def after(self, point: OpPlace, op: FusedMember) -> Edit:
        """Adds an op right after another, or at the begin."""
        if point.member >= 0:
            return self._inside(point, op, 1)
        return Edit(point.program, op, anchor=max(point.at, 0), after=point.at >= 0)

    def before(self, point: OpPlace, op: Op) -> Edit:
        """Adds an op right before another, or at the end."""
        if point.member >= 0:
            return self._inside(point, op, 0)
        return Edit(point.program, op, anchor=max(point.at, 0))

    def _inside(self, point: OpPlace, op: Op, offset: int) -> Edit:
        fused = self.sources[point.program].program.ops[point.at]
        assert isinstance(fused, Fused)
        part, index = member_spots(fused)[point.member]
        return Edit(point.program, with_members(fused, (part, index + offset, op)), index=point.at)

    def signals(self, one: OpPlace, two: OpPlace, ranks: set[RankPair]) -> Iterator[Fix]:
        """Signals from the ranks of one op to those of the other: the fewest, then to all."""
        source, sink = self.sources[one.program].program, self.sources[two.program].program
        for team, offsets in _shared_teams(source, sink, ranks):
            size = source.team(team).size
            ways: list[list[tuple[Index | Others, Index | Others]]] = []
            if source.rank is not None:
                ((a, b),) = ranks
                member = source.where(a).member(team)
                ways.append([(member.ranks.index(b), member.index)])
            else:
                ways.append([(RankIndex(team, k), RankIndex(team, -k)) for k in offsets])
                if size > 2:
                    ways.insert(len(offsets) < size - 1, [(Others(team), Others(team))])
            for way in ways:
                edits: list[Edit] = []
                for name, (to, of) in zip(self.names("s"), way, strict=False):
                    notify = Notify(signal=name, peer=to, team=team, stream=one.stream)
                    expect = Expect(signal=name, peer=of, team=team, stream=two.stream)
                    edits += [self.after(one, notify), self.before(two, expect)]
                yield tuple(edits)

    def barrier(self, one: OpPlace, two: OpPlace, ranks: set[RankPair]) -> list[Fix]:
        """A barrier between two ops of a Program that all ranks of a team run."""
        program = self.sources[one.program].program
        if one.program != two.program or program.rank is not None:
            return []
        low, high = sorted((one, two), key=lambda point: point.at)
        event: Fix = ()
        if low.stream != high.stream and low.at >= 0:
            event = self.event(low, high, next(self.names("e")))
        teams = _shared_teams(program, program, {(a, b) for a, b in ranks if a != b})
        meets = [Collective(kind="barrier", team=team, stream=high.stream) for team, _ in teams]
        return [(*event, self.before(high, meet)) for meet in meets]


def _shared_teams(
    source: Program, sink: Program, ranks: set[RankPair]
) -> list[tuple[str, list[int]]]:
    """At most two teams that hold each of the pairs, with the distances in them."""
    if (source.rank is None) != (sink.rank is None):
        return []
    shared = {team.name for team in sink.teams}
    found: list[tuple[str, list[int]]] = []
    for team in source.teams:
        offsets: set[int] = set()
        for a, b in ranks:
            member = source.where(a).members.get(team.name)
            if team.name not in shared or member is None or b not in member.ranks:
                break
            offsets.add((member.ranks.index(b) - member.index) % len(member.ranks))
        else:
            near = {k if 2 * k <= team.size else k - team.size for k in offsets}
            found.append((team.name, sorted(near, key=abs)))
    return sorted(found, key=lambda pair: len(pair[1]))[:2]


def member_spots(fused: Fused) -> list[tuple[int, int]]:
    """The part of each member, and its index there."""
    return [(p, m) for p, part in enumerate(fused.parts) for m in range(len(part))]


def with_members(fused: Fused, *added: tuple[int, int, Op]) -> Fused:
    """The Fused with each op added to a part, before the member at that index."""
    parts: list[list[FusedMember]] = [list(part) for part in fused.parts]
    for part, index, op in added:
        assert isinstance(op, Wait | Expect | Record | Notify)
        own = dataclasses.replace(op, stream=fused.stream, site=fused.site)
        parts[part].insert(index, own)
    return dataclasses.replace(fused, parts=tuple(map(tuple, parts)), kernel=None)
