"""View operators of torch as the steps of a View.

Each rule gives the steps that an operator stands for; the caller compares the box that comes out
with the sizes and strides that torch recorded, so a rule that is wrong for some tensor is never
taken: such a view becomes `AsStrided`, which counts as the whole buffer where accesses are
compared.

    >>> RULES["aten.t.default"]((x,), box_of_x, recorded)
    (Permute(dims=(1, 0)),)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from interlace.errors import ProgramError, SizeError
from interlace.frontend.importing.nodes import WAIT
from interlace.frontend.importing.symbols import size_of, sizes_of
from interlace.frontend.importing.types import (
    NOWHERE,
    Args,
    dtype_of,
    same_layout,
    same_strides,
)
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
    TableEntry,
    View,
    contiguous_strides,
)
from interlace.ir.sizes import Int, unnoted

Rule = Callable[[Args, Box, torch.Tensor], tuple[Step, ...]]


def slice_bounds(args: Args, size: Int) -> tuple[Int, Int, int]:
    """Start, stop and step of `slice(x, dim, start, stop, step)` for a dimension of `size`."""
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    stop = args[3] if len(args) > 3 and args[3] is not None else size
    step = args[4] if len(args) > 4 else 1
    first, last = [min(max(at + size if at < 0 else at, 0), size) for at in (start, stop)]
    return first, max(first, last), step


def _slice(args: Args, box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    dim = (args[1] if len(args) > 1 else 0) % len(box.sizes)
    start, stop, step = slice_bounds(args, box.sizes[dim])
    if step == 1:
        return (Slice(dim, start, stop),)
    strides = (*box.strides[:dim], box.strides[dim] * step, *box.strides[dim + 1 :])
    return (AsStrided(sizes_of(out.shape), strides, box.offset + start * box.strides[dim]),)


def _diagonal(args: Args, box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    offset, dims = args[1], [dim % len(box.sizes) for dim in args[2:4]]
    first, second = [box.strides[dim] for dim in dims]
    kept = [stride for dim, stride in enumerate(box.strides) if dim not in dims]
    start = box.offset + max(offset, 0) * second + max(-offset, 0) * first
    return (AsStrided(sizes_of(out.shape), (*kept, first + second), start),)


def _transpose(args: Args, box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    dims = list(range(len(box.sizes)))
    if dims:
        first, second = args[1], args[2]
        dims[first], dims[second] = dims[second], dims[first]
    return (Permute(tuple(dims)),)


def _permute(args: Args, box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return (Permute(tuple(dim % len(box.sizes) for dim in args[1])),)


def _select(args: Args, box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    dim = args[1] % len(box.sizes)
    return (Select(dim, args[2] % box.sizes[dim]),)


def _as_complex(args: Args, box: Box, out: torch.Tensor) -> tuple[Step, ...]:
    return Cast(dtype_of(out.dtype)), Select(len(box.sizes) - 1, 0)


RESHAPES = tuple(
    f"aten.{name}.default" for name in ("view", "reshape", "_unsafe_view", "_reshape_alias")
)
_SQUEEZES = ("squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default")

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (*RESHAPES, *(f"aten.{name}" for name in _SQUEEZES)),
        lambda args, box, out: (Reshape(sizes_of(out.shape)),),
    ),
    "aten.view.dtype": lambda args, box, out: (Cast(dtype_of(out.dtype)),),
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": lambda args, box, out: (Permute(tuple(reversed(range(len(box.sizes))))),),
    "aten.numpy_T.default": lambda args, box, out: (
        Permute(tuple(reversed(range(len(box.sizes))))),
    ),
    "aten.expand.default": lambda args, box, out: (Expand(sizes_of(out.shape)),),
    "aten.slice.Tensor": _slice,
    "aten.diagonal.default": _diagonal,
    "aten.select.int": _select,
    "aten.view_as_real.default": lambda args, box, out: (
        Reshape((*box.sizes, 1)),
        Cast(dtype_of(out.dtype)),
    ),
    "aten.view_as_complex.default": _as_complex,
    **dict.fromkeys(
        (*(f"aten.{n}.default" for n in ("detach", "alias", "resolve_conj", "resolve_neg")), WAIT),
        lambda args, box, out: (),
    ),
}
"""Steps by operator; other views have none. What does not reach the recorded box is `AsStrided`."""

SPLITS = {
    "aten.split.Tensor": 2,
    "aten.split_with_sizes.default": 2,
    "aten.chunk.default": 2,
    "aten.tensor_split.sections": 2,
    "aten.unbind.int": 1,
}
"""Operators that give several views along one dimension, one after another: which argument it is.
"""


def extend(
    view: View, buffer: Buffer, steps: tuple[Step, ...], out: torch.Tensor, strides: bool = True
) -> View | None:
    """`view` with `steps`, in its shortest spelling; None where it is not laid out like `out`.
    Without `strides` only sizes and element type must be those of `out`."""
    try:
        longer = View(view.buffer, (*view.steps, *steps))
        box = longer.box(buffer, NOWHERE)
    except ProgramError:
        return None
    kind = (sizes_of(out.shape), dtype_of(out.dtype))
    same = same_layout(box, out) if strides else (box.sizes, box.dtype) == kind
    return shorten(longer, buffer, box) if same else None


def strided(box: Box, source: torch.Tensor, out: torch.Tensor) -> tuple[Step, ...]:
    """Steps to `out` from a view with this box, which is laid out like `source`, by where `out`
    starts in the storage of `source`."""
    size, out_size = source.element_size(), out.element_size()
    start = size_of(out.storage_offset()) - size_of(source.storage_offset()) * size // out_size
    offset = box.offset * size // out_size + start
    cast = (Cast(dtype_of(out.dtype)),) if dtype_of(out.dtype) != box.dtype else ()
    return (*cast, AsStrided(sizes_of(out.shape), sizes_of(out.stride()), offset))


def empty(view: View, buffer: Buffer, out: torch.Tensor) -> View:
    """An empty `out` of the same buffer: its element type may not fit where `view` begins."""
    first = Slice(0, 0, 0) if buffer.shape else Expand((0,))
    steps = (first, Reshape((0,)), Cast(dtype_of(out.dtype)), Reshape(sizes_of(out.shape)))
    return View(view.buffer, steps)


def shorten(view: View, buffer: Buffer, box: Box) -> View:
    """The same box with fewer steps: nothing for the whole buffer, one reshape for several."""
    if _try(view.buffer, buffer, [], box):
        return View(view.buffer)
    steps: list[Step] | None = list(view.steps)
    while steps is not None:
        view = View(view.buffer, tuple(steps))
        tries = (shorter for i in range(len(steps)) for shorter in _shorter(steps, i))
        steps = next((each for each in tries if _try(view.buffer, buffer, each, box)), None)
    return view


def _shorter(steps: list[Step], i: int) -> list[list[Step]]:
    """Lists of fewer steps that may give the same box."""
    found = [[*steps[:i], *steps[i + 1 :]]]
    if i + 1 < len(steps):
        first, second = steps[i], steps[i + 1]
        if isinstance(first, Permute) and isinstance(second, Permute):
            joined = Permute(tuple(first.dims[dim] for dim in second.dims))
            found.append([*steps[:i], joined, *steps[i + 2 :]])
        if isinstance(first, Slice) and isinstance(second, Slice) and first.dim == second.dim:
            start = first.start
            assert not isinstance(start, TableEntry)
            assert not isinstance(second.start, TableEntry)
            assert not isinstance(second.stop, TableEntry)
            joined = Slice(first.dim, start + second.start, start + second.stop)
            found.append([*steps[:i], joined, *steps[i + 2 :]])
    return found


def _try(name: str, buffer: Buffer, steps: list[Step], box: Box) -> bool:
    """Returns True if the steps lead to that box; False where that depends on sizes."""
    try:
        with unnoted():
            found = View(name, tuple(steps)).box(buffer, NOWHERE)
    except (ProgramError, SizeError):
        return False
    return same_box(found, box)


def same_box(a: Box, b: Box) -> bool:
    """Returns True if two boxes are the same; False where that depends on sizes."""
    try:
        with unnoted():
            same = (a.offset, a.sizes, a.dtype) == (b.offset, b.sizes, b.dtype)
            return same and same_strides(a, b.strides)
    except SizeError:
        return False


def adjacent(views: Sequence[View], buffer: Buffer, sizes: tuple[Int, ...]) -> View | None:
    """One view of contiguous `sizes` that holds the elements of `views` one after another.

    A concatenation of neighbours in memory is no copy: `cat(split(x, 4, 1), 0)` of a batch of one.
    """
    first = views[0]
    if any(view.buffer != first.buffer for view in views) or not sizes:
        return None
    boxes = [view.box(buffer, NOWHERE) for view in views]
    start, dtype = boxes[0].offset, boxes[0].dtype
    stop = start
    for box in boxes:
        if box.offset != stop or not box.contiguous or box.dtype != dtype or not box.numel:
            return None
        stop += box.numel
    target = Box(start, sizes, contiguous_strides(sizes), dtype)
    for i in reversed(range(len(first.steps) + 1)):
        box = View(first.buffer, first.steps[:i]).box(buffer, NOWHERE)
        first_of, end = box.offset, box.offset + box.numel
        if box.contiguous and first_of <= start and stop <= end and box.dtype == dtype:
            steps: list[Step] = [*first.steps[:i]]
            if (start, stop) != (first_of, end):
                steps += [Reshape((box.numel,)), Slice(0, start - first_of, stop - first_of)]
            steps.append(Reshape(sizes))
            if _try(first.buffer, buffer, steps, target):
                return shorten(View(first.buffer, tuple(steps)), buffer, target)
    return None
