"""Ranks with a GPU each. Run with `python -m pytest tests/gpu -q` on a machine with two or more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.pool import MAX_WORLD, Pool, Ranks


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Pool]:
    """One pool of processes for all tests."""
    shared = Pool("cuda")
    yield shared
    shared.close()


@pytest.fixture
def gpus(gpu_pool: Pool) -> Ranks:
    """A rank for each GPU there is, up to four: `gpus.run(function, *args)`."""
    count = torch.cuda.device_count()  # without a context of this process
    if count < 2:
        pytest.skip("needs two GPUs")
    return gpu_pool(min(count, MAX_WORLD))
