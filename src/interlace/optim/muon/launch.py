"""Launches the kernel of symmetric products, and chooses how it is cut.

Everything is enqueued on the current stream; nothing waits for the device.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from interlace.kernels.gemm.support import TileConfig
from interlace.kernels.launch import RECENT, LoadedKernel, kernel_of, matrix, on, stream_of
from interlace.optim.muon.kernel import symmetric_source

CONFIGS: tuple[tuple[TileConfig, float], ...] = (
    (TileConfig(bm=128, bn=128, stages=3, warps=4, blocks=2), 1.0),
    (TileConfig(bm=128, bn=128, stages=4, warps=4), 0.57),
    (TileConfig(bm=64, bn=64, bk=128, stages=4, warps=4), 0.22),
)
"""Candidates, and the time of a wave of their tiles as in gemm/support.py; tiles are square."""


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
def processors(device: torch.device) -> int:
    """How many SMs a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4 * RECENT)
def operands(
    program: LoadedKernel, a: int, b: int, c: int, y: int, lines: int, rows: int, inner: int
) -> tuple[Any, ...]:
    """The arguments that stand for the matrices at these addresses."""
    factors = (*matrix(program, 0, a, (lines, inner)), *matrix(program, 1, b, (lines, inner)))
    return (*factors, *matrix(program, 2, c, (lines, rows)), y)


def symmetric_product(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, gamma: float
) -> Tensor:
    """`alpha * a @ b.mT + beta * c + gamma * identity` of dense matrices that the kernel serves."""
    *batch, rows, inner = a.shape
    count, device = batch[0] if batch else 1, a.device
    y = torch.empty((*batch, rows, rows), dtype=a.dtype, device=device)
    config = choose(count, rows, processors(device))
    grid = min(processors(device) * config.blocks, count * tiles(config, rows))
    with on(device):
        program = kernel_of(device, symmetric_source, config, a.dtype, c is not None)
        at = [t.data_ptr() for t in (a, b, y if c is None else c, y)]
        args = operands(program, *at, count * rows, rows, inner)
        program.launch(stream_of(device), grid, (*args, alpha, beta, gamma, count, rows, inner))
    return y
