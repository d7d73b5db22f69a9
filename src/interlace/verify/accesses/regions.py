"""Boxes resolved once: the same box of the same geometry is one `ByteRegion`, on every rank.

A schedule names few different boxes and uses each many times (every layer, every rank, every
step of a ring), so boxes are interned, and the results of comparisons are kept:

    spot = regions.spot(view, buffer, tables)      # once per view of a Program
    region = regions.at(spot, where)               # per rank: a look-up, nearly always
    regions.overlap(region, other)                 # exact, remembered
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from interlace.errors import ProgramError
from interlace.ir.sizes import Int, Size, greatest, least, never_above
from interlace.ir.types import Buffer, RankIndex, Table, TableEntry, Where
from interlace.ir.view import AsStrided, Box, Chunk, View, varying
from interlace.verify.accesses.bytesets import covered

MAX_STEPS = 1 << 25
"""Steps that one check compares accesses in, at most: half a minute of a slow core. Two hulls are
compared in one step; what remembers a comparison counts more, for its memory."""
PER_SIZED = 32
"""Steps that comparing two hulls counts as, where some are of named sizes: those are decided."""
PER_PAIR = 32
"""Steps that a remembered comparison counts as."""
MANY_PARTS = 64
"""Number of parts up to which the result of a cover is remembered."""


@dataclass(slots=True, eq=False)
class ByteRegion:
    """A box of a buffer, in bytes from the buffer's start."""

    box: Box
    """The box that is compared for races: the whole buffer for `as_strided`."""
    exact: Box
    """The bytes themselves."""
    lo: Int
    hi: Int
    start: int
    stop: int
    """The least `lo` and the greatest `hi` of the class of sizes."""
    empty: bool
    """The region has no bytes, for any sizes of the class."""
    dense: bool
    """Every byte from `lo` to `hi` belongs to the region."""
    strided: bool
    """The region stands for an `as_strided`, so that it claims more bytes than it has."""

    def covers(self, size: Int) -> bool:
        """Returns True if the region is surely all of a buffer of so many bytes."""
        return self.dense and never_above(self.lo, 0) and never_above(size, self.hi)

    def contains(self, other: ByteRegion) -> bool:
        """True if the other region is surely part of this one (cheap, may miss that it is)."""
        return self is other or (
            self.dense and never_above(self.lo, other.lo) and never_above(other.hi, self.hi)
        )


@dataclass(slots=True, eq=False)
class Spot:
    """A view of a buffer before it is resolved."""

    view: View
    buffer: Buffer
    key: int
    by_rank: tuple[RankIndex | TableEntry, ...]
    """Rank indices and table entries that its box depends on."""


class Regions:
    """All regions of one check."""

    def __init__(self) -> None:
        self._keys: dict[object, int] = {}
        self._spots: dict[
            tuple[Table, ...],
            dict[tuple[object, ...], tuple[int, tuple[RankIndex | TableEntry, ...]]],
        ] = {}
        self._found: dict[tuple[Int, ...], ByteRegion] = {}
        self._interned: dict[tuple[Box, Box], ByteRegion] = {}
        self._overlaps: dict[tuple[ByteRegion, ByteRegion], bool] = {}
        self._covers: dict[tuple[ByteRegion, frozenset[ByteRegion]], bool] = {}
        self.steps = 0
        self._per_hull = 1

    def compare(self, hulls: int) -> None:
        """Counts comparisons with so many hulls."""
        self.spend(hulls * self._per_hull)

    def spend(self, steps: int) -> None:
        """Counts what comparing takes. Raises ProgramError where that is too much."""
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise ProgramError(
                f"comparing the accesses of this schedule takes more than {MAX_STEPS:,} steps: "
                "check it in parts, with fewer ops on a buffer, views of fewer separate pieces, or "
                "fewer ranks"
            )

    def spot(self, view: View, buffer: Buffer, tables: tuple[Table, ...]) -> Spot:
        """The view, ready to be resolved on any rank."""
        geometry = (buffer.shape, buffer.strides, buffer.dtype, view.steps)
        alike = self._spots.setdefault(tables, {})
        found = alike.get(geometry)
        if found is None:
            found = alike[geometry] = self._new_spot(view, buffer, tables)
        return Spot(view, buffer, *found)

    def _new_spot(
        self, view: View, buffer: Buffer, tables: tuple[Table, ...]
    ) -> tuple[int, tuple[RankIndex | TableEntry, ...]]:
        by_rank = varying(view, buffer)
        named = any(isinstance(value, TableEntry) for value in by_rank) or any(
            isinstance(step, Chunk) and isinstance(step.parts, str) for step in view.steps
        )
        identity = (buffer.shape, buffer.strides, buffer.dtype, view.steps, tables if named else ())
        key = self._keys.setdefault(identity, len(self._keys))
        return key, by_rank

    def at(self, spot: Spot, where: Where) -> ByteRegion:
        """The region of a spot on one rank."""
        key = (spot.key, *map(where.value, spot.by_rank)) if spot.by_rank else (spot.key,)
        region = self._found.get(key)
        if region is None:
            region = self._found[key] = self._resolve(spot, where)
        return region

    def _resolve(self, spot: Spot, where: Where) -> ByteRegion:
        exact = box = spot.view.box(spot.buffer, where)
        if any(isinstance(step, AsStrided) for step in spot.view.steps) and exact.numel:
            box = View(spot.buffer.name).box(spot.buffer, where)
        region = self._interned.get((box, exact))
        if region is None:
            lo, hi = box.hull
            if isinstance(lo, Size) or isinstance(hi, Size):
                self._per_hull = PER_SIZED
            first, last, dense = least(lo), greatest(hi), _dense(box)
            region = self._interned[box, exact] = ByteRegion(
                box, exact, lo, hi, first, last, first >= last, dense, box is not exact
            )
        return region

    def overlap(self, one: ByteRegion, other: ByteRegion) -> bool:
        """Returns True if the two regions of one buffer share a byte."""
        if never_above(other.hi, one.lo) or never_above(one.hi, other.lo):
            return False
        if one is other or (one.dense and other.dense):
            return one.lo < one.hi
        found = self._overlaps.get((one, other))
        if found is None:
            found, steps = one.box.meets(other.box)
            self.compare(PER_PAIR)
            self.spend(steps)
            self._overlaps[one, other] = self._overlaps[other, one] = found
        return found

    def covered(self, region: ByteRegion, parts: Iterable[ByteRegion]) -> bool:
        """Returns True if the parts together hold every byte of the region."""
        there = list(parts)
        if len(there) > MANY_PARTS:
            return covered(region.exact, [part.exact for part in there], self.spend)
        key = (region, frozenset(there))
        found = self._covers.get(key)
        if found is None:
            found = covered(region.exact, [part.exact for part in there], self.spend)
            self._covers[key] = found
        return found


def _dense(box: Box) -> bool:
    length = 1
    for stride, size in sorted(zip(box.strides, box.sizes, strict=True)):
        if size > 1:
            if stride > length:
                return False
            length += stride * (size - 1)
    return True
