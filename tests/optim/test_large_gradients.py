"""Norms over ranks of gradients whose squares are no numbers of fp32."""

from __future__ import annotations

import pytest
import torch
from tests.optim.layerwise import DIM, layer_wise, model
from tests.support.pool import Pool
from torch import nn


def clipped(seed: int, power: int) -> tuple[float, float]:
    """The norm before clipping, and the largest gradient after it."""
    module = model(seed, lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2)))
    with layer_wise(module, "sgd") as optimizing:
        (module(torch.ones(4, DIM)).sum() * 2.0**power).backward()
        norm = optimizing.clip_grad_norm_(2.0**-20).item() / 2.0**power
        largest = max(grad.abs().max().item() for grad in optimizing._reduced_grads().values())
        return norm, largest


def test_large_gradients_are_clipped_and_not_lost(pool: Pool, seed: int) -> None:
    wanted, few = pool(2).run(clipped, seed, 0), pool(2).run(clipped, seed, 100)
    for (norm, largest), (large, left) in zip(wanted, few, strict=True):
        assert large == pytest.approx(norm, rel=1e-6)
        assert left == pytest.approx(largest, rel=1e-3)
