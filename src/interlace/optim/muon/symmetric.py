"""Products of matrices that are symmetric, at about half the cost of dense ones.

    kernel = serves(x)
    g = product(x, x.mT, kernel=kernel)
    p = polynomial(g, a, b, c, kernel=kernel)         # a * identity + b * g + c * g @ g

The kernel computes the lower triangle and mirrors it, so its results are symmetric bit for bit.
The twin is what torch.optim.Muon calls, whose results are symmetric within rounding.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from interlace.kernels.gemm.support import ALIGNMENT, LIMIT, refuse_device


def product(left: Tensor, right: Tensor, *, kernel: bool) -> Tensor:
    """`left @ right` of matrices or batches of them, where that is symmetric: `right` is `left.mT`,
    or both are symmetric and commute.
    """
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(left, right.mT)
    return left @ right


def polynomial(g: Tensor, a: float, b: float, c: float, *, kernel: bool) -> Tensor:
    """`a * identity + b * g + c * g @ g` of symmetric matrices or batches of them."""
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(g, g, g, alpha=c, beta=b, gamma=a)
    made = (torch.addmm if g.ndim == 2 else torch.baddbmm)(g, g, g, beta=b, alpha=c)
    if a:
        made.diagonal(dim1=-2, dim2=-1).add_(a)
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
