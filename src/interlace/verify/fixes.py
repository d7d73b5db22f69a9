"""The fix of a fault, one for each kind, built from the ops, streams and ranks that it is about.

    fix = fixes.race(pairs)     # edits (edits.py); none where only words help

A fix is proved before it is printed (edits.py), so it need not be right, only likely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from interlace.ir.ops import (
    Alloc,
    Expect,
    Free,
    Group,
    Notify,
    Op,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.program import Program, spots
from interlace.ir.types import Index, Others, RankIndex
from interlace.verify.accesses.memory import ByteAccess
from interlace.verify.edits import Edit, Fix
from interlace.verify.happens_before.graph import Part
from interlace.verify.happens_before.source import Flaw, LoweredProgram

RankPair = tuple[int, int]


class OpPlace(NamedTuple):
    """An op of a Program, its begin (-1) or its return, with its stream."""

    program: int
    at: int
    stream: str


class Fixes:
    """Builds the fixes for faults of one set of Programs."""

    def __init__(self, sources: Sequence[LoweredProgram]) -> None:
        self.sources = sources
        self._taken: set[str] | None = None

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

    # Races: an event on one rank, signals between ranks

    def race(self, pairs: Sequence[tuple[ByteAccess, ByteAccess]]) -> Fix:
        """Orders two accesses, of which the first had better come first."""
        first, second = pairs[0]
        if first.free and first.item.ordering.frees is not None:
            return self.free_later(first.place.source, first.item.version)
        if second.free and second.item.ordering.takes is not None:
            return self.alloc_sooner(second.place.source, second.item.version)
        one, two = (_place(e.place.source, e.item.index) for e in (first, second))
        ranks = {(a.place.rank, b.place.rank) for a, b in pairs}
        cross = {(a, b) for a, b in ranks if a != b}
        event = self._event(one, two) if len(cross) < len(ranks) else ()
        signals = self._signals(one, two, cross) if cross else ()
        complete = bool(event) == (len(cross) < len(ranks)) and bool(signals) == bool(cross)
        return (*event, *signals) if complete else ()

    def _event(self, one: OpPlace, two: OpPlace) -> Fix:
        """One op before another that is listed later, by a recorded or a new event."""
        if one.program != two.program or one.at >= two.at or one.stream == two.stream:
            return ()
        last: dict[str, str] = {}
        for op in self.sources[one.program].program.ops[max(one.at, 0) : two.at]:
            for member in op.steps:
                if (event := member.ordering().records) is not None:
                    last[event] = op.stream
        recorded = next((name for name, stream in last.items() if stream == one.stream), None)
        if recorded is not None:
            return (_before(two, Wait(event=recorded, stream=two.stream)),)
        event = next(self.names("e"))
        record, wait = Record(event=event, stream=one.stream), Wait(event=event, stream=two.stream)
        return _after(one, record), _before(two, wait)

    def _signals(self, one: OpPlace, two: OpPlace, ranks: set[RankPair]) -> Fix:
        """Signals from the ranks of one op to those of the other, in the team that takes fewest."""
        source, sink = self.sources[one.program].program, self.sources[two.program].program
        teams = _shared_teams(source, sink, ranks)
        if not teams:
            return ()
        team, offsets = min(teams, key=lambda pair: len(pair[1]))
        size = source.team(team).size
        ends: list[tuple[Index | Others, Index | Others]]
        if source.rank is not None:
            ((a, b),) = ranks
            member = source.where(a).member(team)
            ends = [(member.ranks.index(b), member.index)]
        elif 1 < len(offsets) == size - 1:
            ends = [(Others(team), Others(team))]
        else:
            ends = [(RankIndex(team, k), RankIndex(team, -k)) for k in offsets]
        edits: list[Edit] = []
        for name, (to, of) in zip(self.names("s"), ends, strict=False):
            notify = Notify(signal=name, peer=to, team=team, stream=one.stream)
            expect = Expect(signal=name, peer=of, team=team, stream=two.stream)
            edits += [_after(one, notify), _before(two, expect)]
        return tuple(edits)

    def notifies(self, places: Sequence[tuple[int, int]]) -> Fix:
        """Two Notifies that raise one signal: by an event and, where need be, a larger value."""
        (k, one), (other, two) = places[:2]
        source, (low, high) = self.sources[k], sorted((one, two))
        first, second = source.program.ops[low], source.program.ops[high]
        if k != other or not (isinstance(first, Notify) and isinstance(second, Notify)):
            return ()
        event = self._event(_place(source, low), _place(source, high))
        if first.value < second.value:
            return event
        return (*event, Edit(k, dataclasses.replace(second, value=first.value + 1), index=high))

    # Lifetimes, and other faults of the list

    def flaw(self, source: LoweredProgram, flaw: Flaw) -> Fix:
        """For a fault of the list order alone."""
        k, items = source.number, [item for item, _, _ in flaw.ops]
        match flaw.kind:
            case "leak":
                return self.free_later(source, items[0].version)
            case "double-free" | "bad-free":
                return (Edit(k, index=items[-1].index),)
            case "use-before-alloc":
                number = next(n for n, v in enumerate(source.versions) if v.alloc == items[1].index)
                return self.alloc_sooner(source, number)
            case "result":
                return _fresh(source, flaw.ops[0][2])
            case "event":
                wait, at = items[0].op, items[0].index
                assert isinstance(wait, Wait)
                if wait is source.program.ops[at] and len(items) > 1:
                    return (Edit(k, index=items[1].index, anchor=at),)
                own = source.program.ops[at].stream
                other = next((one for one in source.program.streams() if one != own), None)
                if other is None:
                    return ()
                return (Edit(k, Record(event=wait.event, stream=other), anchor=at),)
            case _:
                return ()

    def free_later(self, source: LoweredProgram, number: int) -> Fix:
        """A Free after all uses, by list order and by events; added where there is none."""
        version, ops, k = source.versions[number], source.program.ops, source.number
        if version.alloc < 0 or any(touch.version == number for touch in source.exit.touches):
            return ()
        uses = {ops[i].stream: i for i in source.uses(number) or [version.alloc]}
        last = max(uses.values())
        stream = ops[version.free if version.free >= 0 else last].stream
        edits: list[Edit] = []
        others = [(other, use) for other, use in uses.items() if other != stream]
        for event, (other, use) in zip(self.names("e"), others, strict=False):
            edits += [
                Edit(k, Record(event=event, stream=other), anchor=use, after=True),
                Edit(k, Wait(event=event, stream=stream), anchor=last, after=True),
            ]
        if version.free >= 0:
            return (*edits, Edit(k, index=version.free, anchor=last, after=True))
        free = Free(buffer=version.buffer.name, stream=stream)
        return (*edits, Edit(k, free, anchor=last, after=True))

    def alloc_sooner(self, source: LoweredProgram, number: int) -> Fix:
        """An Alloc before the first use, by list order and by an event."""
        version, ops, k = source.versions[number], source.program.ops, source.number
        uses = source.uses(number)
        if not uses or version.alloc < 0 or uses[0] > version.alloc:
            return ()
        at, own, other = uses[0], ops[version.alloc].stream, ops[uses[0]].stream
        alloc = Edit(k, index=version.alloc, anchor=at)
        if own == other:
            return (alloc,)
        event = next(self.names("e"))
        record = Edit(k, Record(event=event, stream=own), anchor=at)
        return alloc, record, Edit(k, Wait(event=event, stream=other), anchor=at)

    # Deadlocks

    def cycle(self, links: Sequence[tuple[Part, Part]]) -> Fix:
        """Opens a cycle of waits: in each pair the first cannot go before the other has."""
        local = [link for link in links if link[0][0] is link[1][0]]
        for (place, item), (_, other) in [*segments(links), *local]:
            source = place.source
            low, high = sorted((item.index, other.index))
            if 0 <= low < high < len(source.program.ops):
                return _grouped(source, low, high) or (Edit(source.number, index=high, anchor=low),)
        return ()

    def never(self, part: Part) -> Fix:
        """For an op that waits for what never comes."""
        source, item = part[0].source, part[1]
        if item.ordering.expects:
            return self._notified(part)
        if item.ordering.messages and not item.members:
            return (Edit(source.number, index=item.index),)
        if item.ordering.takes is None:
            return ()
        return tuple(
            edit
            for one in self.sources
            for number, version in enumerate(one.versions)
            if version.symmetric and version.free < 0 <= version.alloc
            for edit in self.free_later(one, number)
        )

    def _notified(self, part: Part) -> Fix:
        """The Notify that an Expect lacks, where the writer has written; or no Expect."""
        (place, item), op = part, part[1].op
        source, where = place.source, place.where
        assert isinstance(op, Expect)
        member = where.member(op.team)
        to: Index | Others
        if isinstance(op.peer, Others):
            to, writers = op.peer, {*member.ranks} - {place.rank}
        else:
            to, writers = member.index, {member.ranks[where.index(op.peer)]}
            if source.program.rank is None:
                relative = isinstance(op.peer, RankIndex) and op.peer.team == op.team
                offset = op.peer.offset if isinstance(op.peer, RankIndex) else 0
                to = RankIndex(op.team, -offset) if relative else Others(op.team)
        sources = [s for s in self.sources if writers & {*s.ranks}]
        ops = sources[0].program.ops if len(sources) == 1 else ()
        alone = source.program.rank is not None and sources == [source]
        if not ops or alone:
            whole = source.program.ops[item.index] is op
            return (Edit(source.number, index=item.index),) if whole else ()
        k = sources[0].number
        for i, raising in enumerate(ops):
            if isinstance(raising, Notify) and raising.signal == op.signal:
                if raising.value < op.value:
                    return (Edit(k, dataclasses.replace(raising, value=op.value), index=i),)
                if raising.peer != to:
                    return (Edit(k, dataclasses.replace(raising, peer=to), index=i),)
        at = max((i for i in range(len(ops)) if _writes_to_team(sources[0], i)), default=-1)
        at = at if at >= 0 else len(ops) - 1
        notify = Notify(
            signal=op.signal, peer=to, team=op.team, value=op.value, stream=ops[at].stream
        )
        return (Edit(k, notify, anchor=at, after=True),)


def _place(source: LoweredProgram, index: int) -> OpPlace:
    ops = source.program.ops
    op = ops[index] if 0 <= index < len(ops) else None
    stream = op.stream if op is not None else source.streams[0].partition(", part")[0]
    return OpPlace(source.number, index, stream)


def _after(place: OpPlace, op: Op) -> Edit:
    """Adds an op right after another, or at the begin."""
    return Edit(place.program, op, anchor=max(place.at, 0), after=place.at >= 0)


def _before(place: OpPlace, op: Op) -> Edit:
    """Adds an op right before another, or at the end."""
    return Edit(place.program, op, anchor=max(place.at, 0))


def _shared_teams(
    source: Program, sink: Program, ranks: set[RankPair]
) -> list[tuple[str, list[int]]]:
    """The teams that hold each of the pairs, with the distances in them."""
    if (source.rank is None) != (sink.rank is None):
        return []
    shared = {team.name for team in sink.teams}
    teams: list[tuple[str, list[int]]] = []
    for team in source.teams:
        offsets: set[int] = set()
        for a, b in ranks:
            member = source.where(a).members.get(team.name)
            if team.name not in shared or member is None or b not in member.ranks:
                break
            offsets.add((member.ranks.index(b) - member.index) % len(member.ranks))
        else:
            near = {k if 2 * k <= team.size else k - team.size for k in offsets}
            teams.append((team.name, sorted(near, key=abs)))
    return teams


def own_storage(entry: ByteAccess) -> Fix:
    """Takes a buffer out of the storage that it shares with others."""
    source = entry.place.source
    for version in source.versions:
        if version.shared and version.buffer.name == entry.content.name:
            return _reallocated(source, version.alloc, storage=None, offset=0)
    return ()


def _fresh(source: LoweredProgram, name: str) -> Fix:
    """A local buffer allocated anew in every run and never freed."""
    for version in source.versions:
        if version.buffer.name == name and not version.symmetric:
            removed = (Edit(source.number, index=version.free),) if version.free >= 0 else ()
            fix = _reallocated(source, version.alloc, kind="fresh", storage=None, offset=0)
            return (*fix, *removed) if fix else ()
    return ()


def _reallocated(source: LoweredProgram, alloc: int, **changes: object) -> Fix:
    op = source.program.ops[alloc] if alloc >= 0 else None
    if not isinstance(op, Alloc):
        return ()
    buffer = dataclasses.replace(op.buffer, **changes)
    return (Edit(source.number, dataclasses.replace(op, buffer=buffer), index=alloc),)


def _grouped(source: LoweredProgram, low: int, high: int) -> Fix:
    """Two messages as one group."""
    members: list[Send | Recv] = []
    for op in (first := source.program.ops[low], source.program.ops[high]):
        if isinstance(op, Group):
            members += op.ops
        elif isinstance(op, Send | Recv):
            members.append(op)
        else:
            return ()
    both = tuple(dataclasses.replace(one, stream=first.stream) for one in members)
    group = Group(ops=both, stream=first.stream, site=first.site, loc=first.loc)
    return Edit(source.number, group, index=low), Edit(source.number, index=high)


def segments(links: Sequence[tuple[Part, Part]]) -> list[tuple[Part, Part]]:
    """Where a cycle of waits enters and leaves each rank: a peer waits for the first op, which
    comes only after the second, which waits for a peer.
    """
    found: list[tuple[Part, Part]] = []
    for part, other in links:
        if part[0] is other[0]:
            if found and found[-1][1] == part:
                found[-1] = found[-1][0], other
            else:
                found.append((part, other))
    if len(found) > 1 and found[-1][1] == found[0][0]:
        found[0] = found.pop()[0], found[0][1]
    return found


def _writes_to_team(source: LoweredProgram, index: int) -> bool:
    """Returns True if an op writes a buffer that peers read."""
    item = source.items[index]
    return any(
        touch.write and source.versions[touch.version].buffer.team is not None
        for one in (item, *item.members)
        for touch in one.touches
    )
