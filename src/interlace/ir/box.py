"""Boxes: the bytes that a view is, on one rank.

A `Box` is what two accesses are compared by: the verifier, the passes and the executor agree on
what touches what because they all ask here.

    >>> rows = Box(8, (2, 4), (4, 1), DType.f32)
    >>> rows.hull, rows.overlaps(Box(12, (4,), (1,), DType.f32))
    ((32, 64), True)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from interlace.ir.sizes import Int, Size, at_hand, cached, gcd, never_above
from interlace.ir.types import DType


@dataclass(frozen=True, slots=True)
class Box:
    """A strided box: `offset` and `strides` in elements of `dtype`, from the buffer's start."""

    offset: Int
    sizes: tuple[Int, ...]
    strides: tuple[Int, ...]
    dtype: DType

    @property
    def numel(self) -> Int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def nbytes(self) -> Int:
        """Bytes of the elements, without gaps."""
        return self.numel * self.dtype.itemsize

    @property
    def is_sized(self) -> bool:
        """True if its sizes or strides differ from run to run."""
        return any(isinstance(number, Size) for number in (*self.sizes, *self.strides))

    @property
    def contiguous(self) -> bool:
        """True if the elements follow one another in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return size == 0 or self.numel == 0
            step *= size
        return True

    @property
    def hull(self) -> tuple[Int, Int]:
        """First byte, and the byte after the last one; equal when the box is empty."""
        first = self.offset * self.dtype.itemsize
        if self.numel == 0:
            return first, first
        reach = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return first, first + (reach + 1) * self.dtype.itemsize

    def at_hand(self) -> Box:
        """The box for the sizes at hand, not noted: for predictions of time alone."""
        sizes, strides = tuple(map(at_hand, self.sizes)), tuple(map(at_hand, self.strides))
        return Box(at_hand(self.offset), sizes, strides, self.dtype)

    def overlaps(self, other: Box) -> bool:
        """True if the two boxes of one buffer share a byte. Never misses one, and exact unless that
        takes more than `MAX_STEPS` steps."""
        return self.meets(other)[0]

    def meets(self, other: Box) -> tuple[bool, int]:
        """Returns True if they overlap (for a class of sizes: if they may for some), and the number
        of steps that it took to decide."""
        (start, stop), (other_start, other_stop) = self.hull, other.hull
        if never_above(other_stop, start) or never_above(stop, other_start):
            return False, 0
        if start == stop or other_start == other_stop:
            return False, 0
        if hash(self) == hash(other) and self == other:
            return True, 0
        # Byte start + sum(s * i) begins a run of one, other_start + sum(t * j) a run of the other.
        # With j counted from the end, their distance is a sum of positive terms less a constant.
        length, mine = runs(self)
        other_length, theirs = runs(other)
        apart = other_start - start + sum(step * (size - 1) for step, size in theirs)
        most: dict[Int, Int] = {}
        for step, size in (*mine, *theirs):
            most[step] = most.get(step, 0) + size - 1
        return _reach(most, apart - length + 1, apart + other_length - 1)

    @property
    def overlaps_itself(self) -> bool:
        """True if two elements share a byte. Never misses one, and exact unless that takes more
        than `MAX_STEPS` steps."""
        return _meets_itself(self.sizes, self.strides)


MAX_STEPS = 1 << 17


def _reach(most: dict[Int, Int], low: Int, high: Int) -> tuple[bool, int]:
    """Returns True if some sum of steps, each taken at most so often, lies in [low, high] (for a
    class of sizes: if one may), and the number of steps that it took to decide."""
    steps = sorted(most, key=at_hand, reverse=True)
    rest: list[Int] = [0]
    divisor = [0]  # of the steps from each place on: the largest sum, what divides all
    for step in reversed(steps):
        rest.insert(0, rest[0] + step * most[step])
        divisor.insert(0, gcd(divisor[0], step))
    left, seen, budget = [(0, low, high)], set[tuple[int, Int]](), MAX_STEPS
    while left:
        place, low, high = left.pop()
        if never_above(high, -1) or never_above(rest[place] + 1, low) or (place, low) in seen:
            continue
        if place == len(steps) or never_above(low, 0) or never_above(rest[place], high):
            return True, MAX_STEPS - budget
        step, count = steps[place], most[steps[place]]
        if isinstance(low, int) and isinstance(high, int) and isinstance(step, int):
            if high // divisor[place] * divisor[place] < low:
                continue
            later = rest[place + 1]
            first = max(0, -((later - low) // step)) if isinstance(later, int) else 0
            last = min(count, high // step) if isinstance(count, int) else high // step
        elif isinstance(count, int):
            first, last = 0, count
        else:
            return True, MAX_STEPS - budget
        seen.add((place, low))
        budget -= last - first + 1
        if budget < 0:
            return True, MAX_STEPS
        skips = [i * step for i in range(first, last + 1)]
        left += [(place + 1, low - skip, high - skip) for skip in skips]
    return False, MAX_STEPS - budget


@cached(4096)
def _meets_itself(sizes: tuple[Int, ...], strides: tuple[Int, ...]) -> bool:
    dims = sorted((step, size) for size, step in zip(sizes, strides, strict=True) if size > 1)
    if 0 in sizes or not dims:
        return False
    if dims[0][0] == 0:
        return True
    reach = 0  # of the dimensions of smaller strides
    for number, (stride, size) in enumerate(dims):
        if stride <= reach:
            # Elements a steps apart in this dimension, 1 <= a < size, and closer by as much in
            # smaller ones: a sum of a - 1 steps, and of steps counted from the other end.
            most: dict[Int, Int] = {stride: size - 2}
            for step, count in dims[:number]:
                most[step] = most.get(step, 0) + 2 * (count - 1)
            if _reach(most, reach - stride, reach - stride)[0]:
                return True
        reach += stride * (size - 1)
    return False


@cached(4096)
def runs(box: Box) -> tuple[Int, tuple[tuple[Int, Int], ...]]:
    """The runs of bytes that a box is: how long each is, and the (stride, size) of their starts."""
    item = box.dtype.itemsize
    dims = sorted(
        (
            (stride * item, size)
            for size, stride in zip(box.sizes, box.strides, strict=True)
            if size != 1
        ),
        key=lambda dim: (at_hand(dim[0]), at_hand(dim[1])),
    )
    length, inner = item, 0
    for stride, size in dims:
        if not never_above(stride, length):  # the next run begins past the end of this one
            break
        length, inner = max(length, stride * (size - 1) + length), inner + 1
    return length, tuple(dims[inner:])


MAX_RUNS = 1 << 16
"""Separate byte runs that are counted one by one, at most."""


@cached(16)  # a million runs at most
def byte_runs(box: Box) -> tuple[tuple[Int, Int], ...] | None:
    """The maximal byte runs of a box, sorted and merged; None if there are more than `MAX_RUNS`, or
    a number of them that is no one number."""
    if box.numel == 0:
        return ()
    length, dims = runs(box)
    count = prod([size for _, size in dims])
    if isinstance(count, Size) or count > MAX_RUNS:
        return None
    starts = [box.hull[0]]
    for stride, size in reversed(dims):
        starts = [start + i * stride for start in starts for i in range(size)]
    found: list[tuple[Int, Int]] = []
    for start in sorted(starts):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], start + length))
        else:
            found.append((start, start + length))
    return tuple(found)
