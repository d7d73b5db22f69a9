"""Products of matrices that are symmetric, at about half the cost of dense ones.

    g = gram(x, kernel=serves(x))                                        # x @ x.mT
    p = polynomial(g, g, g, beta=b, alpha=c, kernel=serves(x))           # b * g + c * g @ g

The kernel computes the lower triangle and mirrors it, so its results are symmetric bit for bit.
The twin is what torch.optim.Muon calls, whose results are symmetric within rounding.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from interlace.kernels.gemm.support import ALIGNMENT, LIMIT, TileConfig, refuse_device
from interlace.kernels.launch import RECENT, LoadedKernel, kernel_of, matrix, on, stream_of

CONFIGS: tuple[tuple[TileConfig, float], ...] = (
    (TileConfig(bm=128, bn=128, stages=3, warps=4, blocks=2), 1.0),
    (TileConfig(bm=128, bn=128, stages=4, warps=4), 0.57),
    (TileConfig(bm=64, bn=64, bk=128, stages=4, warps=4), 0.22),
)
"""Candidates, and the time of a wave of their tiles as in gemm/support.py; tiles are square."""


def gram(x: Tensor, *, kernel: bool) -> Tensor:
    """`x @ x.mT` of a matrix or a batch of them."""
    return _by_kernel(x, x, None, 1.0, 0.0) if kernel else x @ x.mT


def polynomial(
    c: Tensor, g: Tensor, h: Tensor, *, beta: float, alpha: float, kernel: bool
) -> Tensor:
    """`beta * c + alpha * g @ h`, all symmetric, where g and h commute."""
    if kernel:
        return _by_kernel(g, h, c, alpha, beta)
    return (torch.addmm if g.ndim == 2 else torch.baddbmm)(c, g, h, beta=beta, alpha=alpha)


def serves(x: Tensor) -> bool:
    """Whether the kernel makes products of x, and of square matrices with its rows."""
    rows, inner = x.shape[-2:]
    whole = rows * x.itemsize % ALIGNMENT == 0 and inner * x.itemsize % ALIGNMENT == 0
    dense = x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    small = x.numel() // max(inner, 1) < LIMIT and inner < LIMIT
    return whole and dense and small and x.numel() > 0 and runs_on(x.device)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel runs on this device."""
    return torch.version.hip is None and refuse_device(device, newer=True) is None


def choose(count: int, rows: int, processors: int) -> TileConfig:
    """The candidate whose waves take the least time; the first where two are equal."""

    def cost(candidate: tuple[TileConfig, float]) -> float:
        config, wave = candidate
        return ceil(count * tiles(config, rows) / (processors * config.blocks)) * wave

    return min(CONFIGS, key=cost)[0]


def tiles(config: TileConfig, rows: int) -> int:
    """How many tiles of a matrix of that many rows are computed."""
    side = -(-rows // config.bm)
    return side * (side + 1) // 2


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4 * RECENT)
def _operands(
    program: LoadedKernel, a: int, b: int, c: int, y: int, lines: int, rows: int, inner: int
) -> tuple[Any, ...]:
    """The arguments that stand for the matrices at these addresses."""
    factors = (*matrix(program, 0, a, (lines, inner)), *matrix(program, 1, b, (lines, inner)))
    return (*factors, *matrix(program, 2, c, (lines, rows)), y)


def _by_kernel(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    from interlace.optim.muon.kernel import symmetric_source

    *batch, rows, inner = a.shape
    count, device = a.shape[0] if batch else 1, a.device
    y = torch.empty((*batch, rows, rows), dtype=a.dtype, device=device)
    config = choose(count, rows, _processors(device))
    grid = min(_processors(device) * config.blocks, count * tiles(config, rows))
    with on(device):
        program = kernel_of(device, symmetric_source, config, a.dtype, c is not None)
        added = y if c is None else c
        addresses = (t.data_ptr() for t in (a, b, added, y))
        operands = _operands(program, *addresses, count * rows, rows, inner)
        numbers = alpha, beta, count, rows, inner
        program.launch(stream_of(device), grid, (*operands, *numbers))
    return y
