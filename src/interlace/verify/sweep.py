"""Walk over the graph that compares every access with those before it.

It finds races, reads of bytes that nothing wrote, and uses outside of a buffer's lifetime. A Free
and the Alloc of a symmetric buffer count as writes of the whole buffer by their rank; what peers do
in a rank's slot is ordered with that rank's Free by the pool (no slot is taken again before every
rank has freed it), so it need not be ordered by the program.

    Content   the bytes of one buffer on one rank: which of them have been written
    Memory    a storage, cut into cells where buffers that share it begin and end
    Cell      the accesses that a later one must still be compared with (the frontier)

Note [Frontier]
    Nodes come in an order that agrees with happens-before. Once a write covers an earlier access
    and comes after it, whatever conflicts with the earlier one conflicts with the write as well, so
    the earlier one is dropped. A read displaces a read of the same bytes earlier on the same chain.
    In a schedule about as many entries stay as there are chunks.

    Accesses of one buffer conflict where their boxes meet, those of buffers that share a storage
    where their hulls do. So what was done through another buffer is covered only by a write of a
    whole buffer, as a Free is: a box of its own buffer could pass through the gaps of less.

Note [Any order]
    Which of two unordered accesses comes first in the walk is chance, and the findings must not
    depend on it. What was dropped is covered by an access that conflicts with all that it
    conflicted with: so whether anything races in a memory is the same in every order, though not
    which accesses are named. What a read finds written is the same in every order only where
    nothing races; of a memory in which something does, nothing uninitialized is reported.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from interlace.ir.order import Slot
from interlace.ir.sizes import Int, greatest, never_above
from interlace.ir.types import DType, Index
from interlace.ir.view import Box
from interlace.verify.build import GraphBuilder
from interlace.verify.graph import RankPlace
from interlace.verify.regions import ByteRegion, Regions, covered
from interlace.verify.report import MAX_FAULTS
from interlace.verify.source import Item, Touch, Version


@dataclass(slots=True, eq=False)
class Content:
    """Which bytes of a buffer hold what was written through it."""

    name: str
    size: Int
    memory: Memory
    full: bool
    """All bytes have been written (those of an input from the start)."""
    rank: int
    """Whose memory it is."""
    parts: dict[ByteRegion, None]
    log: list[ByteRegion | tuple[int, int]] | None = None
    """From the first time another buffer overwrote some of the bytes: writes, and such losses."""
    freed: bool = False
    """The walk has met its Free: later writes through other buffers are no loss to it."""

    def write(self, region: ByteRegion) -> None:
        """A write through the buffer."""
        if self.log is not None:
            self.log.append(region)
        if region.covers(self.size) and not region.strided:
            self.full, self.log = True, None
        elif not self.full:
            self.parts[region] = None

    def lose(self, lo: int, hi: int) -> None:
        """A write to these bytes through another buffer that shares the storage."""
        lo, hi = max(lo, 0), min(hi, greatest(self.size))
        if lo < hi and (self.full or self.parts or self.log is not None):
            if self.log is None:
                whole = _dense(0, self.size)
                ends = self.size, 0, greatest(self.size)
                all_of_it = ByteRegion(whole, whole, 0, *ends, False, True, False)
                self.log = [all_of_it] if self.full else list(self.parts)
            self.full = False
            self.log.append((lo, hi))

    def holds(self, region: ByteRegion, regions: Regions) -> bool:
        """Returns True if every byte of the region has been written, and not lost."""
        if self.full or (self.log is None and region in self.parts):
            return True
        if self.log is None:
            regions.compare(len(self.parts))
            within_one = any(part.contains(region) and not part.strided for part in self.parts)
            return within_one or regions.covered(region, self.parts)
        later: list[Box] = []
        for event in reversed(self.log):
            if isinstance(event, ByteRegion):
                later.append(event.exact)
            else:
                lo, hi = event
                outside = [_dense(0, lo)]
                if never_above(hi, self.size):
                    outside.append(_dense(hi, self.size))
                if not covered(region.exact, [*later, *outside], regions.spend):
                    return False
        return covered(region.exact, later, regions.spend)


def _dense(lo: Int, hi: Int) -> Box:
    return Box(lo, (hi - lo,), (1,), DType.u8)


class ByteAccess(NamedTuple):
    """An access that later ones are compared with."""

    lo: int
    hi: int
    """Bytes from the start of the storage, at the widest for any sizes of the class."""
    region: ByteRegion
    content: Content
    node: int
    place: RankPlace
    item: Item
    write: bool
    free: bool = False


@dataclass(slots=True, eq=False)
class Cell:
    """A range of a storage that no buffer begins or ends within."""

    lo: int
    hi: int
    writes: list[ByteAccess]
    reads: dict[tuple[ByteRegion, Content, int], ByteAccess]
    live: dict[Content, int]
    """Contents written here, neither freed nor all lost, each with its offset in the storage."""

    def covers(self, new: ByteAccess, old: ByteAccess) -> bool:
        """True if the new access stands for the old one in this cell: see Note [Frontier]."""
        if by_box(new, old):
            return new.region.contains(old.region)
        return (
            new.region.covers(new.content.size)
            and new.lo <= max(old.lo, self.lo)
            and min(old.hi, self.hi) <= new.hi
        )  # fmt: skip


def by_box(one: ByteAccess, other: ByteAccess) -> bool:
    """Returns True if two accesses of one memory are compared by their boxes, not their hulls."""
    return one.content is other.content or not one.content.memory.arena


class Memory:
    """A storage and its cells; `bounds` are those of several buffers that share it."""

    def __init__(self, bounds: Sequence[int] = ()) -> None:
        self.arena = len(bounds) > 0
        self.bounds = bounds if self.arena else (0, 1 << 62)
        self.cells = [Cell(lo, hi, [], {}, {}) for lo, hi in pairwise(self.bounds)]

    def within(self, lo: int, hi: int) -> list[Cell]:
        """The cells that the bytes from `lo` to `hi` are in."""
        if len(self.cells) == 1:
            return self.cells
        return self.cells[bisect_right(self.bounds, lo) - 1 : bisect_left(self.bounds, hi)]


FEW, PER_WRITE = 8, 4
"""So many entries of a cell are not worth counting; of more, each counts as so many steps."""
MAX_REPEATS = 256
"""Repeats of one fault on many ranks that are kept."""


@dataclass(slots=True, eq=False)
class BufferLife:
    """One buffer in one run of one rank: what it holds, and from when to when it may be used."""

    version: Version
    content: Content
    offset: int
    uses: list[ByteAccess]
    """The rank's accesses before the walk passes the Free, wherever the bytes are."""
    slot: Slot | None = None
    take: int = -1
    alloc: int = -1
    """The node that takes the slot; -1 for a buffer that is there from the start."""
    freed: int = -1
    """The node of its Free, once the walk has passed it."""


