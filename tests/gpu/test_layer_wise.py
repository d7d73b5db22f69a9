"""LayerWise on ranks with a GPU each, and on a GPU that they share."""

from __future__ import annotations

import pytest
from tests.optim import test_sharded_layer_wise as sharded
from tests.optim.test_layer_wise import both_ways
from tests.support.pool import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.nccl), "peer"])
@pytest.mark.parametrize("optimizer", ["ours", "adamw"])
def test_overlapped_is_synchronous_bit_for_bit(
    gpus: Ranks, optimizer: str, transport: str, seed: int
) -> None:
    steps = 200 if optimizer == "ours" else 50
    found = gpus.run(both_ways, seed, steps, optimizer, transport, "cuda", timeout_s=150)
    assert not any(found)


@pytest.mark.nccl  # which fully_shard needs
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("facts", sharded.FACTS)
def test_shards_have_the_bits_of_a_synchronous_step(
    gpus: Ranks, facts: str, tp: int, seed: int
) -> None:
    found = gpus.run(sharded.both_ways, seed, 20, "ours", sharded.FACTS[facts], "cuda", tp)
    assert not any(found)
