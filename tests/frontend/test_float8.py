"""FP8 in compiled graphs: what is gathered or summed beside its GEMMs is overlapped."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    reduce_scatter_tensor,
)

from interlace.float8 import E4M3, Recipe, linear
from interlace.frontend import backend

STRATEGIES = ["pipeline", "ring", "peer"]


def quantised(x: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
    """x in FP8 and 1 / scale, in plain torch, as torchao's models have it."""
    amax = x.abs().max().double()
    if shared:
        amax = all_reduce(amax, "max", dist.group.WORLD)  # type: ignore[arg-type]
    scale = (448.0 / amax.clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-448.0, 448.0).to(E4M3), scale.reciprocal()


def by_tensor(x: Tensor, w: Tensor) -> Tensor:
    """One scale for the ranks' shards: rows are gathered in FP8."""
    (x8, x_inv), (w8, w_inv) = quantised(x, True), quantised(w, False)
    full = all_gather_tensor(x8, 0, dist.group.WORLD)  # type: ignore[arg-type]
    return torch._scaled_mm(full, w8.t(), x_inv, w_inv, out_dtype=torch.bfloat16)


def by_row(x: Tensor, w: Tensor) -> Tensor:
    """A scale for each row, gathered beside the rows."""
    scale = 448.0 / x.float().abs().amax(1, keepdim=True)
    x8, w8 = (x.float() * scale).to(E4M3), w.to(E4M3)
    group: Any = dist.group.WORLD
    full, inverse = all_gather_tensor(x8, 0, group), all_gather_tensor(1 / scale, 0, group)
    ones = torch.ones(1, len(w))
    return torch._scaled_mm(full, w8.t(), inverse, ones, out_dtype=torch.bfloat16)


def summed(x: Tensor, w: Tensor) -> Tensor:
    """A layer of Interlace's own, whose results are summed."""
    y = linear(x, w, None, Recipe())
    return reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD)  # type: ignore[arg-type]


MODELS = {"tensor": by_tensor, "row": by_row, "summed": summed}


def run(which: str, strategy: str, seed: int) -> tuple[bytes, list[str], str]:
    """The result's bits, the sites with their strategies, and what `explain` says."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    w = torch.randn(48, 64).bfloat16()
    torch.manual_seed(seed + dist.get_rank())
    x = torch.randn(64, 64).bfloat16()
    with capture() as captured, torch.no_grad():
        options: Any = {"strategy": strategy, "timeout_s": 30.0}
        y = torch.compile(MODELS[which], backend=backend, options=options, fullgraph=True)(x, w)
    sites = [f"{s.kind} {s.strategy}" for s in captured.graphs[0].bound[0].program.sites]
    return bytes(y.flatten().view(torch.uint8).tolist()), sites, captured.explain()


@pytest.mark.strict
@pytest.mark.parametrize("which", MODELS)
def test_sites_are_found(pool: Pool, which: str, seed: int) -> None:
    """With a strategy that is drawn and with `auto`, and the bits of the serial Program."""
    if which == "row" and torch.__version__ < "2.12":
        pytest.skip("this torch has no scales of rows on the CPU")
    kind = "matmul_reduce_scatter" if which == "summed" else "all_gather_matmul"
    serial = pool(2).run(run, which, "serial", seed)
    for strategy in (random.Random(seed).choice(STRATEGIES), "auto"):
        for (found, sites, text), (wanted, _, _) in zip(
            pool(2).run(run, which, strategy, seed), serial, strict=True
        ):
            assert found == wanted, strategy
            assert any(site.startswith(kind) for site in sites), text
            assert strategy == "auto" or any(site == f"{kind} {strategy}" for site in sites), sites
