"""LayerWise over gradients that DistributedDataParallel reduces."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.optim.layerwise import DIM, SMALL, batch, differing, mesh, model, weights
from tests.optim.test_layer_wise_sharded import grid
from tests.support.pool import Pool
from torch.nn.parallel import DistributedDataParallel

from interlace.optim import LayerWise


def norms(seed: int) -> tuple[float, float]:
    """The norm over shards in plain Parameters, and what it is to be."""
    squares = torch.zeros((), dtype=torch.float64)
    both = grid(2)
    replica = model(seed + dist.get_rank())
    module = DistributedDataParallel(replica, process_group=both.dp.get_group())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with LayerWise(optimizer, module, both.dp, shards=both.tp, bucket_bytes=SMALL) as optimizing:
        module(batch(seed, 0)).square().mean().backward()
        for param in module.parameters():
            assert param.grad is not None
            squares += param.grad.double().square().sum()
        dist.all_reduce(squares)
        norm = optimizing.clip_grad_norm_(1.0).item()
        optimizing.step()
    return norm, squares.sqrt().item()


def test_norm_over_shards(pool: Pool, seed: int) -> None:
    for norm, wanted in pool(2).run(norms, seed):
        assert norm == pytest.approx(wanted, rel=1e-6)


def held(seed: int) -> tuple[list[str], bool, int]:
    """What `state_dict()` changes, before the first step and with gradients there; whether `.grad`
    is left as it was by a step, and how many states this rank has. One rank owns nothing.
    """
    torch.manual_seed(seed)
    module = DistributedDataParallel(torch.nn.Linear(DIM, DIM, bias=False))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    with LayerWise(optimizer, module, mesh()) as optimizing:
        before = weights(module)
        optimizing.state_dict()
        module(batch(seed, 0)).square().mean().backward()
        optimizing.state_dict()
        changed = differing(weights(module), before)
        grad = module.module.weight.grad.clone()
        optimizing.step()
        optimizing.synchronize()
        before = weights(module)
        optimizing.state_dict()
        changed += differing(weights(module), before)
        return changed, torch.equal(module.module.weight.grad, grad), len(optimizer.state)


def test_states_and_gradients_are_left_alone(pool: Pool, seed: int) -> None:
    found = pool(2).run(held, seed)
    assert sorted(found) == [([], True, 0), ([], True, 1)]
