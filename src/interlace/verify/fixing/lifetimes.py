"""Fixes of when a buffer is there: an Alloc sooner, a Free later, a storage of its own, a Record.

flaw(edges, source, flaw)      # for a fault that list order alone shows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from interlace.ir.ops import (
    Alloc,
    Free,
    Op,
    Record,
    Wait,
)
from interlace.verify.accesses.memory import Entry
from interlace.verify.fixing.edges import Edges
from interlace.verify.fixing.edits import Edit, Fix
from interlace.verify.happens_before.source import Flaw, Source


def free_later(edges: Edges, source: Source, number: int) -> list[Fix]:
    """A Free after all uses, by list order and by events; added where there is none."""
    version, program = source.versions[number], source.program
    k, name = edges.number(source), version.buffer.name
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


def alloc_sooner(edges: Edges, source: Source, number: int) -> list[Fix]:
    """An Alloc before the first use, by list order and by an event."""
    version, program = source.versions[number], source.program
    uses = _uses(source, number)
    if not uses or version.alloc < 0 or uses[0] > version.alloc:
        return []
    k, op, at = edges.number(source), program.ops[version.alloc], uses[0]
    alloc, event = Edit(k, index=version.alloc, anchor=at), next(edges.names("e"))
    ready = (
        Edit(k, Record(event=event, stream=op.stream), anchor=at),
        Edit(k, Wait(event=event, stream=program.ops[at].stream), anchor=at),
    )
    return [(alloc,), (alloc, *ready)]


def own_storage(edges: Edges, entry: Entry) -> Iterator[Fix]:
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
        yield (Edit(edges.number(source), new, index=version.alloc),)


def made_fresh(edges: Edges, source: Source, name: str) -> Iterator[Fix]:
    """A local buffer made anew in every run, which nobody frees."""
    k = edges.number(source)
    for version in source.versions:
        op = source.program.ops[version.alloc] if version.alloc >= 0 else None
        if version.buffer.name == name and not version.symmetric and isinstance(op, Alloc):
            fresh = dataclasses.replace(op.buffer, kind="fresh", storage=None, offset=0)
            new = Edit(k, dataclasses.replace(op, buffer=fresh), index=version.alloc)
            yield (new, *([Edit(k, index=version.free)] if version.free >= 0 else []))


def recorded(edges: Edges, source: Source, places: list[int], wait: Op | None) -> Iterator[Fix]:
    """A Record before the Wait that has none: the one listed later, or another."""
    k, op = edges.number(source), source.program.ops[places[0]]
    assert isinstance(wait, Wait)
    if wait is op and len(places) > 1 and isinstance(source.program.ops[places[1]], Record):
        yield (Edit(k, index=places[1], anchor=places[0]),)
        yield (Edit(k, index=places[0], anchor=places[1], after=True),)
    for stream in source.program.streams():
        if stream != op.stream:
            record = Record(event=wait.event, stream=stream)
            yield (Edit(k, record, anchor=places[0]),)


def flaw(edges: Edges, source: Source, flaw: Flaw) -> tuple[Fix, ...]:
    """For a fault that list order alone shows."""
    k, items = edges.number(source), [item for item, _, _ in flaw.ops]
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


def _uses(source: Source, version: int) -> list[int]:
    """The ops that touch a buffer, in list order."""
    return [
        item.index
        for item in source.items
        if any(t.version == version for one in (item, *item.members) for t in one.touches)
    ]
