"""Boxes: the bytes that a view is, on one rank.

A `Box` is what two accesses are compared by: the verifier, the passes and the executor agree on
what touches what because they all ask here.

    >>> rows = Box(8, (2, 4), (4, 1), DType.f32)
    >>> rows.hull, rows.overlaps(Box(12, (4,), (1,), DType.f32))
    ((32, 64), True)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from interlace.ir.types import DType


@dataclass(frozen=True, slots=True)
class Box:
    """A strided box: `offset` and `strides` in elements of `dtype`, from the buffer's start."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without gaps."""
        return self.numel * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow one another in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return size == 0 or self.numel == 0
            step *= size
        return True

    @property
    def hull(self) -> tuple[int, int]:
        """First byte, and the byte after the last one; equal when the box is empty."""
        first = self.offset * self.dtype.itemsize
        if self.numel == 0:
            return first, first
        reach = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return first, first + (reach + 1) * self.dtype.itemsize

    def overlaps(self, other: Box) -> bool:
        """Whether the two boxes of one buffer share a byte (exact up to `MAX_RUNS` runs)."""
        if self == other:
            return self.numel > 0
        (start, stop), (other_start, other_stop) = self.hull, other.hull
        if start >= other_stop or other_start >= stop or start == stop or other_start == other_stop:
            return False
        mine, theirs = byte_runs(self), byte_runs(other)
        if mine is None or theirs is None:
            return True
        i = j = 0
        while i < len(mine) and j < len(theirs):
            if mine[i][0] < theirs[j][1] and theirs[j][0] < mine[i][1]:
                return True
            if mine[i][1] <= theirs[j][1]:
                i += 1
            else:
                j += 1
        return False


MAX_RUNS = 1 << 16
"""Boxes of more separate byte runs than this are compared by their hulls (never a miss)."""


@lru_cache(maxsize=4096)
def byte_runs(box: Box) -> tuple[tuple[int, int], ...] | None:
    """The maximal byte runs of a box, sorted and merged; None if there are more than `MAX_RUNS`."""
    dims = sorted(
        (stride, size) for size, stride in zip(box.sizes, box.strides, strict=True) if size != 1
    )
    if box.numel == 0:
        return ()
    length = 1
    while dims and dims[0][0] <= length:  # stride 0 (expanded), or adjacent to the run so far
        stride, size = dims.pop(0)
        length = max(length, stride * (size - 1) + length)
    count = 1
    for _, size in dims:
        count *= size
    if count > MAX_RUNS:
        return None
    starts = [box.offset]
    for stride, size in reversed(dims):
        starts = [start + i * stride for start in starts for i in range(size)]
    item = box.dtype.itemsize
    runs: list[tuple[int, int]] = []
    for start in sorted(starts):
        if runs and start * item <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], (start + length) * item))
        else:
            runs.append((start * item, (start + length) * item))
    return tuple(runs)
