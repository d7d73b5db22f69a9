"""Products of matrices that are symmetric, at about half the cost of dense ones.

    g = gram(x, kernel=serves(x))                                        # x @ x.mT
    p = polynomial(g, g, alpha=c, c=g, beta=b, kernel=serves(x))         # b * g + c * g @ g

The kernel computes the lower triangle and mirrors it, so its results are symmetric bit for bit.
The twin is what torch.optim.Muon calls, whose results are symmetric within rounding.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from interlace.kernels.gemm.support import ALIGNMENT, LIMIT, refuse_device


def gram(x: Tensor, *, kernel: bool) -> Tensor:
    """`x @ x.mT` of a matrix or a batch of them."""
    return polynomial(x, x, kernel=True) if kernel else x @ x.mT


def polynomial(
    g: Tensor,
    h: Tensor,
    *,
    alpha: float = 1.0,
    c: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
    kernel: bool,
) -> Tensor:
    """`alpha * g @ h + beta * c + gamma * identity`, all symmetric, where g and h commute."""
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(g, h, c, alpha, beta, gamma)
    if c is None:
        made = g @ h
    else:
        add = torch.addmm if g.ndim == 2 else torch.baddbmm
        made = add(c, g, h, beta=beta, alpha=alpha)
    if gamma:
        made.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return made


def serves(x: Tensor) -> bool:
    """Whether the kernel makes products of x, and of square matrices with its rows."""
    rows, inner = x.shape[-2:]
    whole = rows * x.itemsize % ALIGNMENT == 0 and inner * x.itemsize % ALIGNMENT == 0
    dense = (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and x.data_ptr() % ALIGNMENT == 0
    )
    small = x.numel() // max(inner, 1) < LIMIT and inner < LIMIT
    return whole and dense and small and x.numel() > 0 and runs_on(x.device)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on this device."""
    return torch.version.hip is None and refuse_device(device, newer=True) is None
