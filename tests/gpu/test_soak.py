"""Everything at once, in random order, on GPUs."""

from __future__ import annotations

import pytest
from tests.support.pool import Ranks
from tests.support.soak import soak

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


def test_whatever_comes_in_whatever_order(gpus: Ranks, seed: int) -> None:
    for wrong, counts in gpus.run(soak, seed, 30.0, "cuda", timeout_s=120, replace=True):
        assert not wrong
        assert counts["run"] > 40, counts
