"""Which edits may fix a fault: the few that its kind suggests, the likeliest first, none tried.

    Proposals(sources).race(pairs)      # an event or a signal, either way round, a barrier, ...

Two accesses of one rank are ordered by an event, which can only lead from the op that is listed
first to the other; those of two ranks by a signal, or by a barrier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from interlace.ir.ops import (
    Alloc,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    FusedMember,
    Group,
    Notify,
    Op,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.program import Program, spots
from interlace.ir.types import Buffer, Index, Others, RankIndex
from interlace.ir.view import View
from interlace.verify.fixes import Edit, Fix
from interlace.verify.graph import Part
from interlace.verify.memory import Entry
from interlace.verify.source import Code, Flaw, Item, Source

MAX_PLACES = 8
"""Places at which one missing op is tried."""

Pair = tuple[Entry, Entry]
RankPair = tuple[int, int]


class Point(NamedTuple):
    """An op of a Program, or its begin (-1) or its return; and the stream that it stands on."""

    program: int
    at: int
    stream: str
    member: int = -1
    """Which member of a Fused, where it is one that is meant and not the whole."""


class Proposals:
    """The fixes that suggest themselves for the faults of one set of Programs."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self._numbers: dict[int, int] = {}
        self._taken: set[str] | None = None

    def number(self, source: Source) -> int:
        """The place of a Source in the set."""
        if not self._numbers:
            self._numbers = {id(source): k for k, source in enumerate(self.sources)}
        return self._numbers[id(source)]

    def point(self, source: Source, index: int) -> Point:
        """An op, by its Source and index."""
        number = self.number(source)
        ops = source.program.ops
        op = ops[index] if 0 <= index < len(ops) else None
        stream = op.stream if op is not None else source.streams[0].partition(", part")[0]
        return Point(number, index, stream)

    def names(self, letter: str) -> Iterator[str]:
        """Names that no event, signal or buffer of the set has."""
        if self._taken is None:
            programs = [source.program for source in self.sources]
            self._taken = {name for program in programs for name in program.buffers()}
            for program in programs:
                for _, op in spots(program.ops):
                    if isinstance(op, Record | Wait):
                        self._taken.add(op.event)
                    elif isinstance(op, Notify | Expect):
                        self._taken.add(op.signal)
        taken = self._taken
        return (name for name in (f"{letter}{n}" for n in count(1)) if name not in taken)

    # Races

    def race(self, pairs: Sequence[Pair]) -> tuple[Fix, ...]:
        """Orders two accesses, of which the first had better come first."""
        first, second = pairs[0]
        one = self.point(first.frame.place.source, first.item.index)
        two = self.point(second.frame.place.source, second.item.index)
        ranks = {(a.frame.place.rank, b.frame.place.rank) for a, b in pairs}
        if one[:2] == two[:2]:
            alone = all(a == b for a, b in ranks)
            return tuple(self.within(first, second)) if alone else ()
        found = self.order(one, two, ranks)
        back = {(b, a) for a, b in ranks}
        inner = self.member(one, first), self.member(two, second)
        if inner != (one, two):
            found += self.order(*inner, ranks)
        frees = [entry for entry in (first, second) if entry.item.code is Code.FREE and entry.free]
        allocs = [e for e in (first, second) if e.item.code is Code.ALLOC and e.free]
        for entry in frees:
            found += self.free_later(entry.frame.place.source, entry.item.version)
        for entry in allocs:
            found += self.alloc_sooner(entry.frame.place.source, entry.item.version)
        found += self.order(two, one, back)
        found += self.barrier(one, two, ranks)
        if first.content is not second.content or frees:
            found += [fix for entry in (second, first) for fix in self.own_storage(entry)]
        return tuple(found)

    def order(self, one: Point, two: Point, ranks: set[RankPair]) -> list[Fix]:
        """One before two, on each of these pairs of ranks."""
        cross = {(a, b) for a, b in ranks if a != b}
        event: Fix = ()
        if len(cross) < len(ranks):
            if one.program != two.program or one.at >= two.at or one.stream == two.stream:
                return []
            event = self.event(one, two, next(self.names("e")))
        if not cross:
            return [event]
        return [(*event, *signals) for signals in self.signals(one, two, cross)]

    def event(self, one: Point, two: Point, name: str) -> Fix:
        """What orders one op of a rank before another, on another stream."""
        return (
            self.after(one, Record(event=name, stream=one.stream)),
            self.before(two, Wait(event=name, stream=two.stream)),
        )

    def member(self, point: Point, entry: Entry) -> Point:
        """The member of a Fused that does the access; the op, where it is none."""
        items = self.sources[point.program].items
        if 0 <= point.at < len(items) and items[point.at].code is Code.FUSED:
            members = items[point.at].members
            which = next((k for k, one in enumerate(members) if one is entry.item), -1)
            return point._replace(member=which)
        return point

    def inside(self, point: Point, op: Op, offset: int) -> Edit:
        """Adds an op to a part of a Fused, beside one of its members."""
        fused = self.sources[point.program].program.ops[point.at]
        assert isinstance(fused, Fused)
        assert isinstance(op, Wait | Expect | Record | Notify)
        place, parts = point.member + offset, list(fused.parts)
        for p, part in enumerate(parts):
            if point.member < len(part):
                new = dataclasses.replace(op, stream=fused.stream, site=fused.site)
                parts[p] = (*part[:place], new, *part[place:])
                break
            point, place = point._replace(member=point.member - len(part)), place - len(part)
        return Edit(point.program, dataclasses.replace(fused, parts=tuple(parts)), index=point.at)

    def after(self, point: Point, op: Op) -> Edit:
        """Adds an op right after another, or at the begin."""
        if point.member >= 0:
            return self.inside(point, op, 1)
        if point.at < 0:
            return Edit(point.program, op, anchor=0)
        return Edit(point.program, op, anchor=point.at, after=True)

    def before(self, point: Point, op: Op) -> Edit:
        """Adds an op right before another, or at the end."""
        if point.member >= 0:
            return self.inside(point, op, 0)
        return Edit(point.program, op, anchor=max(point.at, 0))

    def signals(self, one: Point, two: Point, ranks: set[RankPair]) -> Iterator[Fix]:
        """Signals from the ranks of one op to those of the other: the fewest, then to all."""
        source, sink = self.sources[one.program].program, self.sources[two.program].program
        for team, offsets in self.teams(source, sink, ranks):
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

    def teams(
        self, source: Program, sink: Program, ranks: set[RankPair]
    ) -> list[tuple[str, list[int]]]:
        """The teams that hold each of the pairs, with how far apart these are in it."""
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

    def barrier(self, one: Point, two: Point, ranks: set[RankPair]) -> list[Fix]:
        """A barrier between two ops of a Program that all ranks of a team run."""
        program = self.sources[one.program].program
        if one.program != two.program or program.rank is not None:
            return []
        low, high = sorted((one, two), key=lambda point: point.at)
        found: list[Fix] = []
        for team, _ in self.teams(program, program, {(a, b) for a, b in ranks if a != b}):
            meet = self.before(high, Collective(kind="barrier", team=team, stream=high.stream))
            event: Fix = ()
            if low.stream != high.stream and low.at >= 0:
                event = self.event(low, high, next(self.names("e")))
            found.append((*event, meet))
        return found

    def own_storage(self, entry: Entry) -> Iterator[Fix]:
        """Takes a buffer out of the storage that it shares with others."""
        source = entry.frame.place.source
        version = next(
            (v for v in source.versions if v.shared and v.buffer.name == entry.content.name), None
        )
        if version is None or version.alloc < 0:
            return
        op = source.program.ops[version.alloc]
        if isinstance(op, Alloc):
            own = dataclasses.replace(op.buffer, storage=None, offset=0)
            new = dataclasses.replace(op, buffer=own)
            yield (Edit(self.number(source), new, index=version.alloc),)

    # Two accesses of one op

    def within(self, first: Entry, second: Entry) -> Iterator[Fix]:
        """Orders two members of a Fused, or takes one of two out of a Group."""
        source = first.frame.place.source
        index, number = first.item.index, self.number(source)
        op = source.program.ops[index]
        places = [
            next((k for k, item in enumerate(source.items[index].members) if item is one), -1)
            for one in (first.item, second.item)
        ]
        if isinstance(op, Fused) and min(places) >= 0:
            for new in _in_order_of_parts(op, min(places), max(places), next(self.names("e"))):
                yield (Edit(number, new, index=index),)
        if isinstance(op, Group) and min(places) >= 0:
            for k in dict.fromkeys(places):
                rest = (*op.ops[:k], *op.ops[k + 1 :])
                left = rest[0] if len(rest) == 1 else dataclasses.replace(op, ops=rest)
                for after in (True, False):
                    beside = Edit(number, op.ops[k], anchor=index, after=after)
                    yield (Edit(number, left, index=index), beside)
            for k, entry in zip(places, (first, second), strict=True):
                member = op.ops[k]
                if isinstance(member, Recv) and entry.write:
                    yield self.through_buffer(number, index, op, k, entry)

    def through_buffer(self, number: int, index: int, op: Group, k: int, entry: Entry) -> Fix:
        """Receives into a buffer of its own, and copies from there after the group."""
        name, box, member = next(self.names("t")), entry.region.exact, op.ops[k]
        assert isinstance(member, Recv)
        alloc = Alloc(buffer=Buffer(name, box.dtype, box.sizes), stream=op.stream)
        into = dataclasses.replace(member, dst=View(name))
        new = dataclasses.replace(op, ops=(*op.ops[:k], into, *op.ops[k + 1 :]))
        copy = Copy(src=View(name), dst=member.dst, stream=op.stream)
        return (
            Edit(number, alloc, anchor=index),
            Edit(number, new, index=index),
            Edit(number, copy, anchor=index, after=True),
        )

    # Lifetimes

    def free_later(self, source: Source, number: int) -> list[Fix]:
        """A Free after all uses, by list order and by events; added where there is none."""
        version, program = source.versions[number], source.program
        k, name = self.number(source), version.buffer.name
        uses = {program.ops[i].stream: i for i in _uses(source, number)}
        if any(touch.version == number for touch in source.exit.touches):
            return []
        if not uses:
            uses = {program.ops[version.alloc].stream: version.alloc}
        last = max(uses.values())
        at_last = program.ops[last].stream
        index = version.free if version.free >= 0 else None
        own = at_last if index is None else program.ops[index].stream
        found: list[Fix] = []
        for stream in dict.fromkeys((own, at_last)):
            waits: list[Edit] = []
            for event, (other, use) in zip(self.names("e"), uses.items(), strict=False):
                if other != stream:
                    waits += [
                        Edit(k, Record(event=event, stream=other), anchor=use, after=True),
                        Edit(k, Wait(event=event, stream=stream), anchor=last, after=True),
                    ]
            op = Free(buffer=name, stream=stream)
            changed = None if index is not None and stream == own else op
            free = Edit(k, changed, index=index, anchor=last, after=True)
            found += [(free,), (*waits, free)] if waits else [(free,)]
        return found

    def alloc_sooner(self, source: Source, number: int) -> list[Fix]:
        """An Alloc before the first use, by list order and by an event."""
        version, program = source.versions[number], source.program
        uses = _uses(source, number)
        if not uses or version.alloc < 0 or uses[0] > version.alloc:
            return []
        k, op, at = self.number(source), program.ops[version.alloc], uses[0]
        alloc, event = Edit(k, index=version.alloc, anchor=at), next(self.names("e"))
        ready = (
            Edit(k, Record(event=event, stream=op.stream), anchor=at),
            Edit(k, Wait(event=event, stream=program.ops[at].stream), anchor=at),
        )
        return [(alloc,), (alloc, *ready)]

    def flaw(self, source: Source, flaw: Flaw) -> tuple[Fix, ...]:
        """For a fault that list order alone shows."""
        k, items = self.number(source), [item for item, _, _ in flaw.ops]
        places = [item.index for item in items]
        removed: list[Fix] = [(Edit(k, index=i),) for i in reversed(places)]
        match flaw.kind:
            case "leak":
                return tuple(self.free_later(source, items[0].version))
            case "double-free" | "bad-free":
                return tuple(removed)
            case "use-before-alloc":
                number = next(n for n, v in enumerate(source.versions) if v.alloc == places[1])
                return tuple(self.alloc_sooner(source, number))
            case "result":
                return tuple(self.made_fresh(source, flaw.ops[0][2]))
            case "event" if isinstance(source.program.ops[places[0]], Wait):
                return tuple(self.recorded(source, places))
            case _:
                return ()

    def made_fresh(self, source: Source, name: str) -> Iterator[Fix]:
        """A local buffer made anew in every run, which nobody frees."""
        k = self.number(source)
        for version in source.versions:
            op = source.program.ops[version.alloc] if version.alloc >= 0 else None
            if version.buffer.name == name and not version.symmetric and isinstance(op, Alloc):
                fresh = dataclasses.replace(op.buffer, kind="fresh", storage=None, offset=0)
                new = Edit(k, dataclasses.replace(op, buffer=fresh), index=version.alloc)
                yield (new, *([Edit(k, index=version.free)] if version.free >= 0 else []))

    def recorded(self, source: Source, places: list[int]) -> Iterator[Fix]:
        """A Record before the Wait that has none: the one listed later, or another."""
        k, wait = self.number(source), source.program.ops[places[0]]
        assert isinstance(wait, Wait)
        if len(places) > 1 and isinstance(source.program.ops[places[1]], Record):
            yield (Edit(k, index=places[1], anchor=places[0]),)
            yield (Edit(k, index=places[0], anchor=places[1], after=True),)
        for stream in source.program.streams():
            if stream != wait.stream:
                record = Record(event=wait.event, stream=stream)
                yield (Edit(k, record, anchor=places[0]),)

    # Deadlocks

    def cycle(self, links: Sequence[tuple[Part, Part]]) -> tuple[Fix, ...]:
        """Opens a circle of waits: in each pair the first cannot go before the other has."""
        moves: list[tuple[Edit, Edit]] = []
        found: list[Fix] = []
        for (frame, item), (other_frame, other) in links:
            source = frame.place.source
            num_ops = len(source.program.ops)
            if frame.place is not other_frame.place:
                continue
            if not (0 <= item.index < num_ops and 0 <= other.index < num_ops):
                continue
            if item.index == other.index:
                found += self.parts_in_order(source, item, other)
                continue
            found += self.grouped(source, item.index, other.index)
            k, (low, high) = self.number(source), sorted((item.index, other.index))
            sooner = Edit(k, index=high, anchor=low)
            moves.append((sooner, Edit(k, index=low, anchor=high, after=True)))
        pairs = dict.fromkeys(moves)
        if len(pairs) > 1 and len({pair[0].program for pair in pairs}) == len(pairs):
            found += [tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)]
        found += [(pair[0],) for pair in pairs]
        found += [(pair[1],) for pair in pairs]
        return tuple(found)

    def parts_in_order(self, source: Source, item: Item, other: Item) -> list[Fix]:
        """The part of one member of a Fused before that of another."""
        op = source.program.ops[item.index]
        if not isinstance(op, Fused):
            return []
        members = source.items[item.index].members
        parts = [k for k, part in enumerate(op.parts) for _ in part]
        mine, theirs = (
            next((parts[k] for k, one in enumerate(members) if one is which), 0)
            for which in (item, other)
        )
        if mine <= theirs:
            return []
        moved = list(op.parts)
        moved.insert(theirs, moved.pop(mine))
        new = dataclasses.replace(op, parts=tuple(moved))
        return [(Edit(self.number(source), new, index=item.index),)]

    def grouped(self, source: Source, one: int, two: int) -> list[Fix]:
        """Two messages as one group."""
        low, high = sorted((one, two))
        ops = [source.program.ops[low], source.program.ops[high]]
        members: list[Send | Recv] = []
        for op in ops:
            if isinstance(op, Group):
                members += op.ops
            elif isinstance(op, Send | Recv):
                members.append(op)
            else:
                return []
        members = [dataclasses.replace(op, stream=ops[0].stream) for op in members]
        new = Group(ops=tuple(members), stream=ops[0].stream, site=ops[0].site, loc=ops[0].loc)
        k = self.number(source)
        mine = (Edit(k, new, index=low), Edit(k, index=high))
        return [mine]

    def never(self, part: Part) -> tuple[Fix, ...]:
        """For an op that waits for what never comes."""
        frame, item = part
        source = frame.place.source
        if item.code is Code.EXPECT:
            found = list(self.notified(part))
        elif item.code in (Code.SEND, Code.RECV):
            found = [(Edit(self.number(source), index=item.index),)]
        elif item.code is Code.ALLOC:
            leaks = [
                self.free_later(one, number)
                for one in self.sources
                for number, version in enumerate(one.versions)
                if version.symmetric and version.free < 0 <= version.alloc
            ]
            found = [tuple(edit for fixes in leaks for edit in fixes[n]) for n in (0, -1)]
        else:
            found = []
        return tuple(fix for fix in found if fix)

    def notifies(self, places: Sequence[tuple[int, int]]) -> tuple[Fix, ...]:
        """Two Notifies that raise one signal: by an event, or by a larger value."""
        (k, one), (other, two) = places[:2]
        source = self.sources[k]
        ops, (low, high) = source.program.ops, sorted((one, two))
        first, second = ops[low], ops[high]
        if k != other or not (isinstance(first, Notify) and isinstance(second, Notify)):
            return ()
        event: Fix = ()
        if first.stream != second.stream:
            ends = self.point(source, low), self.point(source, high)
            event = self.event(*ends, next(self.names("e")))
        more = dataclasses.replace(second, value=max(first.value, second.value) + 1)
        grow = (Edit(k, more, index=high),)
        return tuple(fix for fix in (event, (*event, *grow)) if fix)

    def notified(self, part: Part) -> Iterator[Fix]:
        """The Notify that an Expect lacks, where the writer has written; or no Expect."""
        (frame, item), op = part, part[1].op
        source, where = frame.place.source, frame.place.where
        assert isinstance(op, Expect)
        member = where.member(op.team)
        if isinstance(op.peer, Others):
            to: Index | Others = op.peer
            writers = [rank for rank in member.ranks if rank != frame.place.rank]
        else:
            writers = [member.ranks[where.index(op.peer)]]
            to = member.index
            if source.program.rank is None:
                relative = isinstance(op.peer, RankIndex) and op.peer.team == op.team
                to = RankIndex(op.team, -_offset(op.peer)) if relative else Others(op.team)
        sources = [s for s in self.sources if set(writers) & set(s.ranks)]
        if len(sources) == 1 and (source.program.rank is None or sources[0] is not source):
            ops, k = sources[0].program.ops, self.number(sources[0])
            for i, raising in enumerate(ops):
                if isinstance(raising, Notify) and raising.signal == op.signal:
                    if raising.value < op.value:
                        yield (Edit(k, dataclasses.replace(raising, value=op.value), index=i),)
                    elif raising.peer != to:
                        yield (Edit(k, dataclasses.replace(raising, peer=to), index=i),)
            places = [i for i in range(len(ops)) if _reaches_peers(sources[0], i)]
            told = [to, Others(op.team)] if isinstance(to, RankIndex) else [to]
            for i in dict.fromkeys([*places[::-1][:MAX_PLACES], len(ops) - 1]):
                for peer in told:
                    stream, value = ops[i].stream, op.value
                    notify = Notify(
                        signal=op.signal, peer=peer, team=op.team, value=value, stream=stream
                    )
                    yield (Edit(k, notify, anchor=i, after=True),)
        if source.program.ops[item.index] is op:
            yield (Edit(self.number(source), index=item.index),)


