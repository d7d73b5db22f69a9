"""Boxes resolved once, and compared: the same box of the same geometry is one `ByteRegion`.

A schedule names few different boxes and uses each many times (every layer, every rank, every
step of a ring), so boxes are interned, and the results of comparisons are kept:

    spot = regions.spot(view, buffer, tables)      # once per view of a Program
    region = regions.at(spot, where)               # per rank: a look-up, nearly always
    regions.overlap(region, other)                 # exact, remembered

`covered` says if several boxes cover one. A box of a large matrix is thousands of byte runs, so
runs are not counted. All boxes in a question are written in one mixed radix: its places are the
strides that occur (in bytes), or multiples of them where one does not divide the next. A box is
then a short list of *bricks*, one interval for each place, and cover is subtraction of intervals.

    >>> halves = [Box(k * 2048, (8192, 2048), (4096, 1), DType.f32) for k in (0, 1)]
    >>> covered(Box(0, (8192, 4096), (4096, 1), DType.f32), halves)
    True

Where the dimensions of a box run into each other, or there are more than `MAX_BRICKS`, or where a
size is symbolic, the byte runs of `Box` answer instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

from interlace.errors import ProgramError
from interlace.ir.sizes import Int, Size, greatest, least, never_above, number
from interlace.ir.types import Buffer, RankIndex, Table, TableEntry, Where
from interlace.ir.view import MAX_RUNS, AsStrided, Box, Chunk, View, byte_runs, runs, varying

Interval = tuple[Int, Int]
Brick = tuple[Interval, ...]
"""For each place of the radix, from the smallest: the digits from `start` up to `stop`."""
Dims = list[tuple[Int, Int]]
"""Steps in bytes, ascending, and how often each is taken; the first is the run of bytes."""
MAX_BRICKS = 512


def covered(
    target: Box, parts: Sequence[Box], spend: Callable[[int], None] = lambda steps: None
) -> bool:
    """Returns True if every byte of `target` is in one of `parts`, and never wrongly. Passes the
    steps that this takes to `spend`, as they are taken."""
    spend(len(parts))
    boxes = (target, *parts)
    if not any(box.is_sized or isinstance(box.offset, Size) for box in boxes):
        low, high = target.hull
        parts = [part for part in parts if part.hull[0] < high and low < part.hull[1]]
        if not any(runs(box)[1] for box in (target, *parts)):
            spend(16 * len(parts))
            return _covered_by_runs(target, parts)
    by_bricks = _covered_by_bricks(target, parts, spend)
    if by_bricks is None:
        spend(16 * sum(num_runs(box) for box in (target, *parts)))
        return _covered_by_runs(target, parts)
    return by_bricks


def _covered_by_bricks(
    target: Box, parts: Sequence[Box], spend: Callable[[int], None]
) -> bool | None:
    """Returns True if `parts` hold every byte of `target`; None where bricks do not decide it."""
    spend(64 * len(parts))
    dims = [_dims(box) for box in (target, *parts)]
    if any(isinstance(number, Size) for each in dims for pair in each for number in pair):
        return None
    radix = _radix(dims)
    left, complete = _bricks(target, radix), True
    if left is None:
        return None
    for part in parts:
        holes = _bricks(part, radix)
        complete = complete and holes is not None
        for hole in holes or ():
            spend(4 * len(left) * len(radix))
            left = [rest for piece in left for rest in _subtract(piece, hole)]
    return False if left and complete else None if left else True


def _dims(box: Box) -> Dims:
    """The dimensions of a box as steps in bytes; those that continue one another are one."""
    length, outer = runs(box)
    dims: Dims = [(1, length)]
    for step, size in outer:
        last, count = dims[-1]
        if step % last == 0 and step <= last * count:
            dims[-1] = last, step // last * (size - 1) + count
        else:
            dims.append((step, size))
    return dims


def _radix(boxes: Sequence[Dims]) -> tuple[int, ...]:
    """Ascending places, each of which divides the next; each step divides one of them."""
    places = [1]
    for step in sorted({step for dims in boxes for step, _ in dims}):
        place = lcm(places[-1], step)
        if place > places[-1]:
            places.append(place)
    return tuple(places)


def _bricks(box: Box, radix: tuple[Int, ...]) -> list[Brick] | None:
    """The bricks of a box; None where its dimensions run into each other or there are too many."""
    if box.numel == 0:
        return []
    choices: list[list[tuple[Int, Int, Int]]] = []
    for step, size in _dims(box):
        place = next(place for place in radix if place % step == 0)
        phases = number(place // step)
        if phases > MAX_BRICKS < size:
            return None
        choices.append(
            [(k * step, place, -(-(size - k) // phases)) for k in range(min(phases, number(size)))]
        )
    if prod(map(len, choices)) > MAX_BRICKS:
        return None
    found: list[Brick] = []
    for chosen in product(*choices):
        extents: dict[Int, Int] = {}
        for _, place, count in chosen:
            if count > 1 and place in extents:
                return None
            if count > 1:
                extents[place] = count
        first = box.hull[0] + sum(shift for shift, _, _ in chosen)
        bricks = _fill(first, extents, radix)
        if bricks is None:
            return None
        found += bricks
    return found


def _fill(offset: Int, extents: dict[Int, Int], radix: tuple[Int, ...]) -> list[Brick] | None:
    """Bricks of `offset` plus every combination of `extents[place]` steps of each place."""
    digits: list[Interval] = []
    carried, origin = 1, 1  # whole blocks that the run starting at place `origin` fills below
    for i, place in enumerate(radix):
        own = extents.get(place, 1)
        if carried > 1 and own > 1:
            return None
        if carried == 1:
            origin = place
        extent = max(own, carried)
        carried = 1
        start = offset // place
        if i + 1 == len(radix):
            digits.append((start, start + extent))
            continue
        base = radix[i + 1] // place
        start %= base
        if start + extent <= base:
            digits.append((start, start + extent))
        elif start == 0 and extent % base == 0:
            digits.append((0, base))
            carried = extent // base
        else:
            return _split(offset, extents, radix, origin, radix[i + 1])
    return [tuple(digits)]


def _split(
    offset: Int, extents: dict[Int, Int], radix: tuple[Int, ...], place: Int, border: Int
) -> list[Brick] | None:
    """A run that crosses multiples of `border`: up to the first, whole blocks, and the rest."""
    count, block = extents[place], border // place
    first = -(offset // place) % block
    whole = (count - first) // block * block
    found: list[Brick] = []
    for part in (first, whole, count - first - whole):
        if part:
            bricks = _fill(offset, {**extents, place: part}, radix)
            if bricks is None:
                return None
            found += bricks
            offset += part * place
    return found


def _meet(one: Brick, other: Brick) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _subtract(brick: Brick, hole: Brick) -> list[Brick]:
    """The rest of `brick` outside `hole`."""
    if not _meet(brick, hole):
        return [brick]
    found: list[Brick] = []
    core = list(brick)
    for i, ((start, stop), (low, high)) in enumerate(zip(brick, hole, strict=True)):
        for piece in ((start, min(low, stop)), (max(high, start), stop)):
            if piece[0] < piece[1]:
                found.append((*core[:i], piece, *core[i + 1 :]))
        core[i] = (max(start, low), min(stop, high))
    return found


def num_runs(box: Box) -> int:
    """The number of byte runs of a box; 1 where there are too many to count one by one."""
    count = prod([size for _, size in runs(box)[1]])
    return 1 if isinstance(count, Size) or count > MAX_RUNS else count


def _covered_by_runs(target: Box, parts: Sequence[Box]) -> bool:
    wanted = byte_runs(target)
    if wanted is None:
        if any(part == target for part in parts):
            return True
        wanted = (target.hull,)  # which has the gaps between its runs as well
    there = sorted(run for part in parts for run in byte_runs(part) or ())
    reached = at = 0
    for start, stop in wanted:
        reached = max(reached, start)
        while reached < stop and at < len(there) and there[at][0] <= reached:
            reached = max(reached, there[at][1])
            at += 1
        if reached < stop:
            return False
    return True


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
