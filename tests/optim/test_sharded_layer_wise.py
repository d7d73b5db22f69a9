"""ShardedLayerWise trains modules of fully_shard as Muon on whole parameters does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim import layerwise
from tests.optim.layerwise import DIM, Blocks, batch, differing, model, slowly
from tests.support.pool import Pool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from interlace.optim import Muon, ShardedLayerWise
from interlace.options import Options

ALONE: dict[str, Any] = {"batched": False, "symmetric": False}


class Uneven(Blocks):
    """Rows that ranks do not divide, and fewer of them than ranks."""

    def __init__(self) -> None:
        super().__init__(2)
        self.odd, self.flat = nn.Linear(DIM, 7), nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x @ self.mixer)
        return torch.cat([self.head(x), self.flat(self.odd(x))], -1)


def sharded(seed: int, mesh: Any = None) -> Any:
    module = model(seed, Uneven)
    mesh = mesh or layerwise.mesh()
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def muon(module: nn.Module, kind: str = "ours", **options: Any) -> Optimizer:
    if kind == "torch":
        return torch.optim.Muon([p for p in module.parameters() if p.dim() == 2], lr=0.02)
    groups = layerwise.by_dimensions(module.parameters())
    return Muon(groups, lr=0.02, adamw={"lr": 0.01}, **{**ALONE, **options})


def wrapped(optimizer: Optimizer, module: nn.Module, **facts: Any) -> ShardedLayerWise:
    options = Options(time_out_s=20, **facts.pop("options", {}))
    return ShardedLayerWise(optimizer, module, **{"bucket_bytes": 1, "options": options, **facts})


def train(
    optimizer: Any, module: nn.Module, seed: int, steps: range, clip: float | None = 1.0
) -> None:
    for step in steps:
        module(batch(seed, step)).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def full(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() for n, p in module.state_dict().items()}


def both_ways(seed: int, steps: int, kind: str, facts: dict[str, Any]) -> list[str]:
    """What differs between an overlapped run, whose ops are delayed, and a synchronous one."""
    made = []
    for overlap in (True, False):
        module = sharded(seed)
        with slowly(seed if overlap else None):
            given = {**facts, "options": {**facts.get("options", {}), "overlap": overlap}}
            optimizing = wrapped(muon(module, kind), module, **given)
        with optimizing:
            clip = None if facts.get("exchange_under_backward") else 1.0
            train(optimizing, module, seed, range(steps), clip)
        made.append(full(module))
    return differing(*made)


@pytest.mark.parametrize("kind", ["ours", "torch"])
@pytest.mark.parametrize("world", [2, 4])
def test_overlapped_is_synchronous_bit_for_bit(
    pool: Pool, world: int, kind: str, seed: int
) -> None:
    assert pool(world).run(both_ways, seed, 10, kind, {}) == [[]] * world


FACTS = [{"exchange_under_backward": True}, {"options": {"transport": "peer"}}]


@pytest.mark.parametrize("facts", FACTS)
def test_options(pool: Pool, facts: dict[str, Any], seed: int) -> None:
    assert pool(2).run(both_ways, seed, 6, "ours", facts) == [[]] * 2
