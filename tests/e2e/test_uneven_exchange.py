"""All-to-alls whose rows one rank sends in even parts and another does not, compiled."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

import interlace

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
    for far in pool(3).run(differences, SPLITS[name], seed, time_out_s=100.0):
        assert max(far) <= 1e-5, far
