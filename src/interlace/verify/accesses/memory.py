"""Memory while the graph is walked: who touched which bytes last, and what is written.

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
    conflicted with, and meets all that it met: so whether something races for what a read meets is
    the same in every order, though not which accesses are named. What a read finds written is the
    same in every order only where nothing races for it; elsewhere nothing uninitialized is
    reported.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from interlace.ir.sizes import Int, greatest, never_above
from interlace.ir.types import DType
from interlace.ir.view import Box
from interlace.verify.accesses.bytesets import covered
from interlace.verify.accesses.regions import ByteRegion, Regions
from interlace.verify.happens_before.graph import RankPlace
from interlace.verify.happens_before.source import Item


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
        if lo < hi and (self.full or self.parts):
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

    @property
    def by_caller(self) -> bool:
        """True for a caller's possible access to a registered parameter outside of a run."""
        return self.write and self.item.op is None


@dataclass(slots=True, eq=False)
class Cell:
    """A range of a storage that no buffer begins or ends within."""

    lo: int
    hi: int
    writes: list[ByteAccess]
    reads: dict[tuple[ByteRegion, Content, int], ByteAccess]
    live: dict[Content, int]
    """Contents written here and not freed, each with its offset in the storage."""

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
