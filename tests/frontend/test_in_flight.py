"""Arguments whose collective has not arrived: a compiled function waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.frontend.models import Function
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import interlace
from interlace.frontend import backend

ROWS = 64


def gathered(x: torch.Tensor, late_s: float = 0.1) -> torch.Tensor:
    """Every rank's `x`; rank 0 has it before the others come, so that its memory holds nothing."""
    if dist.get_rank():
        time.sleep(late_s)
    group: Any = dist.group.WORLD
    return funcol.all_gather_tensor_autograd(x, 0, group)


def expected(x: torch.Tensor) -> torch.Tensor:
    """What `gathered` gives in the end."""
    whole = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, x.detach())
    return torch.cat(whole)


def ways(fn: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """`fn`, compiled in both ways."""
    torch.compiler.reset()
    options: Any = {"strategy": "peer"}
    return {
        "torch.compile": torch.compile(fn, backend=backend, dynamic=False, options=options),
        "interlace.compile": interlace.compile(Function(fn), options=options),
    }


def in_dtensors(seed: int) -> None:
    """DTensors that hold what is under way; also after one that did not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(seed + dist.get_rank())

    def doubled(x: Any, w: torch.Tensor) -> torch.Tensor:
        return x.redistribute(placements=[Replicate()]).to_local() @ w

    w = 2 * torch.eye(ROWS)
    for way, call in ways(doubled).items():
        for under_way in (False, True, True):
            x = torch.randn(ROWS, ROWS)
            want = 2 * expected(x).repeat(dist.get_world_size(), 1)
            y = gathered(x)
            held = y if under_way else y.clone()
            assert isinstance(held, funcol.AsyncCollectiveTensor) == under_way
            got = call(DTensor.from_local(held, mesh, [Shard(0)], run_check=False), w)
            assert torch.equal(got, want), f"{way}, {under_way=}"


def plain(seed: int) -> None:
    """Plain tensors that DTensor gave, with a gradient that finds its way back."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(seed + dist.get_rank())
    for way, call in ways(lambda y: y.square()).items():
        for _ in range(2):
            x = torch.randn(ROWS, ROWS, requires_grad=True)
            want = expected(x).square()
            shards = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
            y = shards.redistribute(placements=[Replicate()], async_op=True).to_local()
            assert isinstance(y, funcol.AsyncCollectiveTensor)
            got = call(y)
            assert torch.equal(got, want), way
            got.sum().backward()
            assert x.grad is not None, way
            torch.testing.assert_close(x.grad, 2 * x.detach())


def by_hand(seed: int) -> None:
    """The collective outside, the wait for it inside."""
    ops: Any = torch.ops._c10d_functional
    torch.manual_seed(seed + dist.get_rank())
    for way, call in ways(lambda y: ops.wait_tensor(y) + 1).items():
        for _ in range(2):
            x = torch.randn(ROWS, ROWS)
            want = expected(x) + 1
            if dist.get_rank():
                time.sleep(0.1)
            group: Any = dist.group.WORLD
            got = call(ops.all_gather_into_tensor(x, dist.get_world_size(), group.group_name))
            assert torch.equal(got, want), way


def test_in_dtensors(pool: Pool, seed: int) -> None:
    pool(2).run(in_dtensors, seed)


def test_plain(pool: Pool, seed: int) -> None:
    pool(2).run(plain, seed)


def test_waited_for_by_hand(pool: Pool, seed: int) -> None:
    pool(2).run(by_hand, seed)
