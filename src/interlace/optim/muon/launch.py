"""Launches Muon's kernels, and chooses how symmetric products are cut.

Everything is enqueued on the current stream; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from interlace.kernels.gemm.support import TileConfig
from interlace.kernels.launch import RECENT, LoadedKernel, kernel_of, matrix, on, stream_of
from interlace.optim.muon.kernel import BLOCK, descend_source, momentum_source, symmetric_source

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
    """Number of tiles that are computed of a matrix of that many rows."""
    side = -(-rows // config.bm)
    return side * (side + 1) // 2


@cache
def processors(device: torch.device) -> int:
    """Number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4 * RECENT)
def operands(
    program: LoadedKernel, a: int, b: int, c: int, y: int, count: int, rows: int, inner: int
) -> tuple[Any, ...]:
    """The arguments that stand for the matrices at these addresses."""
    tall = program.source.constants["TALL"]
    shape = (count * inner, rows) if tall else (count * rows, inner)
    factors = (*matrix(program, 0, a, shape), *matrix(program, 1, b, shape))
    return (*factors, *matrix(program, 2, c, (count * rows, rows)), y)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """`alpha * a @ b.mT + beta * c + gamma * identity`; see the kernel. Both a and b are
    contiguous, or both are transposed views of what is (see `reads_columns`).
    """
    *batch, rows, inner = a.shape
    tall = not a.is_contiguous()
    count, device = batch[0] if batch else 1, a.device
    y = torch.empty((*batch, rows, rows), dtype=a.dtype, device=device)
    config = choose(count, rows, processors(device))
    grid = min(processors(device) * config.blocks, count * tiles(config, rows))
    with on(device):
        program = kernel_of(device, symmetric_source, config, a.dtype, c is not None, tall)
        at = [t.data_ptr() for t in (a, b, y if c is None else c, y)]
        args = operands(program, *at, count, rows, inner)
        numbers = (alpha, beta, gamma, count, rows, inner)
        program.launch(stream_of(device), grid, (*args, *numbers))
    return y


def stack(
    updates: Sequence[Tensor],
    moments: Sequence[Tensor] | None = None,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[Tensor, Tensor]:
    """Copies contiguous updates of one shape and dtype into one bfloat16 tensor; gives that and the
    sum of the squares of each, fp64. With `moments`, what is given is gradients: moments are
    averaged with them, in place, and updates are those, or with `nesterov` the look ahead.
    """
    device, size = updates[0].device, updates[0].numel()
    grid, average = -(-size // BLOCK), moments is not None
    x = torch.empty((len(updates), *updates[0].shape), dtype=torch.bfloat16, device=device)
    squares = torch.empty((len(updates), grid), dtype=torch.float64, device=device)
    numbers = (size, 1 - momentum, momentum)
    with on(device):
        program = kernel_of(device, momentum_source, updates[0].dtype, average, nesterov)
        for at, update in enumerate(updates):
            moment = moments[at].data_ptr() if moments is not None else 0
            to = (x.data_ptr() + at * size * x.itemsize, squares.data_ptr() + at * grid * 8)
            args = (update.data_ptr(), moment, *to, *numbers)
            program.launch(stream_of(device), grid, args)
    return x, squares.sum(1)


def descend(params: Sequence[Tensor], made: Tensor, *, factor: float, alpha: float) -> None:
    """`param * factor + alpha * made[i]` for each of contiguous parameters of one dtype."""
    device, size = made.device, params[0].numel()
    with on(device):
        program = kernel_of(device, descend_source, params[0].dtype)
        for at, param in enumerate(params):
            args = (param.data_ptr(), made.data_ptr() + at * size * made.itemsize)
            program.launch(stream_of(device), -(-size // BLOCK), (*args, size, factor, alpha))
