"""View operators of torch as the steps of a View.

Each rule gives the steps that an operator stands for; the caller compares the box that comes out
with the sizes and strides that torch recorded, so a rule that is wrong for some tensor is never
taken: such a view becomes `AsStrided`, which counts as the whole buffer where accesses are
compared.

    >>> steps("aten.t", (x,), box_of_x, recorded)
    (Permute(dims=(1, 0)),)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.errors import ProgramError
from interlace.frontend.importing.types import NOWHERE, dtype_of, same_layout
from interlace.ir import (
    AsStrided,
    Box,
    Buffer,
    Cast,
    Expand,
    Permute,
    Reshape,
    Select,
    Slice,
    Step,
    View,
    contiguous_strides,
)

Rule = Callable[[Sequence[Any], Box, torch.Tensor], tuple[Step, ...]]


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape)


def _reshape(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return (Reshape(_sizes(out)),)


def _permute(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    rank = len(box.sizes)
    return (Permute(tuple(dim % rank for dim in args[1])),)


def _transpose(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    dims = list(range(len(box.sizes)))
    if dims:
        first, second = args[1], args[2]
        dims[first], dims[second] = dims[second], dims[first]
    return (Permute(tuple(dims)),)


def _t(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return (Permute(tuple(reversed(range(len(box.sizes))))),)


def _expand(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return (Expand(_sizes(out)),)


def slice_bounds(args: Sequence[Any], size: int) -> tuple[int, int, int]:
    """Start, stop and step of `slice(x, dim, start, stop, step)` for a dimension of `size`."""
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    stop = args[3] if len(args) > 3 and args[3] is not None else size
    step = args[4] if len(args) > 4 else 1
    first, last, _ = slice(start, stop, 1).indices(size)
    return first, max(first, last), step


def _slice(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    dim = (args[1] if len(args) > 1 else 0) % len(box.sizes)
    start, stop, step = slice_bounds(args, box.sizes[dim])
    return (Slice(dim, start, stop),) if step == 1 else ()


def _select(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    dim = args[1] % len(box.sizes)
    return (Select(dim, args[2] % box.sizes[dim]),)


def _view_dtype(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return (Cast(dtype_of(out.dtype)),)


def _as_real(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return Reshape((*box.sizes, 1)), Cast(dtype_of(out.dtype))


def _as_complex(args: Sequence[Any], box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return Cast(dtype_of(out.dtype)), Select(len(box.sizes) - 1, 0)


RULES: dict[str, Rule] = {
    "aten.view.default": _reshape,
    "aten.view.dtype": _view_dtype,
    "aten.reshape.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten._reshape_alias.default": _reshape,
    "aten.squeeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.squeeze.dims": _reshape,
    "aten.unsqueeze.default": _reshape,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _t,
    "aten.numpy_T.default": _t,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.view_as_real.default": _as_real,
    "aten.view_as_complex.default": _as_complex,
}
"""Steps by operator; other views have none. What does not reach the recorded box is `AsStrided`."""

SPLITS = {
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
    "aten.tensor_split.sections",
    "aten.unbind.int",
}
"""Operators that give several views along one dimension, one after another."""


def split_dim(target: str, args: Sequence[Any], rank: int) -> int:
    """The dimension that an operator of `SPLITS` divides."""
    position = 1 if target == "aten.unbind.int" else 2
    return (args[position] if len(args) > position else 0) % rank


def extend(view: View, buffer: Buffer, steps: tuple[Step, ...], out: torch.Tensor) -> View | None:
    """`view` with `steps`, in its shortest spelling; None where it is not laid out like `out`."""
    try:
        longer = View(view.buffer, (*view.steps, *steps))
        box = longer.box(buffer, NOWHERE)
    except ProgramError:
        return None
    return shorten(longer, buffer, box) if same_layout(box, out) else None


def strided(box: Box, source: torch.Tensor, out: torch.Tensor, view: View) -> View:
    """`out` as a strided box of the buffer, by where it starts in the storage of `source`."""
    ratio = source.element_size() / out.element_size()
    start = int(out.storage_offset()) - int(int(source.storage_offset()) * ratio)
    offset = int(box.offset * ratio) + start
    steps: tuple[Step, ...] = (AsStrided(_sizes(out), tuple(map(int, out.stride())), offset),)
    if dtype_of(out.dtype) != box.dtype:
        steps = (Cast(dtype_of(out.dtype)), *steps)
    return View(view.buffer, steps)


def shorten(view: View, buffer: Buffer, box: Box) -> View:
    """The same box with fewer steps: nothing for the whole buffer, one reshape for several."""
    bare = View(view.buffer)
    if _same_box(bare.box(buffer, NOWHERE), box):
        return bare
    steps = list(view.steps)
    changed = True
    while changed:
        changed = False
        for i in range(len(steps)):
            for shorter in _shorter(steps, i, box):
                if _try(view.buffer, buffer, shorter, box):
                    steps, changed = shorter, True
                    break
            if changed:
                break
    return View(view.buffer, tuple(steps))


def _shorter(steps: list[Step], i: int, box: Box) -> list[list[Step]]:
    """Lists of fewer steps that may give the same box."""
    found = [[*steps[:i], *steps[i + 1 :]]]
    if i + 1 < len(steps):
        first, second = steps[i], steps[i + 1]
        if isinstance(first, Permute) and isinstance(second, Permute):
            joined = Permute(tuple(first.dims[dim] for dim in second.dims))
            found.append([*steps[:i], joined, *steps[i + 2 :]])
        if isinstance(first, Slice) and isinstance(second, Slice) and first.dim == second.dim:
            assert isinstance(first.start, int)
            assert isinstance(second.start, int)
            assert isinstance(second.stop, int)
            start = first.start
            joined_slice = Slice(first.dim, start + second.start, start + second.stop)
            found.append([*steps[:i], joined_slice, *steps[i + 2 :]])
    return found


def _try(name: str, buffer: Buffer, steps: list[Step], box: Box) -> bool:
    try:
        return _same_box(View(name, tuple(steps)).box(buffer, NOWHERE), box)
    except ProgramError:
        return False


def _same_box(a: Box, b: Box) -> bool:
    if (a.offset, a.sizes, a.dtype) != (b.offset, b.sizes, b.dtype):
        return False
    pairs = zip(a.sizes, a.strides, b.strides, strict=True)
    return a.numel == 0 or all(size == 1 or mine == theirs for size, mine, theirs in pairs)


def adjacent(views: Sequence[View], buffer: Buffer, sizes: tuple[int, ...]) -> View | None:
    """One view of contiguous `sizes` that holds the elements of `views` one after another.

    A concatenation of neighbours in memory is no copy: `cat(split(x, 4, 1), 0)` of a batch of one.
    """
    first = views[0]
    if any(view.buffer != first.buffer for view in views) or not sizes:
        return None
    boxes = [view.box(buffer, NOWHERE) for view in views]
    at = boxes[0].offset
    for box in boxes:
        if box.offset != at or not box.contiguous or box.dtype != boxes[0].dtype or not box.numel:
            return None
        at += box.numel
    for i in reversed(range(len(first.steps) + 1)):
        base = View(first.buffer, first.steps[:i])
        box = base.box(buffer, NOWHERE)
        if box.contiguous and box.offset <= boxes[0].offset and box.dtype == boxes[0].dtype:
            found = _within(base, box, buffer, boxes[0].offset, at, sizes)
            if found is not None:
                return found
    return None


def _within(
    base: View, box: Box, buffer: Buffer, start: int, stop: int, sizes: tuple[int, ...]
) -> View | None:
    if stop > box.offset + box.numel:
        return None
    steps: list[Step] = [*base.steps]
    if (start, stop) != (box.offset, box.offset + box.numel):
        steps += [Reshape((box.numel,)), Slice(0, start - box.offset, stop - box.offset)]
    steps.append(Reshape(sizes))
    target = Box(start, sizes, contiguous_strides(sizes), box.dtype)
    if not _try(base.buffer, buffer, steps, target):
        return None
    return shorten(View(base.buffer, tuple(steps)), buffer, target)
