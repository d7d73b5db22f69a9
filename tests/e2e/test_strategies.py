"""Every strategy on real processes: what an Executor gives equals plain torch.distributed.

Data are small integers, exact in bf16 as well, so equality is exact whatever the order of a sum.
Each test runs all shapes (even, uneven, one row, empty) of one site and strategy with a drawn team
and dtype. The slow tests take every team and dtype.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from tests.passes.samples import (
    DTYPES,
    HEIGHTS,
    KINDS,
    SHAPES,
    STRATEGIES,
    rows_of,
    site_of,
    taken,
)
from tests.runtime.programs import world_group
from tests.support.pool import Pool

from interlace.options import Options
from interlace.passes import run_pipeline
from interlace.runtime import Executor

LOWER = "find_sites,decompose{{{}}},schedule,plan_memory,insert_sync,fuse"


def reference(kind: str, rows: tuple[int, ...], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The site in plain torch.distributed; uneven gathers and scatters by padding."""
    rank, ranks, tall = dist.get_rank(), len(rows), max(rows)
    if kind == "all_gather_matmul":
        shards = [x.new_zeros(tall, x.shape[1]) for _ in rows]
        padded = x.new_zeros(tall, x.shape[1])
        padded[: x.shape[0]] = x
        if tall:
            dist.all_gather(shards, padded)
        return torch.cat([shard[:n] for shard, n in zip(shards, rows, strict=True)]) @ w
    y = (x @ w).float()
    if y.numel():
        dist.all_reduce(y)
    y = y.to(x.dtype)
    return y.split(list(rows))[rank] if kind == "matmul_reduce_scatter" else y[: sum(rows[:ranks])]


def run_shapes(kind: str, strategy: str, ranks: int, dtype: str, seed: int) -> dict[str, str]:
    """On one rank: shape -> "" or what is wrong."""
    rank = dist.get_rank()
    wrong: dict[str, str] = {}
    for shape in SHAPES:
        sample = site_of(kind, strategy, ranks, shape, dtype, seed)
        program = run_pipeline(sample.program, LOWER.format(STRATEGIES[strategy]))
        (site,) = program.sites
        assert site.strategy == taken(kind, strategy, shape, dtype), shape
        x, w = sample.inputs[rank]
        expected = reference(kind, rows_of(shape, ranks, HEIGHTS.get(strategy, 3)), x, w)
        for in_order in (False, True) if site.strategy == "fused" else (False,):
            options = Options(timeout_s=20, in_order=in_order)
            executor = Executor(program, groups={"tp": world_group()}, options=options).prepare()
            for _ in range(3):  # the slots are used in turn
                (found,) = executor.run([x, w])
                if found.shape != expected.shape or not torch.equal(found, expected):
                    wrong[shape] = f"rank {rank}: {found} instead of {expected}"
            dist.barrier()
            executor.close()
    return wrong


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        ("drawn", 0),
        *(pytest.param(d, n, marks=pytest.mark.slow) for d in DTYPES for n in (2, 3, 4)),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_distributed(
    pool: Pool, kind: str, strategy: str, ranks: int, dtype: str, seed: int
) -> None:
    if dtype == "drawn":
        draw = random.Random(seed)
        dtype, ranks = draw.choice([*DTYPES]), draw.choice((2, 3, 4))
    for wrong in pool(ranks).run(run_shapes, kind, strategy, ranks, dtype, seed):
        assert not wrong, (ranks, dtype)
