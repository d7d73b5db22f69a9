"""GEMMs of quantised matrices by torch's `_scaled_mm`, each beside its dequantised twin.

y = matmul(x8, w8)                       # x @ w.T
dx = matmul(dy8, w8.t())                 # dy @ w
dw = wgrad([dy8], [x8])                  # dy.T @ x; or over shards, with a scale each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from interlace.errors import InputError
from interlace.float8.data import ALIGNMENT, Float8Data
from interlace.float8.recipe import E5M2

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def matmul(
    a: Float8Data,
    b: Float8Data,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """`a @ b.T` of a [M, K] and b [N, K], both along K in memory, as [M, N] of `out_dtype`.

    K and N are multiples of 16; `out_dtype` is bf16, fp16 or fp32. `fast_accum` leaves Hopper's
    sums in the tensor cores, which have fewer bits than fp32. Raises InputError where the two do
    not fit each other, or the GEMM cannot take them.
    """
    _check(a, b, out_dtype)
    if not a.data.numel() or not b.data.numel():
        return torch.zeros(a.data.shape[0], b.data.shape[0], dtype=out_dtype, device=a.data.device)
    scale_a, scale_b = a.scale_inv, b.scale_inv.t()
    by_row = scale_a.numel() > 1 or scale_b.numel() > 1
    apart = by_row and out_dtype == torch.float32  # not every GEMM with row scales writes fp32
    ones = torch.ones(1, 1, device=a.data.device) if apart else None
    out = torch._scaled_mm(
        a.data,
        b.data.t(),
        scale_a=scale_a if ones is None else ones,
        scale_b=scale_b if ones is None else ones,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )
    return out if ones is None else out.mul_(scale_a).mul_(scale_b)


def matmul_twin(a: Float8Data, b: Float8Data, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same in plain torch: dequantised, multiplied in fp32, rounded once."""
    _check(a, b, out_dtype)
    return (a.dequantize() @ b.dequantize().t()).to(out_dtype)


def wgrad(
    gradients: Sequence[Float8Data],
    inputs: Sequence[Float8Data],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The sum over shards of `dy.T @ x`, dy [M, N] and x [M, K], as [N, K] of `out_dtype`.

    Every shard has its own rows M and its own scales, and a transposed copy. Shards are added in
    fp32 in the order given, and the sum is rounded once. Raises InputError without shards, or
    where two do not fit each other.
    """
    return _sum(gradients, inputs, out_dtype, matmul)


def wgrad_twin(
    gradients: Sequence[Float8Data],
    inputs: Sequence[Float8Data],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same in plain torch."""
    return _sum(gradients, inputs, out_dtype, matmul_twin)


def _sum(
    gradients: Sequence[Float8Data],
    inputs: Sequence[Float8Data],
    out_dtype: torch.dtype,
    product: Callable[[Float8Data, Float8Data, torch.dtype], Tensor],
) -> Tensor:
    if len(gradients) != len(inputs) or not inputs:
        raise InputError(
            f"there are {len(gradients)} gradients and {len(inputs)} inputs: take as many, one "
            "or more"
        )
    _check_output(out_dtype)
    total = None
    for dy, x in zip(gradients, inputs, strict=True):
        part = product(dy.t(), x.t(), torch.float32)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(out_dtype)


def _check_output(dtype: torch.dtype) -> None:
    if dtype not in OUTPUTS:
        raise InputError(f"out_dtype is {dtype}: take one of {OUTPUTS}")


def _check(a: Float8Data, b: Float8Data, out_dtype: torch.dtype) -> None:
    _check_output(out_dtype)
    (rows, k), (columns, other) = a.data.shape, b.data.shape
    if k != other:
        raise InputError(f"a is [{rows}, {k}] and b [{columns}, {other}]: take as many columns")
    for name, count in (("K (columns of a and b)", k), ("N (rows of b)", columns)):
        if count % ALIGNMENT:
            raise InputError(
                f"{name} is {count}: FP8's GEMM takes multiples of {ALIGNMENT}; pad it, or "
                "multiply in bf16"
            )
    if a.data.device != b.data.device:
        raise InputError(f"a is on {a.data.device} and b on {b.data.device}")
    if a.data.dtype == b.data.dtype == E5M2:
        raise InputError("a and b are both torch.float8_e5m2: one of them must be E4M3")
    if (a.scale_inv.shape[0] > 1) != (b.scale_inv.shape[0] > 1) and rows > 1:
        raise InputError("one of a and b has a scale for each row: quantize both by one recipe")