class AccessFault(NamedTuple):
    """Something found between two accesses, or about one."""

    kind: str
    first: ByteAccess | None
    second: ByteAccess


class Sweep:
    """The walk. `faults` holds what it found, by the pair of ops that it is about."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder, self.graph, self.regions = builder, builder.graph, builder.regions
        self.faults: dict[tuple[object, ...], list[AccessFault]] = {}
        self.raced: set[Memory] = set()
        """The memories in which accesses race."""
        self._lives = {place: dict[int, BufferLife]() for place in builder.places}
        self._arenas: dict[tuple[RankPlace, str], Memory] = {}
        self._copies: dict[tuple[Slot, int, int], Content] = {}

    def run(self) -> None:
        """Visits every node that can finish."""
        graph = self.graph
        for node in graph.order:
            part = graph.part[node]
            if part is None:
                continue
            place, item = part
            if place.nodes[item.place] != node:
                continue  # the begin of what has an end as well
            if item.is_group:
                found = [(one, touch) for one in item.members for touch in one.touches]
                for one, touch in sorted(found, key=lambda each: each[1].write):
                    self._touch(node, place, one, touch)
            for touch in item.touches:
                self._touch(node, place, item, touch)
            if item.ordering.frees is not None and item.version >= 0:
                self._free(node, place, item)
        # An access holds its memory: what is let go of here needs no collection to find it.
        lives = (life.content for known in self._lives.values() for life in known.values())
        for content in (*lives, *self._copies.values()):
            content.memory.cells.clear()

    def _fault(self, kind: str, first: ByteAccess | None, second: ByteAccess) -> None:
        """Keeps a fault under what it is about, so that ranks that repeat it share it."""
        pair = () if first is None else (first.place.source, first.item.index, first.free)
        key = (kind, pair, second.place.source, second.item.index, second.free)
        found = self.faults.setdefault(key, [])
        if first is None or len(found) < MAX_REPEATS:
            found.append(AccessFault(kind, first, second))

    def life(self, place: RankPlace, version: int) -> BufferLife:
        life = self._lives[place].get(version)
        if life is None:
            life = self._lives[place][version] = self._start(place, version)
        return life

    def _start(self, place: RankPlace, number: int) -> BufferLife:
        version, rank = place.source.versions[number], place.rank
        buffer = version.buffer
        size = self.regions.at(version.spot, place.where).hi
        take = alloc = -1
        if version.symmetric:
            take = place.takes.get(number, -1)
            alloc = place.nodes[version.alloc] if version.alloc >= 0 else -1
        if version.symmetric:
            slot = self.builder.slot(place, number)
            content = self._copy(slot, take, rank, version, size)
            return BufferLife(version, content, 0, [], slot, take, alloc)
        memory = self._arena(place, version.storage) if version.shared else Memory()
        content = Content(buffer.name, size, memory, buffer.kind == "input", rank, {})
        return BufferLife(version, content, buffer.offset if version.shared else 0, [])

    def _copy(self, slot: Slot, take: int, rank: int, version: Version, size: Int) -> Content:
        """One rank's copy of a slot for one take of it."""
        key = slot, take, rank
        content = self._copies.get(key)
        if content is None:
            content = Content(version.buffer.name, size, Memory(), False, rank, {})
            self._copies[key] = content
        return content

    def content(self, life: BufferLife, place: RankPlace, touch: Touch) -> Content:
        """Whose bytes a touch means: the rank's own buffer in this run, or a peer's copy."""
        if touch.peer is None or touch.team is None or life.slot is None:
            return life.content
        owner, seen = self._seen(place, touch.team, touch.peer)
        slot = self.builder.meetings.slot(seen.where, life.version.buffer)
        return self._copy(slot, life.take, owner, life.version, life.content.size)

    def _seen(self, place: RankPlace, team: str, peer: Index) -> tuple[int, RankPlace]:
        """The rank that stands for a peer, and the one that this rank is as seen from there."""
        target = place.where.peer(team, peer)
        return self.builder.meetings.first(target), self.builder.everywhere[
            self.builder.meetings.back(target, place.rank)
        ]

    def _arena(self, place: RankPlace, storage: str) -> Memory:
        """A storage that several buffers share, cut where they begin and end."""
        found = self._arenas.get((place, storage))
        if found is None:
            bounds: set[int] = set()
            for version in place.source.sharing[storage]:
                stop = self.regions.at(version.spot, place.where).stop
                bounds |= {version.buffer.offset, version.buffer.offset + stop}
            found = self._arenas[place, storage] = Memory(sorted(bounds))
        return found

    def _touch(self, node: int, place: RankPlace, item: Item, touch: Touch) -> None:
        where = place.where
        if not item.does(touch, where):
            return
        region = self.regions.at(touch.spot, where)
        if region.empty:
            return
        life = self.life(place, touch.version)
        content = self.content(life, place, touch)
        lo, hi = self._hull(life, region)
        entry = ByteAccess(lo, hi, region, content, node, place, item, touch.write)
        if life.alloc >= 0 or life.version.free >= 0:
            self._check_life(life, entry)
        if touch.peer is not None and touch.team is not None and life.slot is not None:
            _, seen = self._seen(place, touch.team, touch.peer)
            if seen is not place:  # compared where the peer's memory is, by who stands there
                region = self.regions.at(touch.spot, seen.where)
                at, lo, hi = self.graph.copy(node, seen.rank), region.start, region.stop
                entry = ByteAccess(lo, hi, region, content, at, place, item, touch.write)
        self._compare(entry, life.offset, touch.contents)

    def _hull(self, life: BufferLife, region: ByteRegion) -> tuple[int, int]:
        """The bytes from the start of the storage by which an access is compared with those through
        other buffers."""
        return life.offset + region.start, life.offset + region.stop

    def _compare(self, entry: ByteAccess, offset: int, contents: bool = True) -> None:
        """Compares an access with those of the same memory, and keeps it."""
        content, region = entry.content, entry.region
        for cell in content.memory.within(entry.lo, entry.hi):
            if entry.write:
                self._write(cell, entry, offset)
            else:
                self._read(cell, entry)
        if entry.write:
            if contents:
                content.write(region)
        elif contents and not content.full and not content.holds(region, self.regions):
            kind = "uninitialized" if content.log is None else "overwritten"
            self._fault(kind, None, entry)

    def _check_life(self, life: BufferLife, entry: ByteAccess) -> None:
        graph, node, place = self.graph, entry.node, entry.place
        if life.alloc >= 0 and not graph.before(life.alloc, node):
            early = graph.before(node, life.alloc)
            alloc = self._whole(life, life.alloc, place, life.version.alloc)
            self._fault("use-before-alloc" if early else "race", alloc, entry)
        if life.freed >= 0:
            late = graph.before(life.freed, node)
            free = self._whole(life, life.freed, place, life.version.free)
            self._fault("use-after-free" if late else "race", free, entry)
            if not late and life.version.shared:
                self.raced.add(entry.content.memory)
        elif life.version.free >= 0:
            life.uses.append(entry)

    def _whole(self, life: BufferLife, node: int, place: RankPlace, index: int) -> ByteAccess:
        """An Alloc or a Free as an access of the whole buffer."""
        region = self.regions.at(life.version.spot, place.where)
        lo, hi = life.offset + region.start, life.offset + region.stop
        item = place.source.items[index]
        return ByteAccess(lo, hi, region, life.content, node, place, item, True, True)

    def _free(self, node: int, place: RankPlace, item: Item) -> None:
        life = self.life(place, item.version)
        life.freed = node
        free = self._whole(life, node, place, item.index)
        if life.alloc >= 0 and not self.graph.before(life.alloc, node):
            alloc = self._whole(life, life.alloc, place, life.version.alloc)
            self._fault("race", alloc, free)
        last: dict[int, ByteAccess] = {}  # of each chain: one finding says it of all before
        for entry in life.uses:
            if not self.graph.before(entry.node, node):
                last[self.graph.chain[entry.node]] = entry
                if life.version.shared:  # the Free may stand for accesses that race with it
                    self.raced.add(entry.content.memory)
        for entry in last.values():
            self._fault("race", entry, free)
        life.uses.clear()
        if life.version.shared and free.lo < free.hi:
            life.content.freed = True
            for cell in life.content.memory.within(free.lo, free.hi):
                self._write(cell, free, life.offset)
                cell.live.pop(life.content, None)

    def _read(self, cell: Cell, new: ByteAccess) -> None:
        if len(cell.writes) > FEW:
            self.regions.compare(PER_WRITE * len(cell.writes))
        for old in cell.writes:
            if old.lo < new.hi and new.lo < old.hi:
                self._replaces(cell, new, old)
        cell.reads[new.region, new.content, self.graph.chain[new.node]] = new

    def _write(self, cell: Cell, new: ByteAccess, offset: int) -> None:
        lo, hi = new.lo, new.hi
        if len(cell.writes) + len(cell.reads) + len(cell.live) > FEW:
            met = PER_WRITE * (len(cell.writes) + len(cell.reads))
            self.regions.compare(met + len(cell.live))
        cell.writes = [
            old
            for old in cell.writes
            if old.lo >= hi or lo >= old.hi or not self._replaces(cell, new, old)
        ]
        cell.writes.append(new)
        for key, old in list(cell.reads.items()):
            if old.lo < hi and lo < old.hi and self._replaces(cell, new, old):
                del cell.reads[key]
        if new.content.memory.arena and not new.free:
            for content, start in cell.live.items():
                if content is not new.content:
                    self._lose(content, new.lo - start, new.hi - start)
            if lo <= cell.lo and cell.hi <= hi:  # nothing is left here for others to lose
                cell.live.clear()
            if not new.content.freed:
                cell.live[new.content] = offset

    def _lose(self, content: Content, lo: int, hi: int) -> None:
        """A write to these bytes of a buffer through another that shares its storage."""
        content.lose(lo, hi)

    def _replaces(self, cell: Cell, new: ByteAccess, old: ByteAccess) -> bool:
        """Compares accesses whose hulls meet; whether the old one may go: Note [Frontier]."""
        if old.node == new.node:
            ordered = old.item is new.item  # for this purpose those of one op are
        else:
            ordered = len(self.faults) >= MAX_FAULTS or self.graph.before(old.node, new.node)
        if ordered:
            return new.write and cell.covers(new, old)
        # Unordered: a race, unless the boxes interleave. The Alloc and the Free of the buffer
        # itself are compared by `_check_life` and `_free`.
        lives = old.content is new.content and (old.free or new.free)
        if not lives and self._meet(old, new):
            self.raced.add(new.content.memory)
            self._fault("race", old, new)
        return False

    def _meet(self, one: ByteAccess, other: ByteAccess) -> bool:
        """Returns True if two accesses of a memory meet, by their boxes or by their hulls."""
        if by_box(one, other):
            return self.regions.overlap(one.region, other.region)
        return one.lo < other.hi and other.lo < one.hi
