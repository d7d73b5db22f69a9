"""What a user sees of compiled models on GPUs: timelines of blocks that are compiled in place."""

from __future__ import annotations

import pytest
from tests.frontend.test_insight import blocks_in_place
from tests.gpu.cases import transport
from tests.support.pool import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


def in_place() -> tuple[list[float], str]:
    """On one rank, which knows whether it shares its GPU."""
    return blocks_in_place("cuda", transport(), 256)


def test_timelines_of_blocks_compiled_in_place(gpus: Ranks) -> None:
    """If this fails, its message has what each graph is of, and what was recorded of it."""
    for seconds, known in gpus.run(in_place, timeout_s=180):
        assert min(seconds, default=0) > 0, known
