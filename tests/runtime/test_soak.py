"""Everything at once, in random order: Executors that come, go and fail."""

from __future__ import annotations

import pytest
from tests.support.pool import Pool
from tests.support.soak import soak


@pytest.mark.timeout(150)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_comes_in_whatever_order(pool: Pool, world: int, seed: int) -> None:
    for wrong, counts in pool(world).run(soak, seed, 8.0, "cpu", timeout_s=120):
        assert not wrong
        assert counts["run"] > 40, counts