def _offset(index: Index) -> int:
    return index.offset if isinstance(index, RankIndex) else 0


def _uses(source: Source, version: int) -> list[int]:
    """The ops that touch a buffer, in list order."""
    return [
        item.index
        for item in source.items
        if any(t.version == version for one in (item, *item.members) for t in one.touches)
    ]


def _reaches_peers(source: Source, index: int) -> bool:
    """Whether an op writes what peers read."""
    item = source.items[index]
    return any(
        touch.write and (source.versions[touch.version].buffer.team is not None)
        for one in (item, *item.members)
        for touch in one.touches
    )


def _in_order_of_parts(op: Fused, low: int, high: int, event: str) -> Iterator[Fused]:
    """The Fused with one member before another of a later part: by an event, or in one part."""
    spots = [(p, m) for p, part in enumerate(op.parts) for m in range(len(part))]
    (p, m), (q, n) = spots[low], spots[high]
    if p == q:
        return
    parts: list[tuple[FusedMember, ...]] = list(op.parts)
    record = Record(event=event, stream=op.stream, site=op.site)
    wait = Wait(event=event, stream=op.stream, site=op.site)
    parts[p] = (*parts[p][: m + 1], record, *parts[p][m + 1 :])
    parts[q] = (*parts[q][:n], wait, *parts[q][n:])
    yield dataclasses.replace(op, parts=tuple(parts))
    for at in (p, q):
        merged = [part for k, part in enumerate(op.parts) if k not in (p, q)]
        merged.insert(at if at == p else at - 1, (*op.parts[p], *op.parts[q]))
        yield dataclasses.replace(op, parts=tuple(merged))
