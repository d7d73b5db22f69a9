"""Views: a buffer and the steps that lead to a strided box of it.

The steps are torch's own view operators, plus `chunk`, which depends on the rank. They are kept as
written, so that text reads well, and resolved to a `Box` for one rank:

    >>> full = Buffer("full", DType.f32, (8, 4))
    >>> where = Where.of(rank=3, teams=(Team("tp", 4),))
    >>> View("full").chunk(RankIndex("tp", 1), 4).box(full, where)
    Box(offset=0, sizes=(2, 4), strides=(4, 1), dtype=<DType.f32: 'f32'>)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self, assert_never

from interlace.errors import ProgramError
from interlace.ir.box import Box as Box
from interlace.ir.box import byte_runs as byte_runs
from interlace.ir.sizes import Int
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
    if before > after:
        ratio = before // after
        return (
            [*sizes[:-1], sizes[-1] * ratio],
            [*(s * ratio for s in strides[:-1]), 1],
            offset * ratio,
        )
    ratio = after // before
    if sizes[-1] % ratio or offset % ratio or any(s % ratio for s in strides[:-1]):
        raise ValueError(f"bytes do not divide into elements of {new}")
    return (
        [*sizes[:-1], sizes[-1] // ratio],
        [*(s // ratio for s in strides[:-1]), 1],
        offset // ratio,
    )
