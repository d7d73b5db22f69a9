"""LayerWise over gradients that DistributedDataParallel reduces."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.optim.layerwise import SMALL, batch, model
from tests.optim.test_layer_wise_sharded import grid
from tests.support.pool import Pool
from torch.nn.parallel import DistributedDataParallel

from interlace.optim import LayerWise


def norms(seed: int) -> tuple[float, float]:
    """The norm over shards in plain Parameters, and what it is to be."""
    mesh = grid(2)
    replica = model(seed + dist.get_rank())
    module = DistributedDataParallel(replica, process_group=mesh.dp.get_group())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with LayerWise(optimizer, module, mesh.dp, shards=mesh.tp, bucket_bytes=SMALL) as optimizing:
        module(batch(seed, 0)).square().mean().backward()
        squares = sum(p.grad.double().square().sum() for p in module.parameters())
        dist.all_reduce(squares)
        norm = optimizing.clip_grad_norm_(1.0).item()
        optimizing.step()
    return norm, squares.sqrt().item()


def test_norm_over_shards(pool: Pool, seed: int) -> None:
    for norm, wanted in pool(2).run(norms, seed):
        assert norm == pytest.approx(wanted, rel=1e-6)
