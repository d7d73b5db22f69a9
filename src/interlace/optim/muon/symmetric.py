"""Products of matrices that are symmetric, at about half the cost of dense ones.

    kernel = serves(x)
    g = product(x, x.mT, kernel=kernel)
    p = polynomial(g, a, b, c, kernel=kernel)         # a * identity + b * g + c * g @ g

The kernel computes the lower triangle and mirrors it, so its results are symmetric bit for bit.
The twin is what torch.optim.Muon calls, whose results are symmetric within rounding.

Note [Completed square]
    a + b g + c g^2 is c (g + h)^2 + a - b h / 2 with h = b / (2 c), which reads one matrix and not
    two. g + h is rounded where g was: the diagonal by 2^-9 of h, which the factor has b times, so
    b may not be steep. Else the sum is as it stands.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from interlace.kernels.gemm.support import ALIGNMENT, LIMIT, refuse_device

STEEP = 8.0
"""The square is completed for smaller |b|."""
STEP = 128
"""A multiple of the columns that each of the kernel's configurations takes at a time."""


def product(left: Tensor, right: Tensor, *, kernel: bool) -> Tensor:
    """`left @ right` of matrices or batches of them, where that is symmetric: `right` is `left.mT`,
    or both are symmetric and commute.
    """
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(left, right.mT)
    return left @ right


def factor(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """`a * identity + b * g + c * g @ g`, g being `x @ x.mT`, by the kernel."""
    from interlace.optim.muon.launch import symmetric_product  # imports Triton

    if abs(b) >= min(STEEP, 4 * abs(c)):
        g = symmetric_product(x, x)
        return symmetric_product(g, g, g, alpha=c, beta=b, gamma=a)
    half = b / (2 * c)  # see Note [Completed square]
    g = symmetric_product(x, x, gamma=half)
    return symmetric_product(g, g, alpha=c, gamma=a - half * b / 2)


def polynomial(g: Tensor, a: float, b: float, c: float, *, kernel: bool) -> Tensor:
    """`a * identity + b * g + c * g @ g` of symmetric matrices or batches of them."""
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(g, g, g, alpha=c, beta=b, gamma=a)
    if c == 0:  # torch 2.13's baddbmm of bfloat16 ignores beta then, on CPUs
        made = g * b
    else:
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
