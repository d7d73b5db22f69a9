"""Fixes of deadlocks: an op before the one that it waits for, messages as a group, a Notify added.

cycle(edges, links)     # in each link, the first op cannot go before the other has
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from interlace.ir.ops import (
    Expect,
    Fused,
    Group,
    Notify,
    Recv,
    Send,
)
from interlace.ir.types import Index, Others, RankIndex
from interlace.verify.fixing.edges import Edges
from interlace.verify.fixing.edits import Edit, Fix
from interlace.verify.fixing.lifetimes import free_later
from interlace.verify.happens_before.graph import Part
from interlace.verify.happens_before.source import Item, Source

MAX_PLACES = 8
"""Places at which one missing op is tried."""


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
        k, (low, high) = edges.number(source), sorted((item.index, other.index))
        sooner = Edit(k, index=high, anchor=low)
        moves.append((sooner, Edit(k, index=low, anchor=high, after=True)))
    pairs = dict.fromkeys(moves)
    if len(pairs) > 1 and len({pair[0].program for pair in pairs}) == len(pairs):
        found += [tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)]
    found += [(pair[0],) for pair in pairs]
    found += [(pair[1],) for pair in pairs]
    return tuple(dict.fromkeys(found))


def members_in_order(edges: Edges, source: Source, item: Item, other: Item) -> list[Fix]:
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
    new = dataclasses.replace(op, parts=tuple(moved))
    return [(Edit(edges.number(source), new, index=item.index),)]


def grouped(edges: Edges, source: Source, one: int, two: int) -> list[Fix]:
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
    k, found = edges.number(source), list[Fix]()
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
        found = [(Edit(edges.number(source), index=item.index),)]
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
        ops, k = sources[0].program.ops, edges.number(sources[0])
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
        yield (Edit(edges.number(source), index=item.index),)


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


def _reaches_peers(source: Source, index: int) -> bool:
    """Whether an op writes what peers read."""
    item = source.items[index]
    return any(
        touch.write and (source.versions[touch.version].buffer.team is not None)
        for one in (item, *item.members)
        for touch in one.touches
    )
