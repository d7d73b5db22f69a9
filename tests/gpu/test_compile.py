"""Compiled DTensor models on GPUs: steps of training and of decoding equal eager to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Block, parallelise_block
from tests.support.captured import capture
from tests.support.pool import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.frontend import backend

pytestmark = [pytest.mark.gpu, pytest.mark.nccl, pytest.mark.timeout(200)]

ROWS, WIDTH = 48, 240


def model(dtype: torch.dtype) -> nn.Module:
    """A sequence-parallel MLP on the mesh of all ranks, the same on every call."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(mlp.to("cuda", dtype), mesh, plan)


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(call: Any, mlp: nn.Module, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The result of forward and all gradients of one step."""
    torch.manual_seed(seed + dist.get_rank())
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    mlp.zero_grad()
    y = local(call(x))
    (y.float() ** 2).mean().backward()
    assert x.grad is not None
    grads = [local(p.grad) for p in mlp.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *(grad.clone() for grad in grads)]


def compare(strategy: str, dtype: str, regions: str, seed: int) -> tuple[list[float], list[str]]:
    """How far compiled steps are from eager ones, relative to the largest value; strategies."""
    torch.compiler.reset()
    kind = getattr(torch, dtype)
    mlp = model(kind)
    options = {"strategy": strategy, "regions": regions, "timeout_s": 30.0}
    with capture() as captured:
        compiled = torch.compile(mlp, backend=backend, options=options)
        steps = [train(compiled, mlp, seed + number, kind) for number in range(3)]
        torch.cuda.synchronize()
        taken = sorted({s.strategy for b in captured.bound for s in b.program.sites})
    apart: list[float] = []
    for number, found in enumerate(steps):
        wanted = train(mlp, mlp, seed + number, kind)
        assert len(found) == len(wanted)
        for mine, right in zip(found, wanted, strict=True):
            assert mine.shape == right.shape
            scale = right.float().abs().max().clamp(min=1e-6)
            apart.append(((mine.float() - right.float()).abs().max() / scale).item())
    torch.compiler.reset()
    return apart, taken


TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
CASES = {
    "peer": ("float32", "eager"),
    "fused": ("bfloat16", "eager"),
    "exchange": ("bfloat16", "eager"),
    "auto": ("bfloat16", "auto"),
}
"""The element type and the option `regions` by strategy."""


@pytest.mark.parametrize("strategy", CASES)
def test_a_compiled_model_trains_as_eager_does(gpus: Ranks, strategy: str, seed: int) -> None:
    dtype, regions = CASES[strategy]
    for apart, taken in gpus.run(compare, strategy, dtype, regions, seed, timeout_s=150):
        assert max(apart) < TOLERANCE[dtype]
        assert strategy in taken or strategy == "auto", taken


def decode_steps(device: str, graph: bool, seed: int) -> tuple[float, bool]:
    """Steps of a block with a cache by interlace.compile: how far from eager; whether they go past
    AOTAutograd. Tokens and positions change, and so do the addresses that they come at."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    block = parallelise_block(Block(64, 8, 128).to(device), mesh)
    caches = [[torch.zeros(2, 8 // world, 48, 8, device=device) for _ in range(2)] for _ in "ab"]
    options = {"graph": graph, "timeout_s": 30.0}
    compiled = interlace.compile(block, mesh=mesh, options=options)
    kept: list[torch.Tensor] = []
    apart = 0.0
    with torch.no_grad():
        for start in range(0, 48, 4):
            x = torch.randn(2, 4, 64, device=device).chunk(world, 1)[rank].contiguous()
            where = torch.arange(start, start + 4, device=device)
            kept += [x, where] if start % 8 else []
            want = local(block(x, tuple(caches[0]), where))
            found = local(compiled(x, tuple(caches[1]), where))
            for mine, right in zip([found, *caches[1]], [want, *caches[0]], strict=True):
                apart = max(apart, (mine - right).abs().max().item())
    entry = compiled._entries.all()[-1]
    compiled.close()
    return apart, entry.direct is not None


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_decode_steps_go_past_autograd(gpus: Ranks, graph: bool, seed: int) -> None:
    for apart, direct in gpus.run(decode_steps, "cuda", graph, seed, timeout_s=150):
        assert apart < 1e-4
        assert direct
