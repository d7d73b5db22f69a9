"""Which edits may fix a fault, by its kind; trials.py tries them.

race(edges, pairs)        # an event or a signal, either way round; a barrier; a Free moved; ...
flaw(edges, source, flaw) # for a fault that list order alone shows
cycle(edges, links)       # in each link, the first op cannot go before the other has
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from interlace.ir.ops import (
    Alloc,
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
from interlace.ir.types import Buffer, Index, Others, RankIndex
from interlace.ir.view import View
from interlace.verify.accesses.memory import ByteAccess
from interlace.verify.fixing.edges import Edges
from interlace.verify.fixing.edits import Edit, Fix
from interlace.verify.happens_before.graph import Part
from interlace.verify.happens_before.source import Flaw, Item, LoweredProgram

Pair = tuple[ByteAccess, ByteAccess]
MAX_PLACES = 8
"""Places at which one missing op is tried."""


# Races


def race(edges: Edges, pairs: Sequence[Pair]) -> tuple[Fix, ...]:
    """Orders two accesses, of which the first had better come first."""
    first, second = pairs[0]
    one = edges.point(first.frame.place.source, first.item.index)
    two = edges.point(second.frame.place.source, second.item.index)
    ranks = {(a.frame.place.rank, b.frame.place.rank) for a, b in pairs}
    if one[:2] == two[:2]:
        alone = all(a == b for a, b in ranks)
        return tuple(within(edges, first, second)) if alone else ()
    found = edges.order(one, two, ranks)
    back = {(b, a) for a, b in ranks}
    inner = edges.member(one, first), edges.member(two, second)
    if inner != (one, two):
        found += edges.order(*inner, ranks)
    frees = [
        entry for entry in (first, second) if entry.item.ordering.frees is not None and entry.free
    ]
    allocs = [e for e in (first, second) if e.item.ordering.takes is not None and e.free]
    for entry in frees:
        found += free_later(edges, entry.frame.place.source, entry.item.version)
    for entry in allocs:
        found += alloc_sooner(edges, entry.frame.place.source, entry.item.version)
    found += edges.order(two, one, back)
    found += edges.barrier(one, two, ranks)
    if first.content is not second.content or frees:
        found += [fix for entry in (second, first) for fix in own_storage(edges, entry)]
    return tuple(found)


def within(edges: Edges, first: ByteAccess, second: ByteAccess) -> Iterator[Fix]:
    """Orders two members of a Fused, or takes one of two out of a Group."""
    source = first.frame.place.source
    index, number = first.item.index, source.number
    op = source.program.ops[index]
    places = [
        next((k for k, item in enumerate(source.items[index].members) if item is one), -1)
        for one in (first.item, second.item)
    ]
    if isinstance(op, Fused) and min(places) >= 0:
        for new in _in_order_of_parts(op, min(places), max(places), next(edges.names("e"))):
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
                yield through_buffer(edges, number, index, op, k, entry)


def through_buffer(
    edges: Edges, number: int, index: int, op: Group, k: int, entry: ByteAccess
) -> Fix:
    """Receives into a buffer of its own, and copies from there after the group."""
    name, box, member = next(edges.names("t")), entry.region.exact, op.ops[k]
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
    yield dataclasses.replace(op, parts=tuple(parts), kernel=None)
    for at in (p, q):
        merged = [part for k, part in enumerate(op.parts) if k not in (p, q)]
        merged.insert(at if at == p else at - 1, (*op.parts[p], *op.parts[q]))
        yield dataclasses.replace(op, parts=tuple(merged), kernel=None)


# When a buffer is there


def free_later(edges: Edges, source: LoweredProgram, number: int) -> list[Fix]:
    """A Free after all uses, by list order and by events; added where there is none."""
    version, program = source.versions[number], source.program
    k, name = source.number, version.buffer.name
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
        others = [(other, use) for other, use in uses.items() if other != stream]
        for event, (other, use) in zip(edges.names("e"), others, strict=False):
            waits += [
                Edit(k, Record(event=event, stream=other), anchor=use, after=True),
                Edit(k, Wait(event=event, stream=stream), anchor=last, after=True),
            ]
        op = Free(buffer=name, stream=stream)
        changed = None if index is not None and stream == own else op
        free = Edit(k, changed, index=index, anchor=last, after=True)
        found += [(free,), (*waits, free)] if waits else [(free,)]
    return found


def alloc_sooner(edges: Edges, source: LoweredProgram, number: int) -> list[Fix]:
    """An Alloc before the first use, by list order and by an event."""
    version, program = source.versions[number], source.program
    uses = _uses(source, number)
    if not uses or version.alloc < 0 or uses[0] > version.alloc:
        return []
    k, op, at = source.number, program.ops[version.alloc], uses[0]
    alloc, event = Edit(k, index=version.alloc, anchor=at), next(edges.names("e"))
    ready = (
        Edit(k, Record(event=event, stream=op.stream), anchor=at),
        Edit(k, Wait(event=event, stream=program.ops[at].stream), anchor=at),
    )
    return [(alloc,), (alloc, *ready)]


def own_storage(edges: Edges, entry: ByteAccess) -> Iterator[Fix]:
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
        yield (Edit(source.number, new, index=version.alloc),)


def made_fresh(edges: Edges, source: LoweredProgram, name: str) -> Iterator[Fix]:
    """A local buffer made anew in every run, which nobody frees."""
    k = source.number
    for version in source.versions:
        op = source.program.ops[version.alloc] if version.alloc >= 0 else None
        if version.buffer.name == name and not version.symmetric and isinstance(op, Alloc):
            fresh = dataclasses.replace(op.buffer, kind="fresh", storage=None, offset=0)
            new = Edit(k, dataclasses.replace(op, buffer=fresh), index=version.alloc)
            yield (new, *([Edit(k, index=version.free)] if version.free >= 0 else []))


def recorded(
    edges: Edges, source: LoweredProgram, places: list[int], wait: Op | None
) -> Iterator[Fix]:
    """A Record before the Wait that has none: the one listed later, or another."""
    k, op = source.number, source.program.ops[places[0]]
    assert isinstance(wait, Wait)
    if wait is op and len(places) > 1 and isinstance(source.program.ops[places[1]], Record):
        yield (Edit(k, index=places[1], anchor=places[0]),)
        yield (Edit(k, index=places[0], anchor=places[1], after=True),)
    for stream in source.program.streams():
        if stream != op.stream:
            record = Record(event=wait.event, stream=stream)
            yield (Edit(k, record, anchor=places[0]),)


def flaw(edges: Edges, source: LoweredProgram, flaw: Flaw) -> tuple[Fix, ...]:
    """For a fault that list order alone shows."""
    k, items = source.number, [item for item, _, _ in flaw.ops]
    places = [item.index for item in items]
    removed: list[Fix] = [(Edit(k, index=i),) for i in reversed(places)]
    match flaw.kind:
        case "leak":
            return tuple(free_later(edges, source, items[0].version))
        case "double-free" | "bad-free":
            return tuple(removed)
        case "use-before-alloc":
            number = next(n for n, v in enumerate(source.versions) if v.alloc == places[1])
            return tuple(alloc_sooner(edges, source, number))
        case "result":
            return tuple(made_fresh(edges, source, flaw.ops[0][2]))
        case "event":
            return tuple(recorded(edges, source, places, items[0].op))
        case _:
            return ()


def _uses(source: LoweredProgram, version: int) -> list[int]:
    """The ops that touch a buffer, in list order."""
    return [
        item.index
        for item in source.items
        if any(t.version == version for one in (item, *item.members) for t in one.touches)
    ]


# Deadlocks


def cycle(edges: Edges, links: Sequence[tuple[Part, Part]]) -> tuple[Fix, ...]:
    """Opens a circle of waits: in each pair the first cannot go before the other has."""
    moves: list[tuple[Edit, Edit]] = []
    found: list[Fix] = []
    local = [link for link in links if link[0][0].place is link[1][0].place]
    for (frame, item), (_, other) in [*segments(links), *local]:
        source = frame.place.source
        num_ops = len(source.program.ops)
        if not (0 <= item.index < num_ops and 0 <= other.index < num_ops):
            continue
        if item.index == other.index:
            found += members_in_order(edges, source, item, other)
            continue
        found += grouped(edges, source, item.index, other.index)
        k, (low, high) = source.number, sorted((item.index, other.index))
        sooner = Edit(k, index=high, anchor=low)
        moves.append((sooner, Edit(k, index=low, anchor=high, after=True)))
    pairs = dict.fromkeys(moves)
    if len(pairs) > 1 and len({pair[0].program for pair in pairs}) == len(pairs):
        found += [tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)]
    found += [(pair[0],) for pair in pairs]
    found += [(pair[1],) for pair in pairs]
    return tuple(dict.fromkeys(found))


def members_in_order(edges: Edges, source: LoweredProgram, item: Item, other: Item) -> list[Fix]:
    """One member of a Fused before another, in its part or with all of it."""
    op = source.program.ops[item.index]
    if not isinstance(op, Fused):
        return []
    members = source.items[item.index].members
    places = [(p, m) for p, part in enumerate(op.parts) for m in range(len(part))]
    mine, theirs = (
        next((places[k] for k, one in enumerate(members) if one is which), (0, 0))
        for which in (item, other)
    )
    if mine <= theirs:
        return []
    moved = list(op.parts)
    if mine[0] == theirs[0]:
        part = list(moved[mine[0]])
        part.insert(theirs[1], part.pop(mine[1]))
        moved[mine[0]] = tuple(part)
    else:
        moved.insert(theirs[0], moved.pop(mine[0]))
    new = dataclasses.replace(op, parts=tuple(moved), kernel=None)
    return [(Edit(source.number, new, index=item.index),)]


def grouped(edges: Edges, source: LoweredProgram, one: int, two: int) -> list[Fix]:
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
    k, found = source.number, list[Fix]()
    for at, gone, op in ((low, high, ops[0]), (high, low, ops[1])):
        both = tuple(dataclasses.replace(one, stream=op.stream) for one in members)
        group = Group(ops=both, stream=op.stream, site=op.site, loc=op.loc)
        found.append((Edit(k, group, index=at), Edit(k, index=gone)))
    return found


def never(edges: Edges, part: Part) -> tuple[Fix, ...]:
    """For an op that waits for what never comes."""
    frame, item = part
    source = frame.place.source
    if item.ordering.expects:
        found = list(notified(edges, part))
    elif item.ordering.messages and not item.members:
        found = [(Edit(source.number, index=item.index),)]
    elif item.ordering.takes:
        leaks = [
            free_later(edges, one, number)
            for one in edges.sources
            for number, version in enumerate(one.versions)
            if version.symmetric and version.free < 0 <= version.alloc
        ]
        found = [tuple(edit for fixes in leaks if fixes for edit in fixes[n]) for n in (0, -1)]
    else:
        found = []
    return tuple(fix for fix in found if fix)


def notifies(edges: Edges, places: Sequence[tuple[int, int]]) -> tuple[Fix, ...]:
    """Two Notifies that raise one signal: by an event, or by a larger value."""
    (k, one), (other, two) = places[:2]
    source = edges.sources[k]
    ops, (low, high) = source.program.ops, sorted((one, two))
    first, second = ops[low], ops[high]
    if k != other or not (isinstance(first, Notify) and isinstance(second, Notify)):
        return ()
    event: Fix = ()
    if first.stream != second.stream:
        ends = edges.point(source, low), edges.point(source, high)
        event = edges.event(*ends, next(edges.names("e")))
    more = dataclasses.replace(second, value=max(first.value, second.value) + 1)
    grow = (Edit(k, more, index=high),)
    return tuple(fix for fix in (event, (*event, *grow)) if fix)


def notified(edges: Edges, part: Part) -> Iterator[Fix]:
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
    sources = [s for s in edges.sources if set(writers) & set(s.ranks)]
    if len(sources) == 1 and (source.program.rank is None or sources[0] is not source):
        ops, k = sources[0].program.ops, sources[0].number
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
        yield (Edit(source.number, index=item.index),)


def segments(links: Sequence[tuple[Part, Part]]) -> list[tuple[Part, Part]]:
    """What a circle of waits passes through on each rank: where it comes in and where it leaves.

    A peer waits for the first op, which comes only after the second, which waits for a peer.
    """
    found: list[tuple[Part, Part]] = []
    for part, other in links:
        if part[0].place is other[0].place:
            if found and found[-1][1] == part:
                found[-1] = found[-1][0], other
            else:
                found.append((part, other))
    if len(found) > 1 and found[-1][1] == found[0][0]:
        found[0] = found.pop()[0], found[0][1]
    return found


def _offset(index: Index) -> int:
    return index.offset if isinstance(index, RankIndex) else 0


def _reaches_peers(source: LoweredProgram, index: int) -> bool:
    """Whether an op writes what peers read."""
    item = source.items[index]
    return any(
        touch.write and (source.versions[touch.version].buffer.team is not None)
        for one in (item, *item.members)
        for touch in one.touches
    )
