"""What the tests of LayerWise run on each rank: small models, their data, and optimizers."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from interlace.optim import LayerWise, Muon, bucket_runs
from interlace.options import Options
from interlace.runtime import Executor

DIM, HIDDEN, TOKENS = 24, 40, 12
SMALL = 1 << 13
"""Bytes of a bucket: the model then has several."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """A few blocks, and a matrix that no module holds."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.mixer = nn.Parameter(torch.randn(DIM, DIM) / DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(DIM, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.mixer
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(seed: int, make: Callable[[], nn.Module] = Blocks) -> Any:
    """The same on all ranks."""
    torch.manual_seed(seed)
    return make()


def batch(seed: int, step: int, alike: int = 1) -> torch.Tensor:
    """Rows of a step, other ones on each rank, or on each group of ranks that are alike."""
    draw = torch.Generator().manual_seed(seed + 1000 * step + dist.get_rank() // alike)
    return torch.randn(TOKENS, DIM, generator=draw)


def mesh(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest: two optimizers that look like one."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.02})
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        self.parts = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.share()

    def share(self) -> None:
        """The parts have the groups and the state of this one."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.share()

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def by_dimensions(params: Any) -> list[dict[str, Any]]:
    """Groups of interlace.optim.Muon."""
    params = list(params)
    return [
        {"params": [p for p in params if p.dim() == 2]},
        {"params": [p for p in params if p.dim() != 2], "use_muon": False},
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": Both,
    "ours": lambda params: Muon(by_dimensions(params), lr=0.02, adamw={"lr": 0.01}),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def layer_wise(module: nn.Module, optimizer: str = "ours", **options: Any) -> LayerWise:
    options = {"bucket_bytes": SMALL, "options": Options(timeout_s=20), **options}
    device = next(module.parameters()).device.type
    return LayerWise(OPTIMIZERS[optimizer](module.parameters()), module, mesh(device), **options)


def train(
    optimizer: LayerWise, module: nn.Module, seed: int, steps: range, clip: float | None = 1.0
) -> list[float]:
    """Real steps; the losses."""
    losses: list[float] = []
    for step in steps:
        rows = batch(seed, step).to(next(module.parameters()).device)
        loss = module(rows).square().mean()
        loss.backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, taken by way of a state_dict."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights that differ by a bit."""
    assert found.keys() == wanted.keys()
    return [name for name, value in found.items() if not torch.equal(value, wanted[name])]


@contextlib.contextmanager
def slowly(seed: int | None) -> Iterator[None]:
    """Executors made inside wait before each op, other times on each rank."""
    if seed is None:
        yield
        return
    draw = random.Random(seed + dist.get_rank())

    def wait(rank: int, index: int, op: Any) -> None:
        time.sleep(draw.choice([0.0, 0.0, draw.random() / 500]))

    with before_ops(wait):
        yield


@contextlib.contextmanager
def before_ops(call: Callable[[int, int, Any], None]) -> Iterator[None]:
    """Executors made inside call this before each op, with rank, index and op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_runs, "Executor", partial(Executor, before_op=call))
        yield
