"""Norms over ranks of gradients whose squares are no numbers of fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.layerwise import DIM, layer_wise, model
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from interlace.optim import LayerWise, Muon
from interlace.options import Options

HOW = ["replicas", "fully_shard"]
WIDE = 8 * DIM


def trained(how: str, power: int, seed: int) -> list[torch.Tensor]:
    """Weights after steps whose losses are so large."""
    module = model(
        seed, lambda: nn.Sequential(nn.Linear(DIM, WIDE, bias=False), nn.Linear(WIDE, 64, False))
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    facts: dict[str, Any] = {"options": Options(timeout_s=30)}
    if how == "fully_shard":
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    inner = Muon(module.parameters(), lr=0.02, eps=0.0)
    with LayerWise(inner, module, mesh, **facts) as made:
        for step in range(3):
            draw = torch.Generator().manual_seed(seed + step)
            loss = module(torch.randn(4, DIM, generator=draw)).sum() * 2.0**power
            loss.backward()
            made.step()
            made.zero_grad()
    weights = (param.detach() for param in module.parameters())
    return [w.full_tensor() if isinstance(w, DTensor) else w for w in weights]


def off(how: str, seed: int) -> list[int]:
    wanted = trained(how, 0, seed)
    return [
        power
        for power in (-95, 66, 115)
        if not all(map(torch.equal, trained(how, power, seed), wanted))
    ]


@pytest.mark.parametrize("how", HOW)
def test_updates_do_not_depend_on_the_size_of_gradients(pool: Pool, how: str, seed: int) -> None:
    assert pool(2).run(off, how, seed) == [[], []]


def clipped(seed: int, power: int) -> tuple[float, float]:
    """The norm before clipping, and the largest gradient after it."""
    module = model(seed, lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2)))
    with layer_wise(module, "sgd") as optimizing:
        (module(torch.ones(4, DIM)).sum() * 2.0**power).backward()
        norm = optimizing.clip_grad_norm_(2.0**-20).item() / 2.0**power
        largest = max(grad.abs().max().item() for grad in optimizing._reduced_grads().values())
        return norm, largest


def test_large_gradients_are_clipped_and_not_lost(pool: Pool, seed: int) -> None:
    wanted, few = pool(2).run(clipped, seed, 0), pool(2).run(clipped, seed, 100)
    for (norm, largest), (large, left) in zip(wanted, few, strict=True):
        assert large == pytest.approx(norm, rel=1e-6)
        assert left == pytest.approx(largest, rel=1e-3)
