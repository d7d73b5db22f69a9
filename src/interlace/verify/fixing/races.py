"""Fixes of races: an event, a signal or a barrier, or the two accesses taken apart.

race(edges, pairs)      # an event or a signal, either way round; a barrier; a Free moved; ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from interlace.ir.ops import (
    Alloc,
    Copy,
    Fused,
    FusedMember,
    Group,
    Record,
    Recv,
    Wait,
)
from interlace.ir.types import Buffer
from interlace.ir.view import View
from interlace.verify.accesses.memory import Entry
from interlace.verify.fixing.edges import Edges
from interlace.verify.fixing.edits import Edit, Fix
from interlace.verify.fixing.lifetimes import alloc_sooner, free_later, own_storage

Pair = tuple[Entry, Entry]


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


def within(edges: Edges, first: Entry, second: Entry) -> Iterator[Fix]:
    """Orders two members of a Fused, or takes one of two out of a Group."""
    source = first.frame.place.source
    index, number = first.item.index, edges.number(source)
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


def through_buffer(edges: Edges, number: int, index: int, op: Group, k: int, entry: Entry) -> Fix:
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
    yield dataclasses.replace(op, parts=tuple(parts))
    for at in (p, q):
        merged = [part for k, part in enumerate(op.parts) if k not in (p, q)]
        merged.insert(at if at == p else at - 1, (*op.parts[p], *op.parts[q]))
        yield dataclasses.replace(op, parts=tuple(merged))
