"""Products of packed matrices: torch's `_scaled_mm` on CUDA, fp32 elsewhere.

y = matmul(x8, w8)                       # x @ w.T
dx = matmul(dy8, w8.t())                 # dy @ w
dw = matmul(dy8.t(), x8.t())             # dy.T @ x
dw = wgrad([dy8, ...], [x8, ...])        # the same over shards, with a scale each
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interlace.errors import InputError
from interlace.float8.data import ALIGNMENT, TAIL, Float8Data, numbers, padded, scales, width
from interlace.float8.quantization import turn_into
from interlace.float8.recipe import E5M2
from interlace.torch_private import scaled_mm

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def matmul(
    a: Float8Data,
    b: Float8Data,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """Multiplies two FP8 matrices that lie along K in memory: `a @ b.T`.

    Args:
        a: [M, K].
        b: [N, K]; K and N are multiples of 16.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: leaves Hopper's sums in the tensor cores, which have fewer bits than fp32.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        InputError: the two do not fit each other, or the GEMM cannot take them.
    """
    _check(a, b, out_dtype)
    shape = a.packed.shape[0], b.packed.shape[0]
    out = torch.empty(shape, dtype=out_dtype, device=a.packed.device)
    multiply_into(out, a.packed, b.packed, 1, None, fast_accum)
    return out


def wgrad(
    gradients: Sequence[Float8Data],
    inputs: Sequence[Float8Data],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes a weight's gradient as the sum over shards of `dy.T @ x`, in one GEMM.

    Args:
        gradients: dy [M, N] of each shard; its scales are powers of two, or those of all shards.
        inputs: x [M, K] of each shard, with the same M.
        out_dtype: as of `matmul`.

    Returns:
        [N, K] of `out_dtype`.

    Raises:
        InputError: there are no shards, or they do not fit each other.
    """
    if len(gradients) != len(inputs) or not inputs:
        raise InputError(
            f"there are {len(gradients)} gradients and {len(inputs)} inputs: take as many, one "
            "or more"
        )
    for name, shards in (("gradients", gradients), ("inputs", inputs)):
        kinds = {(one.columns, one.packed.dtype) for one in shards}
        if len(kinds) > 1:
            raise InputError(f"{name} are of {len(kinds)} widths or formats: take one: {kinds}")
    heights = {len(one.packed) for one in (*gradients, *inputs)}
    if len(heights) > 1:
        raise InputError(f"shards have {sorted(heights)} rows: take as many in each")
    dy, x = (torch.cat([one.packed for one in shards]) for shards in (gradients, inputs))
    columns = gradients[0].columns, inputs[0].columns
    dy_t, x_t = (
        packed.new_empty(count, width(len(dy)))
        for packed, count in zip((dy, x), columns, strict=True)
    )
    turn_into(dy_t, dy, x, len(inputs))
    turn_into(x_t, x, None, 0)
    rows = len(dy)
    return matmul(Float8Data(dy_t, padded(rows)), Float8Data(x_t, padded(rows)), out_dtype)


def multiply_into(
    out: Tensor, a: Tensor, b: Tensor, blocks: int, bias: Tensor | None, fast_accum: bool
) -> None:
    """`out = a @ b.T + bias` of packed a and b; each of equal `blocks` of a's rows has one scale.

    `bias` [N] is of `out`'s dtype. Raises InputError for rows that are not so many equal blocks.
    """
    if blocks < 1 or len(a) % blocks:
        raise InputError(f"{len(a)} packed rows are not {blocks} equal blocks of one scale each")
    if not out.numel() or a.shape[1] == TAIL:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    elif not a.is_cuda:
        total = _unpacked(a, blocks) @ _unpacked(b, 1).t()
        out.copy_(total if bias is None else total.add_(bias))
    else:
        within = None if out.dtype == torch.float32 else bias  # fp32 takes none
        right, scale_b = numbers(b).t(), _first_scale(b)
        parts = zip(a.chunk(blocks), out.chunk(blocks), strict=True) if blocks > 1 else ((a, out),)
        for rows, into in parts:
            scaled_mm(
                numbers(rows), right, scale_a=_first_scale(rows), scale_b=scale_b, bias=within,
                out_dtype=out.dtype, use_fast_accum=fast_accum, out=into,
            )  # fmt: skip
        if bias is not None and within is None:
            out.add_(bias)


def _first_scale(packed: Tensor) -> Tensor:
    words = packed.view(torch.float32)
    place = words.storage_offset() + (packed.shape[1] - TAIL) // 4
    return words.as_strided((1, 1), (1, 1), place)


def _unpacked(packed: Tensor, blocks: int) -> Tensor:
    """In fp32, each block by the scale of its first row, as the GEMM takes it."""
    scale = scales(packed)
    if len(packed):
        height = len(packed) // blocks
        scale = scale[::height].repeat_interleave(height, 0)
    return numbers(packed).float() * scale


def _check(a: Float8Data, b: Float8Data, out_dtype: torch.dtype) -> None:
    if out_dtype not in OUTPUTS:
        raise InputError(f"out_dtype is {out_dtype}: take one of {OUTPUTS}")
    (rows, k), (columns, other) = a.data.shape, b.data.shape
    if k != other:
        raise InputError(f"a is [{rows}, {k}] and b [{columns}, {other}]: take as many columns")
    for name, count in (("K (columns of a and b)", k), ("N (rows of b)", columns)):
        if count % ALIGNMENT:
            raise InputError(
                f"{name} is {count}: FP8's GEMM takes multiples of {ALIGNMENT}; pad it, or "
                "multiply in bf16"
            )
    if a.packed.device != b.packed.device:
        raise InputError(f"a is on {a.packed.device} and b on {b.packed.device}")
    if a.packed.dtype == b.packed.dtype == E5M2:
        raise InputError("a and b are both torch.float8_e5m2: one of them must be E4M3")
