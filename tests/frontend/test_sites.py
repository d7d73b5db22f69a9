"""Sites are found by meaning: each spelling that DTensor and users write has a test of its own.

Every function here is compiled on two ranks; what comes back is the (kind, module) of each site of
the forward Program (and of the backward one where there is one), and whether the results agree
with eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.frontend.models import Function, local
from tests.support.pool import Pool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import interlace

Setup = Callable[[DeviceMesh], tuple[Callable[..., Any], tuple[Any, ...]]]
Kinds = dict[str, list[str]]


def tensor(*sizes: int, seed: int = 0) -> torch.Tensor:
    """Small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randint(-3, 4, sizes, generator=generator).float()


def sharded(mesh: DeviceMesh, dim: int, *sizes: int, grad: bool = True) -> Any:
    """A DTensor sharded along one dimension."""
    return distribute_tensor(tensor(*sizes), mesh, [Shard(dim)]).requires_grad_(grad)


def gather(x: Any) -> Any:
    return x.redistribute(placements=[Replicate()])


def scatter(x: Any, dim: int) -> Any:
    return x.redistribute(placements=[Shard(dim)])


def column(mesh: DeviceMesh, out: int = 6, k: int = 8) -> Any:
    """A weight whose output features are sharded."""
    return distribute_tensor(tensor(out, k), mesh, [Shard(0)]).requires_grad_()


def row(mesh: DeviceMesh, out: int = 8, k: int = 6) -> Any:
    """A weight whose input features are sharded."""
    return distribute_tensor(tensor(out, k), mesh, [Shard(1)]).requires_grad_()


def biased_linear(mesh: DeviceMesh) -> Any:
    bias = distribute_tensor(tensor(6), mesh, [Shard(0)]).requires_grad_()
    fn = lambda x, w, b: F.linear(gather(x), w, b)  # noqa: E731
    return fn, (sharded(mesh, 0, 4, 8), column(mesh), bias)


def three_dimensions(mesh: DeviceMesh) -> Any:
    fn = lambda x, w: F.linear(gather(x), w)  # noqa: E731
    return fn, (sharded(mesh, 0, 4, 3, 8), column(mesh))


def batch_of_one(mesh: DeviceMesh) -> Any:
    def fn(x: Any, w: Any, v: Any) -> Any:
        return scatter(F.linear(F.linear(gather(x), w), v), 1)

    return fn, (sharded(mesh, 1, 1, 4, 8), column(mesh), row(mesh))


def gather_dim_one(mesh: DeviceMesh) -> Any:
    return batch_of_one(mesh)[0], (sharded(mesh, 1, 3, 4, 8), column(mesh), row(mesh))


def uneven_shards(mesh: DeviceMesh) -> Any:
    def fn(x: Any, w: Any, v: Any) -> Any:
        return scatter(F.linear(F.linear(gather(x), w), v), 0)

    return fn, (sharded(mesh, 0, 5, 8), column(mesh), row(mesh))


def casts_and_pointwise(mesh: DeviceMesh) -> Any:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (F.linear(x, w) * 0.5).to(torch.float64)
        return scatter(DTensor.from_local(y, mesh, [Partial()]), 0).to_local()

    return fn, (tensor(4, 3).requires_grad_(), tensor(8, 3).requires_grad_())


def all_reduced(mesh: DeviceMesh) -> Any:
    def fn(x: Any, w: Any) -> Any:
        return gather(F.linear(x, w))

    return fn, (sharded(mesh, 1, 4, 6), row(mesh))


def shared_gather(mesh: DeviceMesh) -> Any:
    def fn(x: Any, w: Any, v: Any) -> Any:
        y = gather(x)
        return F.silu(F.linear(y, w)) * F.linear(y, v)

    return fn, (sharded(mesh, 0, 4, 8), column(mesh), column(mesh))


def selected_rows(mesh: DeviceMesh) -> Any:
    fn = lambda x, w: F.linear(gather(x)[2], w)  # noqa: E731
    return fn, (sharded(mesh, 0, 4, 8), column(mesh))


def sliced_rows(mesh: DeviceMesh) -> Any:
    fn = lambda x, w: F.linear(gather(x)[1:3], w)  # noqa: E731
    return fn, (sharded(mesh, 0, 4, 8), column(mesh))


GATHER, SCATTER = ["all_gather_matmul"], ["matmul_reduce_scatter"]
BOTH = {"forward": GATHER + SCATTER, "backward": GATHER + SCATTER}
SPELLINGS: dict[str, tuple[Setup, Kinds]] = {
    "biased_linear": (biased_linear, {"forward": GATHER}),
    "three_dimensions": (three_dimensions, {"forward": GATHER}),
    "batch_of_one": (batch_of_one, BOTH),
    "gather_dim_one": (gather_dim_one, BOTH),
    "uneven_shards": (uneven_shards, BOTH),
    "casts_and_pointwise": (casts_and_pointwise, {"forward": SCATTER}),
    "all_reduced": (all_reduced, {"forward": ["matmul_all_reduce"]}),
    "shared_gather": (shared_gather, {"forward": GATHER}),
}


def compiled_kinds(name: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """On one rank: the sites by graph; results and gradients must agree with eager exactly."""
    setups = {key: setup for key, (setup, _) in SPELLINGS.items()}
    setups |= {"selected_rows": selected_rows, "sliced_rows": sliced_rows}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    fn, args = setups[name](mesh)
    options = interlace.Options(strategy="peer")
    compiled = interlace.compile(Function(fn), *args, mesh=mesh, options=options)
    outcomes = []
    for call in (fn, compiled):
        result = call(*args)
        (result * result).sum().backward()
        outcomes.append([local(result), *(local(arg.grad) for arg in args)])
        for arg in args:
            arg.grad = None
    for eager, mine in zip(*outcomes, strict=True):
        assert torch.equal(eager, mine), compiled.program
    sites = {b.kind: [(s.kind, s.reason) for s in b.program.sites] for b in compiled.bound}
    text = str(compiled.program)
    compiled.close()
    return sites, text


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_a_site(pool: Pool, name: str) -> None:
    for sites, text in pool(2).run(compiled_kinds, name):
        for graph, kinds in SPELLINGS[name][1].items():
            assert [kind for kind, _ in sites[graph]] == kinds, f"{sites}\n{text}"


@pytest.mark.parametrize("name", ["selected_rows", "sliced_rows"])
def test_rows_taken_from_the_gathered_dimension_are_no_site(pool: Pool, name: str) -> None:
    for sites, text in pool(2).run(compiled_kinds, name):
        ((kind, reason),) = sites["forward"]
        assert kind == "all_gather", text
        assert reason, text
