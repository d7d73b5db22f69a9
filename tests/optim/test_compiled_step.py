"""Steps of all optimizers run under torch.compile, with the bits of steps that are not compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optim.layerwise import DIM, by_dimensions, differing, layer_wise, model, weights
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from interlace.optim import (
    Adam,
    AdamW,
    LayerWise,
    Muon,
    clip_grad_norm_,
    muon_groups,
)

BF16 = torch.bfloat16
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda m: Adam(m.parameters(), lr=1e-2, weight_decay=0.1),
    "AdamW": lambda m: AdamW(m.parameters(), lr=1e-2),
    "AdamW, rounded at random": lambda m: AdamW(
        m.to(BF16).parameters(), lr=1e-2, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16
    ),
    "AdamW, remainders": lambda m: AdamW(
        m.to(BF16).parameters(), lr=1e-2, master_weights="remainder"
    ),
    "AdamW, rate in a tensor": lambda m: AdamW(m.parameters(), lr=torch.tensor(1e-2)),
    "Muon": lambda m: Muon(by_dimensions(m.parameters()), lr=0.02, adamw={"lr": 1e-2}),
    "Muon, one by one": lambda m: Muon(
        by_dimensions(m.parameters()), lr=0.02, batched=False, gram_variant=True, nesterov=False
    ),
}


def alone(kind: str, how: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = OPTIMIZERS[kind](module)
    dtype = next(module.parameters()).dtype
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    inputs = iter([torch.full((4, 16), 0.1 * i, dtype=dtype) for i in range(5)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(next(inputs)).square().mean()
        loss.backward()
        return loss

    step_of: Any = optimizer.step
    runs: dict[str, Callable[[], Any]] = {
        "eager": optimizer.step,
        "step": torch.compile(optimizer.step, backend="aot_eager"),
        "closure": torch.compile(lambda: step_of(closure), backend="aot_eager"),
    }
    for _ in range(5):
        if how == "closure":
            assert runs[how]() > 0
        else:
            closure()
            runs[how]()
        schedule.step()
    return weights(module)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_compiled_step_has_the_bits_of_eager(kind: str) -> None:
    wanted = alone(kind, "eager")
    for how in ("step", "closure"):
        assert differing(alone(kind, how), wanted) == []


def compiled(how: str, kind: str, seed: int) -> dict[str, torch.Tensor]:
    """What `how` trains on several ranks, where each call of it is compiled if `kind` says so."""
    torch._dynamo.reset()
    module = model(seed, lambda: nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3))))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if how == "fully_shard":
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        made: Any = LayerWise(Muon(muon_groups(module), lr=0.02), module, mesh)
    else:
        made = layer_wise(module, "ours")

    def step() -> None:
        if isinstance(made, LayerWise):
            made.clip_grad_norm_(1.0)
            clip_grad_norm_([made], 0.5)
        made.step()
        made.zero_grad()
        if how == "LayerWise":
            made.synchronize()

    called = step if kind == "eager" else torch.compile(step, backend="aot_eager")
    with made:
        for number in range(5):
            draw = torch.Generator().manual_seed(seed + number)
            module(torch.randn(6, DIM, generator=draw)).square().mean().backward()
            called()
        found = weights(module)
    return {n: getattr(value, "_local_tensor", value) for n, value in found.items()}


def off(how: str, seed: int) -> list[str]:
    return differing(compiled(how, "step", seed), compiled(how, "eager", seed))


@pytest.mark.parametrize("how", ["LayerWise", "fully_shard"])
def test_compiled_steps_of_several_ranks(pool: Pool, how: str, seed: int) -> None:
    assert pool(2).run(off, how, seed) == [[], []]
