"""Quantises a tensor: checks it, then the kernels on CUDA and the twin elsewhere.

    x8 = quantize(x, E4M3, recipe, transpose=True, group=tp)

A team's maximum can be reduced apart from the cast, under other work:

    amax = amax_of(x)
    work = dist.all_reduce(amax, dist.ReduceOp.MAX, group=tp, async_op=True)
    ...
    work.wait()
    x8 = quantize(x, E4M3, recipe, amax=amax)
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.errors import InputError, UnsupportedError
from interlace.float8.data import Float8Data, numbers, scales, width
from interlace.float8.recipe import FORMATS, Recipe
from interlace.float8.rule import amax_twin, cast_twin, scale_of

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITY, BY_KERNEL = (8, 9), (9, 0)
"""The first GPUs that have FP8, and that round fp32 to FP8 once, as our kernels have to."""
DEFAULT = Recipe()


def quantize(
    x: Tensor,
    kind: torch.dtype,
    recipe: Recipe = DEFAULT,
    *,
    transpose: bool = False,
    group: dist.ProcessGroup | None = None,
    amax: Tensor | None = None,
) -> Float8Data:
    """`x` (..., K) as a matrix of FP8 [M, K], with its scales; no gradient flows.

    x is bf16, fp16 or fp32, of any strides; `kind` is E4M3 or E5M2. `transpose` adds the copy
    [K, M] that a product over M needs. `group` has the other shards of x: where the recipe says
    `scale="team"`, the maximum of all is taken, by one all-reduce on the current stream. `amax`,
    fp32 numbers of which the largest counts, stands for the maximum of x where one is known.

    Raises InputError for another dtype, format, or number of dimensions, or an `amax` that does
    not fit; UnsupportedError on a device without FP8.
    """
    matrix = _matrix(x)
    if kind not in FORMATS:
        raise InputError(f"kind is {kind}: take one of {FORMATS}")
    if recipe.scaling == "row":
        if amax is not None:
            raise InputError("amax is given with scaling='row': each row has its own; leave it out")
    elif amax is None:
        amax = _amax(matrix)
        if group is not None and recipe.scale == "team":
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    elif amax.dtype != torch.float32 or amax.device != x.device or not amax.numel():
        raise InputError(
            f"amax is {amax.dtype} {tuple(amax.shape)} on {amax.device}: take one or more numbers "
            f"of torch.float32 on {x.device}"
        )
    elif group is not None:
        raise InputError("amax and group are given: reduce amax over the group, or leave it out")
    rows, columns = matrix.shape
    packed = torch.empty(rows, width(columns), dtype=kind, device=x.device)
    across = None
    if transpose:
        across = torch.empty(columns, width(rows), dtype=kind, device=x.device)
    quantize_into(matrix, recipe, amax, packed, across)
    return Float8Data(packed, columns, recipe.scaling == "row", across)


def amax_of(x: Tensor) -> Tensor:
    """fp32 numbers of which the largest is the maximum of |x|, NaN left out; 0 if x is empty.

    How many there are depends on the device alone, so ranks can reduce them element by element.
    Raises what `quantize` raises.
    """
    return _amax(_matrix(x))


def amax_size(device: torch.device) -> int:
    """How many numbers `amax_of` gives."""
    if not _has_kernels(device):
        return 1
    from interlace.float8 import kernel

    return kernel.PARTS


def quantize_into(
    x: Tensor, recipe: Recipe, amax: Tensor | None, packed: Tensor, across: Tensor | None
) -> None:
    """Fills packed rows, and those of the transpose, with a matrix whose rows are dense.

    `amax` has the maximum; without it each row has its scale.
    """
    if _by_kernel(x) and x.numel():
        from interlace.float8 import kernel

        kernel.quantize(x, recipe, amax, packed, across)
    else:
        quantize_twin(x, recipe, amax, packed, across)


def quantize_twin(
    x: Tensor, recipe: Recipe, amax: Tensor | None, packed: Tensor, across: Tensor | None
) -> None:
    """`quantize_into` in plain torch."""
    largest = torch.finfo(packed.dtype).max
    whole = None if amax is None else scale_of(amax.amax().reshape(1, 1), largest, recipe)
    for matrix, into in ((x, packed), (x.t(), across)):
        if into is not None:
            scale = scale_of(amax_twin(matrix, 1), largest, recipe) if whole is None else whole
            into.view(torch.uint8).zero_()
            numbers(into)[:, : matrix.shape[1]] = cast_twin(matrix, scale, packed.dtype)
            scales(into).copy_(1 / scale)


def _amax(x: Tensor) -> Tensor:
    if not _by_kernel(x):
        return amax_twin(x)
    from interlace.float8 import kernel

    return kernel.amax_of(x)


def _by_kernel(x: Tensor) -> bool:
    return _has_kernels(x.device)


def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= BY_KERNEL


def check_device(x: Tensor) -> None:
    """Raises InputError or UnsupportedError where `x` cannot be quantised where it is."""
    if x.dtype not in INPUTS:
        raise InputError(f"x is {x.dtype}: take one of {INPUTS}")
    if not x.dim():
        raise InputError("x has no dimensions: take (..., K)")
    if x.is_cuda:
        found = torch.cuda.get_device_capability(x.device)
        if found < CAPABILITY:
            raise UnsupportedError(
                f"x is on {x.device}, a GPU of capability {found}: FP8 needs {CAPABILITY} or later"
            )
    elif x.device.type != "cpu":
        raise UnsupportedError(f"x is on {x.device}: FP8 is for CUDA and the CPU")


def _matrix(x: Tensor) -> Tensor:
    """`x` as rows, each of them dense, if it can be quantised where it is."""
    check_device(x)
    rows = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
