"""DTensors whose sizes are symbolic; caches of Programs that are too small."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frontend.models import feed_forward, world_mesh, wrong_steps
from tests.support.pool import Pool
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import interlace
from interlace.errors import CacheWarning
from interlace.frontend import backend

WIDTH = 16


def batches_and_lengths() -> tuple[list[str], str]:
    """Sequence parallelism where the batch and the length change; what differs, and `explain`."""
    torch.compiler.reset()
    mesh = world_mesh()
    model = feed_forward(WIDTH, Shard(1), Shard(1))
    options: Any = {"timeout_s": 60.0, "strategy": "peer"}
    call: Any = torch.compile(model, backend=backend, dynamic=True, options=options)
    inputs: list[torch.Tensor] = [
        DTensor.from_local(torch.randn(batch, rows, WIDTH), mesh, [Shard(1)])
        for batch, rows in [(3, 9), (3, 11), (4, 12)]
    ]
    return wrong_steps(model, call, inputs), interlace.explain(call)


@pytest.mark.timeout(120)
def test_a_batch_that_a_class_pins_is_a_number(pool: Pool) -> None:
    """Rows are scattered as often as there are sequences, so each batch size has its Programs: for
    all lengths of a bucket, and overlapped."""
    for wrong, told in pool(2).run(batches_and_lengths, timeout_s=110):
        assert wrong == []
        assert "for these sizes alone" not in told
        assert "traced" not in told
        assert "peer" in told


def warned(call: Callable[[torch.Tensor], Any], rows: list[int]) -> list[str]:
    """The warnings of calls with so many rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        for n in rows:
            call(torch.ones(n, 4))
    return [str(each.message) for each in caught if each.category is CacheWarning]


def test_a_cache_that_is_too_small_warns_once() -> None:
    net = nn.Sequential(nn.ReLU())
    compiled = interlace.compile(net, options={"cache_size": 2})
    (told,) = warned(compiled, [2, 3, 4, 5, 2])
    for part in ("Sequential met more sizes", "than 2", "cache_size", "dynamic=True"):
        assert part in told
    assert not warned(interlace.compile(net, options={"cache_size": 4}), [2, 3, 4, 5] * 2)
