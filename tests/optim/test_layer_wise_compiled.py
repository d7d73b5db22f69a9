"""LayerWise beside tensor parallelism, torch.compile and checkpointing has the bits of eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.optim.layerwise import DIM, HIDDEN, OPTIMIZERS, TOKENS, differing, model, slowly
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from interlace.optim import LayerWise
from interlace.options import Options

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.checkpoints = False

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return x + checkpoint(self.inside, x, use_reentrant=False)
        return x + self.inside(x)


def trained(
    seed: int, shape: tuple[int, int], backend: str | None, optimizer: str, how: str, checked: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of some steps; `how` says what is compiled, and when."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    module: Any = model(seed, lambda: nn.Sequential(Layer(), Layer()))
    for layer in module:
        layer.checkpoints = checked
        parallelize_module(layer, mesh["tp"], PLAN)
    run = module

    def compile_it() -> Any:
        assert backend is not None
        if how == "layers":
            for layer in module:
                layer.compile(backend=backend)
            return module
        return torch.compile(module, backend=backend)

    if backend is not None and how != "after":
        run = compile_it()
    inner = OPTIMIZERS[optimizer](module.parameters())
    facts: Any = {"bucket_bytes": 1 << 12, "options": Options(timeout_s=30)}
    losses, draw = [], torch.Generator().manual_seed(seed + mesh["dp"].get_local_rank())
    with slowly(None if backend is None else seed):
        optimizing = LayerWise(inner, module, mesh["dp"], check_replicas_every=1, **facts)
    with optimizing:
        if backend is not None and how == "after":
            run = compile_it()
        for _ in range(4):
            loss = run(torch.randn(TOKENS, DIM, generator=draw)).square().mean()
            loss.backward()
            optimizing.step()
            optimizing.zero_grad()
            losses.append(loss.item())
        assert not any("_orig_mod" in name for name in optimizing.state_dict()["state"])
        weights = {
            name: p.to_local().clone() if hasattr(p, "to_local") else p.detach().clone()
            for name, p in module.named_parameters()
        }
    return weights, losses


def off(seed: int, shape: tuple[int, int], backend: str, *facts: Any) -> list[str]:
    """What differs from eager."""
    found, wanted = trained(seed, shape, backend, *facts), trained(seed, shape, None, *facts)
    return differing(found[0], wanted[0]) + ["losses"] * (found[1] != wanted[1])


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ((1, 2), ("interlace", "sgd", "before", False)),
        ((1, 2), ("aot_eager", "sgd", "after", False)),
        ((2, 2), ("interlace", "ours", "layers", True)),
        pytest.param((2, 2), ("aot_eager", "ours", "layers", False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_has_the_bits_of_eager(
    pool: Pool, shape: tuple[int, int], case: tuple[Any, ...], seed: int
) -> None:
    count = math.prod(shape)
    assert pool(count).run(off, seed, shape, *case, timeout_s=100) == [[]] * count


def many(seed: int, how: str) -> None:
    """More layers than torch makes versions of one graph."""
    torch._dynamo.reset()
    module = model(seed, lambda: nn.Sequential(*(Layer() for _ in range(10))))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    inner = OPTIMIZERS["sgd"](module.parameters())
    limited = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    if how == "before":
        for layer in module:
            layer.compile(backend="aot_eager")
    with LayerWise(inner, module, mesh, bucket_bytes=1 << 12) as optimizing, limited:
        if how == "after":
            for layer in module:
                layer.compile(backend="aot_eager")
        for _ in range(3):
            module(torch.ones(TOKENS, DIM)).square().mean().backward()
            optimizing.step()
            optimizing.zero_grad()


@pytest.mark.parametrize("how", ["before", "after"])
def test_layers_share_their_graphs(pool: Pool, how: str, seed: int) -> None:
    pool(2).run(many, seed, how)
