"""Products of matrices that are symmetric, at about half the cost of dense ones.

    kernel = serves(x)
    g = product(x, x.mT, kernel=kernel)
    p = polynomial(g, a, b, c, kernel=kernel)         # a * identity + b * g + c * g @ g

The kernel computes the lower triangle and mirrors it, so its results are symmetric bit for bit.
The twin is what torch.optim.Muon calls, whose results are symmetric within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from interlace.kernels.gemm.support import ALIGNMENT, LIMIT, refuse_device

STEP = 128
"""A multiple of the columns that each of the kernel's configurations takes at a time."""


@dataclass(frozen=True, slots=True)
class Norm:
    """What the kernel divides a product by: the norm of each matrix of a batch, or `eps` where that
    is larger, to a power of 1 or 2. `squares` has the squares of the norms, fp32.
    """

    squares: Tensor
    eps: float
    power: int


def product(left: Tensor, right: Tensor, *, kernel: bool, norm: Norm | None = None) -> Tensor:
    """`left @ right` of matrices or batches of them, where that is symmetric: `right` is `left.mT`,
    or both are symmetric and commute. The kernel takes a `norm`.
    """
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(left, right.mT, norm=norm)
    return left @ right


def polynomial(
    g: Tensor, a: float, b: float, c: float, *, kernel: bool, norm: Norm | None = None
) -> Tensor:
    """`a * identity + b * g + c * g @ g` of symmetric matrices or batches of them. The kernel takes
    a `norm`.
    """
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(g, g, g, alpha=c, beta=b, gamma=a, norm=norm)
    made = (torch.addmm if g.ndim == 2 else torch.baddbmm)(g, g, g, beta=b, alpha=c)
    if a:
        made.diagonal(dim1=-2, dim2=-1).add_(a)
    return made


def times(p: Tensor, x: Tensor) -> Tensor:
    """`p @ x` of a symmetric p, laid out as x is."""
    return p @ x if x.is_contiguous() else (x.mT @ p).mT


def reads_columns(count: int, inner: int) -> bool:
    """Whether the kernel takes `count` matrices of `inner` columns that are transposed views: a
    step along the columns must not end in the next matrix.
    """
    return count == 1 or inner % STEP == 0


def serves(x: Tensor) -> bool:
    """Whether the kernel makes products of x, and of square matrices with its rows."""
    rows, inner = x.shape[-2:]
    whole = rows * x.itemsize % ALIGNMENT == 0 and inner * x.itemsize % ALIGNMENT == 0
    by_columns = x.mT.is_contiguous() and reads_columns(x.shape[:-2].numel(), inner)
    dense = (
        x.dtype in (torch.bfloat16, torch.float16)
        and (x.is_contiguous() or by_columns)
        and x.data_ptr() % ALIGNMENT == 0
    )
    small = x.numel() // max(min(rows, inner), 1) < LIMIT
    return whole and dense and small and x.numel() > 0 and runs_on(x.device)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on this device."""
    return torch.version.hip is None and refuse_device(device, newer=True) is None
