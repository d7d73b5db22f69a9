"""Training in CUDA graphs as the first thing that processes do: nothing has made a handle of cuBLAS
or cuDNN for autograd's thread, nor for any other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Block, local, parallelise_block
from tests.gpu.cases import transport
from tests.support.pool import Pool, Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.frontend import backend

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

STEPS, TOKENS, WIDTH = 4, 64, 512
HOWS = ("plain", "checkpointing", "scaler", "two models", "reset", "threads", "blocks")
CLOSE = 0.05
"""How far gradients may be off, by root mean square: roundings of bf16."""
Call = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def fresh(gpus: Ranks) -> Iterator[Ranks]:
    """Processes that have done nothing, and do nothing else."""
    pool = Pool("cuda")
    yield pool(gpus.world)
    pool.close()


def model() -> nn.Module:
    blocks = [Block(WIDTH, 64, 2 * WIDTH) for _ in range(2)]
    return nn.Sequential(*blocks).to("cuda", torch.bfloat16)


def losses(y: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' losses, of the rows of one rank or of all."""
    return y.float().square().sum() / y.shape[0]


def compiled(module: nn.Module, how: str) -> Call:
    options = {"graph": True, "timeout_s": 30.0, **transport()}
    if how == "blocks":
        for block in module.children():
            block.compile(backend=backend, options=options)
        return module
    call: Any = torch.compile(module, backend=backend, options=options)
    if how == "checkpointing":
        return lambda x: checkpoint(call, x, use_reentrant=False)  # pyright: ignore
    return call


def step(calls: list[Call], weights: list[list[Any]], x: torch.Tensor, scaler: Any) -> list[Any]:
    """The gradients of one step of each model, which changes its weights."""
    found: list[torch.Tensor] = []
    for call, mine in zip(calls, weights, strict=True):
        scaler.scale(losses(call(x))).backward()
        shards = [nn.Parameter(local(weight).float()) for weight in mine]
        for shard, weight in zip(shards, mine, strict=True):
            shard.grad, weight.grad = local(weight.grad).float(), None
        optimizer = torch.optim.SGD(shards, lr=0.01)
        scaler.unscale_(optimizer)
        found += [shard.grad.clone() for shard in shards if shard.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        for shard, weight in zip(shards, mine, strict=True):
            local(weight).copy_(shard.detach())
    return found


def trained(how: str, seed: int) -> tuple[float, int]:
    """How far the gradients of some steps are from those of torch on one GPU, and how many pairs of
    graphs were captured. Torch's own steps come last."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    wholes = [model() for _ in range(1 + (how == "two models"))]
    sharded = copy.deepcopy(wholes)
    for each in sharded:
        for block in each.children():
            parallelise_block(block, mesh, src_data_rank=None)
    x = torch.randn(2, TOKENS * world, WIDTH, device="cuda", dtype=torch.bfloat16)
    mine = x.chunk(world, 1)[rank].contiguous()
    # The norms' gradients are partial sums, which torch would add up by NCCL.
    known: Any = dict(sharded[0].named_parameters())
    names = [name for name, weight in known.items() if weight.placements[0].is_shard()]
    weights = [[each.get_parameter(name) for name in names] for each in sharded]
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=how == "scaler")
    found: list[torch.Tensor] = []
    calls = [compiled(each, how) for each in sharded]
    for number in range(STEPS):
        if how == "threads":
            with ThreadPoolExecutor(1) as thread:
                found += thread.submit(step, calls, weights, mine, scaler).result(60)
        else:
            found += step(calls, weights, mine, scaler)
        if how == "reset" and number == 1:
            interlace.reset()
    torch.cuda.synchronize()
    engines: list[Any] = [b.executor.engine for graph in backend.graphs for b in graph.bound]
    pairs = [sum(map(len, engine.graphs.pairs.values())) for engine in engines]

    kinds = [cut_over(sharded[0].get_parameter(name)) for name in names] * len(wholes)
    plain = [[each.get_parameter(name) for name in names] for each in wholes]
    off = 0.0
    for _ in range(STEPS):
        wanted = step(list(wholes), plain, x, torch.amp.GradScaler("cuda", enabled=False))
        for dim, whole in zip(kinds, wanted, strict=True):
            right, own = whole.chunk(world, dim)[rank].float(), found.pop(0).float()
            off = max(off, ((own - right).norm() / right.norm()).item())
    torch.compiler.reset()
    return off, min(pairs)


def cut_over(weight: Any) -> int:
    """Over which dimension a weight is cut."""
    assert isinstance(weight, DTensor)
    (placement,) = weight.placements
    assert isinstance(placement, Shard)
    return placement.dim


@pytest.mark.parametrize("how", HOWS)
def test_a_fresh_process_trains_in_graphs(fresh: Ranks, how: str, seed: int) -> None:
    for off, pairs in fresh.run(trained, how, seed, timeout_s=120):
        assert off < CLOSE
        assert pairs, "a graph was never captured"
