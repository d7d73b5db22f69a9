"""Views: a buffer and the steps that lead to a strided box of it; and boxes, the bytes of a view.

The steps are torch's own view operators, plus `chunk`, which depends on the rank. They are kept as
written, so that text reads well, and resolved to a `Box` for one rank:

    >>> full = Buffer("full", DType.f32, (8, 4))
    >>> where = Program(teams=(Team("tp", 4),)).where(rank=3)
    >>> View("full").chunk(RankIndex("tp", 1), 4).box(full, where)
    Box(offset=0, sizes=(2, 4), strides=(4, 1), dtype=<DType.f32: 'f32'>)

A `Box` is what two accesses are compared by: the verifier, the passes and the executor agree on
what touches what because they all ask here.

    >>> rows = Box(8, (2, 4), (4, 1), DType.f32)
    >>> rows.hull, rows.overlaps(Box(12, (4,), (1,), DType.f32))
    ((32, 64), True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self, assert_never

from interlace.errors import ProgramError
from interlace.ir.sizes import Int, Size, at_hand, cached, gcd, never_above
from interlace.ir.types import (
    Buffer,
    Dim,
    DType,
    Index,
    RankIndex,
    Table,
    TableEntry,
    Where,
    contiguous_strides,
    written,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk `index` of `dim`: one of `parts` even parts, or of the parts that a table lists."""

    index: Index
    parts: int | str
    dim: int = field(default=0, metadata=written(positional=True, named=True))


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` up to `stop` of `dim`."""

    dim: int
    start: Dim
    stop: Dim


@dataclass(frozen=True, slots=True)
class Select:
    """Element `index` of `dim`, which goes away."""

    dim: int
    index: Int


@dataclass(frozen=True, slots=True)
class Permute:
    """Dimensions in another order."""

    dims: tuple[int, ...] = field(metadata=written(rest=True))


@dataclass(frozen=True, slots=True)
class Reshape:
    """Other sizes over the same elements; one size may be -1. Never copies."""

    sizes: tuple[Int, ...] = field(metadata=written(rest=True))
    WORD: ClassVar[str] = "view"


@dataclass(frozen=True, slots=True)
class Expand:
    """Dimensions of size 1 repeated; -1 keeps a size."""

    sizes: tuple[Int, ...] = field(metadata=written(rest=True))


@dataclass(frozen=True, slots=True)
class Cast:
    """The same bytes as another element type (`view.dtype`)."""

    dtype: DType


@dataclass(frozen=True, slots=True)
class AsStrided:
    """Any strided box of the buffer; counts as the whole buffer where accesses are compared."""

    sizes: tuple[Int, ...]
    strides: tuple[Int, ...]
    offset: Int = field(default=0, metadata=written(positional=True, always=True))


Step = Chunk | Slice | Select | Permute | Reshape | Expand | Cast | AsStrided


class Steps:
    """The steps as methods, for views and for handles of them."""

    __slots__ = ()

    def then(self, step: Step) -> Self:
        """This view with one more step."""
        raise NotImplementedError

    def chunk(self, index: Index, parts: int | str | Table, dim: int = 0) -> Self:
        """Chunk `index` of `parts`: a number of even ones, or a table of their sizes."""
        return self.then(Chunk(index, parts.name if isinstance(parts, Table) else parts, dim))

    def slice(self, dim: int, start: Dim, stop: Dim) -> Self:
        """Elements `start` up to `stop` of `dim`."""
        return self.then(Slice(dim, start, stop))

    def select(self, dim: int, index: Int) -> Self:
        """Element `index` of `dim`, which goes away."""
        return self.then(Select(dim, index))

    def permute(self, *dims: int) -> Self:
        """Dimensions in another order."""
        return self.then(Permute(dims))

    def view(self, *sizes: Int) -> Self:
        """Other sizes over the same elements; one may be -1."""
        return self.then(Reshape(sizes))

    def expand(self, *sizes: Int) -> Self:
        """Dimensions of size 1 repeated."""
        return self.then(Expand(sizes))

    def cast(self, dtype: DType) -> Self:
        """The same bytes as another element type."""
        return self.then(Cast(dtype))

    def as_strided(self, sizes: Sequence[Int], strides: Sequence[Int], offset: Int = 0) -> Self:
        """Any strided box of the buffer."""
        return self.then(AsStrided(tuple(sizes), tuple(strides), offset))


@dataclass(frozen=True, slots=True)
class View(Steps):
    """A strided box of a buffer, as the steps that lead to it."""

    buffer: str
    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> View:
        return View(self.buffer, (*self.steps, step))

    @property
    def covers_buffer(self) -> bool:
        """True if the view is the buffer itself, without a step."""
        return not self.steps

    def box(self, buffer: Buffer, where: Where) -> Box:
        """The box that this view is on one rank. Raises ProgramError for a step that cannot be."""
        sizes = tuple(where.dim(dim) for dim in buffer.shape)
        strides = buffer.strides if buffer.strides is not None else contiguous_strides(sizes)
        box = Box(0, sizes, strides, buffer.dtype)
        for step in self.steps:
            try:
                box = _apply(box, step, where)
            except (IndexError, ValueError) as error:
                raise ProgramError(
                    f"{step} does not fit sizes {box.sizes} of a view of {self.buffer!r}: {error}"
                ) from error
        return box


def varying(view: View, buffer: Buffer) -> tuple[RankIndex | TableEntry, ...]:
    """The indices and sizes that the view's box depends on and that differ between ranks."""
    found: list[Dim | Index] = list(buffer.shape)
    for step in view.steps:
        match step:
            case Chunk(index=index):
                found.append(index)
            case Slice(start=start, stop=stop):
                found += [start, stop]
            case _:
                pass
    return tuple([value for value in found if isinstance(value, RankIndex | TableEntry)])


def _apply(box: Box, step: Step, where: Where) -> Box:
    sizes, strides = list(box.sizes), list(box.strides)
    offset, dtype = box.offset, box.dtype
    match step:
        case Chunk(index, parts, dim):
            i = where.index(index)
            if isinstance(parts, str):
                table = where.table(parts)
                if not 0 <= i < len(table.values):
                    raise ValueError(f"table {parts} has no entry {i}")
                if table.starts[-1] != sizes[dim]:
                    raise ValueError(f"table {parts} sums to {table.starts[-1]}")
                start, stop = table.starts[i], table.starts[i + 1]
            else:
                if parts < 1 or sizes[dim] % parts or not 0 <= i < parts:
                    raise ValueError(f"no chunk {i} of {parts} even parts")
                start, stop = i * (sizes[dim] // parts), (i + 1) * (sizes[dim] // parts)
            offset += start * strides[dim]
            sizes[dim] = stop - start
        case Slice(dim, start, stop):
            first, last = where.dim(start), where.dim(stop)
            if not 0 <= first <= last <= sizes[dim]:
                raise ValueError(f"{first}:{last} is not within 0:{sizes[dim]}")
            offset += first * strides[dim]
            sizes[dim] = last - first
        case Select(dim, index):
            if not 0 <= index < sizes[dim]:
                raise ValueError(f"{index} is not within 0:{sizes[dim]}")
            offset += index * strides[dim]
            del sizes[dim], strides[dim]
        case Permute(dims):
            if sorted(dims) != list(range(len(sizes))):
                raise ValueError("not a permutation of the dimensions")
            sizes, strides = [sizes[d] for d in dims], [strides[d] for d in dims]
        case Reshape(shape):
            wanted = _fill_in(shape, box.numel)
            strides = _reshaped_strides(sizes, strides, wanted)
            sizes = wanted
        case Expand(shape):
            extra = len(shape) - len(sizes)
            if -1 in shape[: max(extra, 0)]:
                raise ValueError("-1 keeps a size, and a new dimension has none")
            grown = [*([1] * extra), *sizes]
            steps = [*([0] * extra), *strides]
            sizes = [old if new == -1 else new for old, new in zip(grown, shape, strict=True)]
            pairs = list(zip(grown, sizes, strict=True))
            if any(new < 0 or (old != 1 and old != new) for old, new in pairs):
                raise ValueError("only sizes of 1 can be expanded")
            strides = [
                stride if old == new else 0
                for old, new, stride in zip(grown, sizes, steps, strict=True)
            ]
        case Cast(target):
            sizes, strides, offset = _cast(sizes, strides, offset, dtype, target)
            dtype = target
        case AsStrided(new_sizes, new_strides, start):
            if len(new_sizes) != len(new_strides) or any(size < 0 for size in new_sizes):
                raise ValueError("give one stride for each size, and sizes >= 0")
            sizes, strides, offset = list(new_sizes), list(new_strides), start
        case _:
            assert_never(step)
    return Box(offset, tuple(sizes), tuple(strides), dtype)


def _fill_in(shape: tuple[Int, ...], numel: Int) -> list[Int]:
    known = math.prod([size for size in shape if size != -1])
    if -1 in shape and known == 0:
        raise ValueError("-1 is ambiguous for an empty view")
    if shape.count(-1) > 1 or any(size < -1 for size in shape):
        raise ValueError("sizes are >= 0, and one of them may be -1")
    wanted = [size if size != -1 else numel // known for size in shape]
    if math.prod(wanted) != numel:
        raise ValueError(f"{numel} elements cannot have sizes {tuple(shape)}")
    return wanted


def _reshaped_strides(sizes: list[Int], strides: list[Int], wanted: list[Int]) -> list[Int]:
    """Strides of `wanted` sizes over the same elements; ValueError where only a copy would do."""
    if 0 in sizes:
        return list(contiguous_strides(tuple(wanted)))
    merged: list[tuple[Int, Int]] = []  # (size, stride) of the largest blocks that step evenly
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    result: list[Int] = []
    block, step = merged.pop() if merged else (1, 1)
    taken = 1
    for size in reversed(wanted):
        if size != 1 and taken == block:
            if not merged:
                raise ValueError("more elements than the view has")
            block, step = merged.pop()
            taken = 1
        result.append(step * taken)
        taken *= size
        if block % taken:
            raise ValueError("these sizes need a copy")
    if merged or taken != block:
        raise ValueError("these sizes need a copy")
    return result[::-1]


def _cast(
    sizes: list[Int], strides: list[Int], offset: Int, old: DType, new: DType
) -> tuple[list[Int], list[Int], Int]:
    before, after = old.itemsize, new.itemsize
    if before == after:
        return sizes, strides, offset
    if not sizes or strides[-1] != 1:
        raise ValueError("only a contiguous last dimension changes its element size")

    def scaled(count: Int) -> Int:
        """A number of old elements as one of new ones."""
        number, rest = divmod(count * before, after)
        if rest:
            raise ValueError(f"bytes do not divide into elements of {new}")
        return number

    return [*sizes[:-1], scaled(sizes[-1])], [*map(scaled, strides[:-1]), 1], scaled(offset)


# Boxes


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
        return math.prod(self.sizes)

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
