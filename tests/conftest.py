"""Fixtures that every room's tests may use."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # so that `tests.support` can be imported, here and in worker processes
    sys.path.insert(0, ROOT)

from tests.support.pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real processes with gloo: `pool(world).run(function, *args)` gives a result per rank."""
    shared = Pool()
    yield shared
    shared.close()


@pytest.fixture
def seed() -> int:
    """A fresh seed, shown when the test fails."""
    drawn = secrets.randbits(32)
    print(f"seed {drawn}")
    return drawn
