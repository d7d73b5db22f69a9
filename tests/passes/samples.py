"""Serial Programs as the frontend writes them, with inputs and what plain torch makes of them.

Every sample is a communication and the matmul beside it, with `inputs` and `expected` by rank. The
data are small integers, exact in bf16 as well, so results compare bit for bit whatever the order of
a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.passes.plain_sites import plain_program

from interlace.cost import SiteKey
from interlace.ir import Program

Tensors = list[torch.Tensor]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SHAPES = ("even", "uneven", "one-row", "empty")


def rows_of(shape: str, ranks: int, height: int = 3) -> tuple[int, ...]:
    """Rows of each rank's shard."""
    match shape:
        case "even":
            return (height,) * ranks
        case "uneven":
            return (*(height,) * (ranks - 1), height - 1)
        case "one-row":
            return (1, *(0,) * (ranks - 1))
        case _:
            return (0,) * ranks


@dataclass(frozen=True)
class Sample:
    """A serial Program, its inputs by rank, and the results by rank."""

    program: Program
    inputs: list[Tensors]
    expected: list[Tensors]


def integers(generator: torch.Generator, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, such that sums of a few products are exact in bf16."""
    return torch.randint(-1, 2, sizes, generator=generator).to(dtype)


def sample(
    kind: str, ranks: int, shape: str, dtype: str, seed: int, n: int = 5, height: int = 3
) -> Sample:
    """A site with rows of that shape, and what torch makes of it on all ranks together."""
    g, of = torch.Generator().manual_seed(seed), DTYPES[dtype]
    rows = rows_of(shape, ranks, height)
    key = SiteKey(kind=kind, dtype=dtype, m=sum(rows), k=8, n=n, world=ranks)
    gathers = kind == "all_gather_matmul"
    xs = [integers(g, height if gathers else sum(rows), 8, dtype=of) for height in rows]
    ws = [integers(g, 8, n, dtype=of) for _ in rows]
    if gathers:
        expected = [torch.cat(xs) @ w for w in ws]
    else:
        parts = [(x @ w).float() for x, w in zip(xs, ws, strict=True)]
        total = torch.stack(parts).sum(0).to(of)
        scattered = kind == "matmul_reduce_scatter"
        expected = list(total.split(list(rows))) if scattered else [total] * ranks
    inputs = [[x, w] for x, w in zip(xs, ws, strict=True)]
    return Sample(plain_program(key), inputs, [[one] for one in expected])


KINDS: dict[str, Callable[..., Sample]] = {
    kind: functools.partial(sample, kind)
    for kind in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
}
STRATEGIES = {
    "serial": "strategy=serial",
    "pipeline": "strategy=pipeline,chunks=2",
    "ring": "strategy=ring",
    "peer-get": "strategy=peer,protocol=get",
    "peer-put": "strategy=peer,protocol=put",
    "fused": "strategy=fused",
    "fused-pieces": "strategy=fused,chunks=12",
    "exchange": "strategy=exchange",
    "copies": "strategy=copies",
}


HEIGHTS = {"fused-pieces": 768}
"""Rows of a rank's shard where a strategy needs many: each piece has a tile of 128 at least."""


def site_of(kind: str, strategy: str, ranks: int, shape: str, dtype: str, seed: int) -> Sample:
    """A sample that the strategy can serve, if it can serve one of that shape and type."""
    columns = 8 if strategy.startswith("fused") else 5
    return KINDS[kind](ranks, shape, dtype, seed, columns, HEIGHTS.get(strategy, 3))


def taken(kind: str, strategy: str, shape: str, dtype: str) -> str:
    """What becomes of a site for which a strategy is asked."""
    if shape == "empty" or (shape == "one-row" and strategy == "pipeline"):
        return "serial"
    if strategy == "pipeline" and shape == "uneven" and kind != "matmul_all_reduce":
        return "serial"
    if strategy.startswith("fused") and (shape, dtype) != ("even", "bf16"):
        return "peer"
    return strategy.split("-")[0]
