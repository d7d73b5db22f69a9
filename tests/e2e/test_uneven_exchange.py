"""All-to-alls whose rows one rank sends in even parts and another does not, compiled."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Function
from tests.support.pool import Pool
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.cost import simulate
from interlace.frontend import capture

SPLITS = {
    "one rank even": [[2, 2, 2], [2, 1, 3], [2, 3, 1]],
    "none even": [[1, 2, 3], [3, 1, 2], [2, 3, 1]],
    "all even": [[2, 2, 2]] * 3,
}


def differences(splits: list[list[int]], seed: int) -> list[float]:
    """On one rank: how far output and gradient are from eager ones."""
    torch.compiler.reset()
    world, rank = dist.get_world_size(), dist.get_rank()
    group = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)).get_group("ep")
    sent, received = splits[rank], [row[rank] for row in splits]

    def exchanged(x: Tensor, w: Tensor) -> Tensor:
        return all_to_all_single_autograd(x @ w, received, sent, group).relu() * 2

    torch.manual_seed(seed + rank)
    x, w = torch.randn(sum(sent), 8), torch.randn(8, 4)
    found: list[list[Tensor]] = []
    for run in (exchanged, torch.compile(exchanged, backend="interlace")):
        leaf = x.clone().requires_grad_()
        y = run(leaf, w)
        y.square().sum().backward()
        assert leaf.grad is not None
        found.append([y.detach(), leaf.grad])
    interlace.reset()
    return [float((mine - wanted).abs().max()) for wanted, mine in zip(*found, strict=True)]


@pytest.mark.parametrize("name", SPLITS)
def test_ranks_exchange_alike(pool: Pool, name: str, seed: int) -> None:
    """Each would choose a collective or messages by its own rows: they choose together."""
    for far in pool(3).run(differences, SPLITS[name], seed, timeout_s=100.0):
        assert max(far) <= 1e-5, far


def told(splits: list[list[int]]) -> tuple[str, str, list[float]]:
    """What a compiled exchange says of itself on this rank, and its predicted times."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    group = mesh.get_group("ep")
    sent, received = splits[rank], [row[rank] for row in splits]

    def exchanged(x: Tensor, w: Tensor) -> Tensor:
        return all_to_all_single_autograd(x, received, sent, group) @ w

    x, w = torch.randn(sum(sent), 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    torch.compiler.reset()
    with capture() as captured:
        torch.compile(exchanged, backend="interlace")(x, w).sum().backward()
    by_torch = captured.explain()
    compiled = interlace.compile(Function(exchanged), x, w, mesh=mesh)
    times = [simulate(bound.programs, bound.machine).makespan_s for bound in compiled.bound]
    by_us = compiled.explain()
    compiled.close()
    interlace.reset()
    return by_torch, by_us, times


@pytest.mark.parametrize("name", ["one rank even", "none even"])
def test_explain_lists_uneven_exchanges_and_proves_the_set(pool: Pool, name: str) -> None:
    """Each rank's Program has its own rows: alone, as if all ranks ran it, it would be stuck."""
    each = pool(3).run(told, SPLITS[name], timeout_s=100.0)
    for by_torch, by_us, times in each:
        assert by_torch == by_us
        assert times == each[0][2], "ranks predict one timeline, of all of them"
        for text, kind in zip(by_us.split("\n\n"), ("forward", "backward"), strict=True):
            head, row = text.splitlines()[:2]
            assert head == f"{kind}: 1 communication, sound"
            assert row.split()[:4] == ["1", "all_to_all", "-", "serial"]
            assert "uneven" in row
