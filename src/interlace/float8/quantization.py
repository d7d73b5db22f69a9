"""Quantises a tensor: checks it, then the kernels on CUDA and the reference elsewhere.

    x8 = quantize(x, E4M3, recipe, transpose=True)

A team's maximum is reduced apart from the cast, under other work:

    amax = amax_of(x)
    work = dist.all_reduce(amax, dist.ReduceOp.MAX, group=tp, async_op=True)
    ...
    work.wait()
    x8 = quantize(x, E4M3, recipe, amax=amax)

Note [One scale for a sum over shards]
    The gradient of a weight is dy.T @ x, summed over rows that come from shards with a scale each,
    of dy or of x. Hopper's GEMM takes one scale for each factor, and both factors transposed. So
    the transpose of dy is made by the greatest `1 / scale` that a shard has in dy and x together:
    the numbers of a shard are multiplied by its share of that, 1 or less, a power of two (or 1, by
    a team's scales). This is exact but for what becomes subnormal: E5M2 has 30 binades above that,
    so numbers that are lost are 2**-30 of the largest; E4M3 gradients have 15. The transpose of x
    is its bytes, with 1 for a scale. The order of the sum is that of one GEMM over all rows. A
    shard of zeros must not have the greatest `1 / scale`: see TINY in recipe.py.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from interlace.errors import InputError, UnsupportedError
from interlace.float8.data import Float8Data, numbers, scales, width
from interlace.float8.recipe import FORMATS, Recipe
from interlace.float8.rule import amax_reference, cast_reference, scale_of

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
    amax: Tensor | None = None,
) -> Float8Data:
    """Quantises a tensor to a matrix of FP8 with its scales; no gradient flows.

    Args:
        x: [..., K], bf16, fp16 or fp32, of any strides.
        kind: E4M3 or E5M2.
        recipe: how the scale is rounded, and from which maximum.
        transpose: adds the copy [K, M] that a product over M needs.
        amax: fp32 numbers of which the largest counts as the maximum of x, such as that of all
            shards of x.

    Returns:
        The matrix [M, K], M being the rows of all leading dimensions.

    Raises:
        InputError: another dtype, format or number of dimensions, or an `amax` that does not fit.
        UnsupportedError: the device has no FP8.
    """
    matrix = _matrix(x)
    if kind not in FORMATS:
        raise InputError(f"kind is {kind}: take one of {FORMATS}")
    if amax is None:
        amax = _amax(matrix)
    elif amax.dtype != torch.float32 or amax.device != x.device or not amax.numel():
        raise InputError(
            f"amax is {amax.dtype} {tuple(amax.shape)} on {amax.device}: take one or more numbers "
            f"of torch.float32 on {x.device}"
        )
    rows, columns = matrix.shape
    packed = torch.empty(rows, width(columns), dtype=kind, device=x.device)
    across = None
    if transpose:
        across = torch.empty(columns, width(rows), dtype=kind, device=x.device)
    quantize_into(matrix, recipe, amax, packed, across)
    return Float8Data(packed, columns, across)


def amax_of(x: Tensor) -> Tensor:
    """Computes the maximum of |x|, in parts that ranks can reduce element by element.

    Args:
        x: as of `quantize`.

    Returns:
        fp32 numbers of which the largest is the maximum, NaN left out; 0 if x is empty. How many
        there are depends on the device alone.

    Raises:
        InputError, UnsupportedError: as of `quantize`.
    """
    return _amax(_matrix(x))


def amax_size(device: torch.device) -> int:
    """The count of numbers that `amax_of` gives."""
    if not has_kernels(device):
        return 1
    from interlace.float8 import launch

    return launch.PARTS


def kernels(x: Tensor) -> ModuleType | None:
    """The launches of Triton's kernels, where these serve a matrix."""
    if not has_kernels(x.device) or not x.numel():
        return None
    from interlace.float8 import launch

    return launch


def amax_into(found: Tensor, x: Tensor) -> None:
    """Fills what `amax_of` gives of a matrix whose rows are dense."""
    if launch := kernels(x):
        launch.amax_into(found, x)
    else:
        found.copy_(amax_reference(x))


def quantize_into(
    x: Tensor, recipe: Recipe, amax: Tensor, packed: Tensor | None, across: Tensor | None
) -> None:
    """Fills packed rows, or those of the transpose, or both, with a matrix whose rows are dense."""
    launch = kernels(x)
    (launch.quantize if launch else quantize_reference)(x, recipe, amax, packed, across)


def quantize_reference(
    x: Tensor, recipe: Recipe, amax: Tensor, packed: Tensor | None, across: Tensor | None
) -> None:
    """`quantize_into` in plain torch."""
    for matrix, into in ((x, packed), (x.t(), across)):
        if into is not None:
            largest = torch.finfo(into.dtype).max
            scale = scale_of(amax.amax().reshape(1, 1), largest, recipe)
            into.view(torch.uint8).zero_()
            numbers(into)[:, : matrix.shape[1]] = cast_reference(matrix, scale, into.dtype)
            scales(into).copy_(1 / scale)


def turn_into(across: Tensor, packed: Tensor, by: Tensor | None, blocks: int) -> None:
    """Fills the packed rows of the transpose [K, width(M)] from packed rows [M, width(K)] of equal
    `blocks` with one scale each. See Note [One scale for a sum over shards].
    """
    if launch := kernels(packed):
        launch.turn(packed, by, blocks, across)
    else:
        turn_reference(across, packed, by, blocks)


def turn_reference(across: Tensor, packed: Tensor, by: Tensor | None, blocks: int) -> None:
    """`turn_into` in plain torch."""
    rows, columns = len(packed), len(across)
    value, total = numbers(packed)[:, :columns], torch.ones(())
    found = value.view(torch.uint8)
    if blocks and rows:
        inverse = scales(packed)[:: rows // blocks]
        inverse = inverse if by is None else inverse * scales(by)[:: rows // blocks]
        total = inverse.amax()
        share = torch.where(total > 0, inverse / total, 0.0).repeat_interleave(rows // blocks, 0)
        found = cast_reference(value, share, packed.dtype).view(torch.uint8)
    across.view(torch.uint8).zero_()
    across[:, :rows] = found.t().view(packed.dtype)
    scales(across).copy_(total)


def _amax(x: Tensor) -> Tensor:
    found = torch.empty(amax_size(x.device), dtype=torch.float32, device=x.device)
    amax_into(found, x)
    return found


@functools.lru_cache
def has_kernels(device: torch.device) -> bool:
    """Returns true where Triton's kernels serve the device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= BY_KERNEL


def check_device(x: Tensor) -> None:
    """Raises InputError or UnsupportedError where `x` cannot be quantised where it is."""
    if hasattr(x, "device_mesh"):
        raise InputError("x is a DTensor: give its local part, to_local()")
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
