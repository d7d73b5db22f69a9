"""Edits that may fix a fault, by its kind, likeliest first; trials.py tries them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from interlace.ir.ops import (
    Alloc,
    Copy,
    Expect,
    Free,
    Fused,
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
from interlace.verify.fixing.edges import Edges, member_spots, with_members
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
    one, two = (edges.point(e.frame.place.source, e.item.index) for e in (first, second))
    ranks = {(a.frame.place.rank, b.frame.place.rank) for a, b in pairs}
    if one[:2] == two[:2]:
        alone = all(a == b for a, b in ranks)
        return tuple(_within_op(edges, first, second)) if alone else ()
    found = edges.order(one, two, ranks)
    inner = edges.member(one, first), edges.member(two, second)
    if inner != (one, two):
        found += edges.order(*inner, ranks)
    lives = [entry for entry in (first, second) if entry.free]
    frees = [entry for entry in lives if entry.item.ordering.frees is not None]
    for entry in frees:
        found += free_later(edges, entry.frame.place.source, entry.item.version)
    for entry in lives:
        if entry.item.ordering.takes is not None:
            found += alloc_sooner(edges, entry.frame.place.source, entry.item.version)
    found += edges.order(two, one, {(b, a) for a, b in ranks})
    found += edges.barrier(one, two, ranks)
    if first.content is not second.content or frees:
        found += [fix for entry in (second, first) for fix in own_storage(entry)]
    return tuple(found)


def _within_op(edges: Edges, first: ByteAccess, second: ByteAccess) -> Iterator[Fix]:
    """Orders two members of a Fused, or takes one of two out of a Group."""
    source = first.frame.place.source
    index, number = first.item.index, source.number
    op = source.program.ops[index]
    places = [source.items[index].position(one.item) for one in (first, second)]
    if min(places) < 0:
        return
    if isinstance(op, Fused):
        for new in _in_order_of_parts(op, min(places), max(places), next(edges.names("e"))):
            yield (Edit(number, new, index=index),)
    if isinstance(op, Group):
        for k in dict.fromkeys(places):
            rest = (*op.ops[:k], *op.ops[k + 1 :])
            left = rest[0] if len(rest) == 1 else dataclasses.replace(op, ops=rest)
            for after in (True, False):
                beside = Edit(number, op.ops[k], anchor=index, after=after)
                yield (Edit(number, left, index=index), beside)
        for k, entry in zip(places, (first, second), strict=True):
            member = op.ops[k]
            if isinstance(member, Recv) and entry.write:  # into a buffer of its own
                name, box = next(edges.names("t")), entry.region.exact
                alloc = Alloc(buffer=Buffer(name, box.dtype, box.sizes), stream=op.stream)
                into = dataclasses.replace(member, dst=View(name))
                new = dataclasses.replace(op, ops=(*op.ops[:k], into, *op.ops[k + 1 :]))
                copy = Copy(src=View(name), dst=member.dst, stream=op.stream)
                yield (
                    Edit(number, alloc, anchor=index),
                    Edit(number, new, index=index),
                    Edit(number, copy, anchor=index, after=True),
                )


def _in_order_of_parts(op: Fused, low: int, high: int, event: str) -> Iterator[Fused]:
    """The Fused with one member before another of a later part: by an event, or in one part."""
    spots = member_spots(op)
    (p, m), (q, n) = spots[low], spots[high]
    if p == q:
        return
    record, wait = Record(event=event), Wait(event=event)
    yield with_members(op, (p, m + 1, record), (q, n, wait))
    for at in (p, q - 1):
        merged = [part for k, part in enumerate(op.parts) if k not in (p, q)]
        merged.insert(at, (*op.parts[p], *op.parts[q]))
        yield dataclasses.replace(op, parts=tuple(merged), kernel=None)


# Lifetimes


def free_later(edges: Edges, source: LoweredProgram, number: int) -> list[Fix]:
    """A Free after all uses, by list order and by events; added where there is none."""
    version, program = source.versions[number], source.program
    k, name = source.number, version.buffer.name
    uses = {program.ops[i].stream: i for i in source.uses(number)}
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
    uses = source.uses(number)
    if not uses or version.alloc < 0 or uses[0] > version.alloc:
        return []
    k, op, at = source.number, program.ops[version.alloc], uses[0]
    alloc, event = Edit(k, index=version.alloc, anchor=at), next(edges.names("e"))
    record = Edit(k, Record(event=event, stream=op.stream), anchor=at)
    wait = Edit(k, Wait(event=event, stream=program.ops[at].stream), anchor=at)
    return [(alloc,), (alloc, record, wait)]


def own_storage(entry: ByteAccess) -> Iterator[Fix]:
    """Takes a buffer out of the storage that it shares with others."""
    source = entry.frame.place.source
    for version in source.versions:
        if version.shared and version.buffer.name == entry.content.name:
            yield from _reallocated(source, version.alloc, storage=None, offset=0)
            return


def _reallocated(source: LoweredProgram, alloc: int, **changes: object) -> Iterator[Fix]:
    op = source.program.ops[alloc] if alloc >= 0 else None
    if isinstance(op, Alloc):
        buffer = dataclasses.replace(op.buffer, **changes)
        yield (Edit(source.number, dataclasses.replace(op, buffer=buffer), index=alloc),)


def _fresh(source: LoweredProgram, name: str) -> Iterator[Fix]:
    """A local buffer allocated anew in every run and never freed."""
    for version in source.versions:
        if version.buffer.name == name and not version.symmetric:
            removed = (Edit(source.number, index=version.free),) if version.free >= 0 else ()
            changes = {"kind": "fresh", "storage": None, "offset": 0}
            for fix in _reallocated(source, version.alloc, **changes):
                yield (*fix, *removed)


def _recorded(source: LoweredProgram, places: list[int], wait: Op | None) -> Iterator[Fix]:
    """A Record before the Wait that has none: the one listed later, or another."""
    k, ops = source.number, source.program.ops
    assert isinstance(wait, Wait)
    if wait is ops[places[0]] and len(places) > 1 and isinstance(ops[places[1]], Record):
        yield (Edit(k, index=places[1], anchor=places[0]),)
        yield (Edit(k, index=places[0], anchor=places[1], after=True),)
    for stream in source.program.streams():
        if stream != ops[places[0]].stream:
            yield (Edit(k, Record(event=wait.event, stream=stream), anchor=places[0]),)


def flaw(edges: Edges, source: LoweredProgram, flaw: Flaw) -> tuple[Fix, ...]:
    """For a fault of the list order alone."""
    items = [item for item, _, _ in flaw.ops]
    places = [item.index for item in items]
    match flaw.kind:
        case "leak":
            return tuple(free_later(edges, source, items[0].version))
        case "double-free" | "bad-free":
            return tuple((Edit(source.number, index=i),) for i in reversed(places))
        case "use-before-alloc":
            number = next(n for n, v in enumerate(source.versions) if v.alloc == places[1])
            return tuple(alloc_sooner(edges, source, number))
        case "result":
            return tuple(_fresh(source, flaw.ops[0][2]))
        case "event":
            return tuple(_recorded(source, places, items[0].op))
        case _:
            return ()


# Deadlocks


def cycle(links: Sequence[tuple[Part, Part]]) -> tuple[Fix, ...]:
    """Opens a cycle of waits: in each pair the first cannot go before the other has."""
    moves: list[tuple[Edit, Edit]] = []
    found: list[Fix] = []
    local = [link for link in links if link[0][0].place is link[1][0].place]
    for (frame, item), (_, other) in [*segments(links), *local]:
        source = frame.place.source
        num_ops = len(source.program.ops)
        if not (0 <= item.index < num_ops and 0 <= other.index < num_ops):
            continue
        if item.index == other.index:
            found += _members_in_order(source, item, other)
            continue
        found += _grouped(source, item.index, other.index)
        k, (low, high) = source.number, sorted((item.index, other.index))
        sooner = Edit(k, index=high, anchor=low)
        moves.append((sooner, Edit(k, index=low, anchor=high, after=True)))
    pairs = dict.fromkeys(moves)
    if len(pairs) > 1 and len({pair[0].program for pair in pairs}) == len(pairs):
        found += [tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)]
    found += [(pair[0],) for pair in pairs]
    found += [(pair[1],) for pair in pairs]
    return tuple(dict.fromkeys(found))


def _members_in_order(source: LoweredProgram, item: Item, other: Item) -> list[Fix]:
    """One member of a Fused before another, in its part or with all of it."""
    op, whole = source.program.ops[item.index], source.items[item.index]
    if not isinstance(op, Fused):
        return []
    spots = member_spots(op)
    mine, theirs = (spots[max(whole.position(one), 0)] for one in (item, other))
    if mine <= theirs:
        return []
    parts = [list(part) for part in op.parts]
    if mine[0] == theirs[0]:
        part = parts[mine[0]]
        part.insert(theirs[1], part.pop(mine[1]))
    else:
        parts.insert(theirs[0], parts.pop(mine[0]))
    new = dataclasses.replace(op, parts=tuple(map(tuple, parts)), kernel=None)
    return [(Edit(source.number, new, index=item.index),)]


def _grouped(source: LoweredProgram, one: int, two: int) -> list[Fix]:
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
    found: list[Fix] = []
    if item.ordering.expects:
        found = list(_notified(edges, part))
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
    grow = (*event, Edit(k, more, index=high))
    return (event, grow) if event else (grow,)


def _notified(edges: Edges, part: Part) -> Iterator[Fix]:
    """The Notify that an Expect lacks, where the writer has written; or no Expect."""
    (frame, item), op = part, part[1].op
    source, where = frame.place.source, frame.place.where
    assert isinstance(op, Expect)
    member = where.member(op.team)
    to: Index | Others
    if isinstance(op.peer, Others):
        to, writers = op.peer, {*member.ranks} - {frame.place.rank}
    else:
        to, writers = member.index, {member.ranks[where.index(op.peer)]}
        if source.program.rank is None:
            offset = op.peer.offset if isinstance(op.peer, RankIndex) else 0
            relative = isinstance(op.peer, RankIndex) and op.peer.team == op.team
            to = RankIndex(op.team, -offset) if relative else Others(op.team)
    sources = [s for s in edges.sources if writers & set(s.ranks)]
    if len(sources) == 1 and (source.program.rank is None or sources[0] is not source):
        ops, k = sources[0].program.ops, sources[0].number
        for i, raising in enumerate(ops):
            if isinstance(raising, Notify) and raising.signal == op.signal:
                if raising.value < op.value:
                    yield (Edit(k, dataclasses.replace(raising, value=op.value), index=i),)
                elif raising.peer != to:
                    yield (Edit(k, dataclasses.replace(raising, peer=to), index=i),)
        places = [i for i in range(len(ops)) if _writes_to_team(sources[0], i)]
        peers = [to, Others(op.team)] if isinstance(to, RankIndex) else [to]
        notify = Notify(signal=op.signal, peer=to, team=op.team, value=op.value)
        for i in dict.fromkeys([*places[::-1][:MAX_PLACES], *range(len(ops))[-1:]]):
            for peer in peers:
                new = dataclasses.replace(notify, peer=peer, stream=ops[i].stream)
                yield (Edit(k, new, anchor=i, after=True),)
    if source.program.ops[item.index] is op:
        yield (Edit(source.number, index=item.index),)


def segments(links: Sequence[tuple[Part, Part]]) -> list[tuple[Part, Part]]:
    """Where a cycle of waits enters and leaves each rank: a peer waits for the first op, which
    comes only after the second, which waits for a peer.
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


def _writes_to_team(source: LoweredProgram, index: int) -> bool:
    """Whether an op writes a buffer that peers read."""
    item = source.items[index]
    return any(
        touch.write and source.versions[touch.version].buffer.team is not None
        for one in (item, *item.members)
        for touch in one.touches
    )
