"""The main job: training steps through overlapped schedules give the bits of the serial schedule.

On integers. Many steps in fp32, beside eager DTensor, the serial schedule and the same ops in
order, are in tests/cli/test_demo.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

STEPS = 20
Trace = list[tuple[Tensor, ...]]
"""For each step the loss and then every gradient's local shard."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "peer": {"strategy": "peer"},
    "ring": {"strategy": "ring"},
    "pipeline": {"strategy": "pipeline"},
    "copies": {"strategy": "copies"},
}


def compiled(model: nn.Module, options: dict[str, Any] | None) -> Callable[[Tensor], Tensor]:
    """The model as it is trained: eager without options."""
    if options is None:
        return model
    torch.compiler.reset()
    given: dict[str, Any] = {"timeout_s": 40.0, **options}
    return torch.compile(model, backend="interlace", options=given)


def local(grad: Tensor | None) -> Tensor:
    """This rank's shard of a gradient."""
    assert grad is not None, "a parameter has no gradient"
    return (grad.to_local() if isinstance(grad, DTensor) else grad).detach().clone()


class Integers(nn.Module):
    """Two sequence-parallel feed-forwards on small integers: every sum is exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Shared(nn.Module):
    """Three maps of one gathered input, as of attention: its gradient is the sum of theirs."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.maps = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(3))
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        full = DTensor.from_local(x, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        a, b, c = (map(full) for map in self.maps)
        return self.down((a + b.relu() + c).to_local())


def shared(mesh: DeviceMesh) -> nn.Module:
    plan = {f"maps.{i}": ColwiseParallel(use_local_output=False) for i in range(3)}
    return parallelize_module(
        Shared(mesh), mesh, {**plan, "down": RowwiseParallel(output_layouts=Shard(0))}
    )


def feed_forwards(mesh: DeviceMesh) -> nn.Module:
    model, rows = Integers(), Shard(0)
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {"0": ColwiseParallel(input_layouts=rows), "2": RowwiseParallel(output_layouts=rows)},
        )
    return model


def train_integers(
    options: dict[str, Any] | None,
    steps: int,
    seed: int,
    made: Callable[[DeviceMesh], nn.Module] = feed_forwards,
) -> Trace:
    """Steps on fresh integers for the input and every weight."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(seed)
    model = made(mesh)
    forward = compiled(model, options)
    trace: Trace = []
    for _ in range(steps):
        for parameter in model.parameters():
            fresh = torch.randint(-2, 3, parameter.shape, generator=generator).float()
            assert isinstance(parameter, DTensor)
            placed = distribute_tensor(fresh, mesh, parameter.placements)
            with torch.no_grad():
                parameter.to_local().copy_(placed.to_local())
        x = torch.randint(-2, 3, (world * 6, 8), generator=generator).float()
        mine = x.chunk(world)[mesh.get_local_rank()].clone().requires_grad_()
        loss = forward(mine).sum()
        loss.backward()
        trace.append((loss.detach().clone(), local(mine.grad)))
        trace[-1] = (*trace[-1], *(local(p.grad) for p in model.parameters()))
        model.zero_grad()
    return trace


def different(one: Trace, other: Trace) -> list[str]:
    """Where two traces differ in a bit."""
    found: list[str] = []
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not torch.equal(a, b):
                what = "loss" if index == 0 else f"gradient {index - 1}"
                found.append(f"step {step}, {what}: off by {(a - b).abs().max().item():.3g}")
    return found


DRAWN = 1
"""How many strategies are tried where there is no time for all of them."""


def compare_strategies(seed: int, drawn: int) -> dict[str, list[str]]:
    """On one rank: how strategies differ from serial, and whether they were taken at all."""
    serial = train_integers({"overlap": False}, STEPS, seed)
    found: dict[str, list[str]] = {}
    for name in random.Random(seed).sample([*STRATEGIES], drawn):
        options = STRATEGIES[name]
        with capture() as captured:
            trace = train_integers(options, STEPS, seed)
            taken = {site.strategy for program in captured.programs for site in program.sites}
        found[name] = different(serial, trace)
        if options["strategy"] not in taken:
            found[name].append(f"no site is overlapped by {name}: {sorted(taken)}")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "drawn"),
    [(2, DRAWN), *(pytest.param(n, len(STRATEGIES), marks=pytest.mark.slow) for n in (2, 4))],
)
def test_integers_equal_serial(pool: Pool, ranks: int, drawn: int, seed: int) -> None:
    told = pool(ranks).run(compare_strategies, seed, drawn, timeout_s=280.0)
    for rank, found in enumerate(told):
        assert len(found) == drawn
        assert not any(found.values()), f"rank {rank}: {found}"


def accumulated(seed: int) -> dict[str, list[str]]:
    """On one rank: how gradients that matmuls add up differ from eager ones."""
    eager = train_integers(None, 2, seed, shared)
    found: dict[str, list[str]] = {}
    for name in ("serial", "peer", "copies"):
        options = {"strategy": name, "regions": "inductor"}
        with capture() as captured:
            found[name] = different(eager, train_integers(options, 2, seed, shared))
        if sum("addmm_" in str(program) for program in captured.programs) != 1:
            found[name].append("backward, and no other Program, has sums for matmuls to do")
    return found


@pytest.mark.timeout(200)
def test_gradients_that_matmuls_add_up(pool: Pool, seed: int) -> None:
    for rank, found in enumerate(pool(2).run(accumulated, seed, timeout_s=180.0)):
        assert found == {"serial": [], "peer": [], "copies": []}, f"rank {rank}"
