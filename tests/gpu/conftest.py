"""Ranks with a GPU each. Run with `python -m pytest tests/gpu -q` on a machine with two or more.

`--ranks 4` asks for as many as that; where there are fewer GPUs, they share them. That tells
nothing of speed, and nothing of what is NCCL's (`nccl` marks what wants it): all else goes the same
way, the memory of peers by CUDA IPC handles too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.gpu.cases import BY_MESSAGES
from tests.support.pool import Pool, Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many ranks there are."""
    parser.addoption("--ranks", type=int, help="ranks of the GPU tests; default: one for each GPU")


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Pool]:
    """One pool of processes for all tests."""
    shared = Pool("cuda")
    yield shared
    shared.close()


@pytest.fixture
def gpus(gpu_pool: Pool, request: pytest.FixtureRequest) -> Ranks:
    """A rank for each GPU there is, up to four, or `--ranks`: `gpus.run(function, *args)`."""
    count = torch.cuda.device_count()  # without a context of this process
    ranks = request.config.getoption("--ranks", None) or min(count, 4)
    if not count or ranks < 2:
        pytest.skip("needs two GPUs, or one and --ranks")
    given = getattr(request.node, "callspec", None)
    messages = given is not None and given.params.get("strategy") in BY_MESSAGES
    if ranks > count and (messages or request.node.get_closest_marker("nccl")):
        pytest.skip("needs NCCL, and so a GPU for each rank")
    return gpu_pool(ranks)
