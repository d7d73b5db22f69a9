"""Fixtures that every room's tests may use."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # so that `tests.support` can be imported, here and in worker processes
    sys.path.insert(0, ROOT)
if importlib.util.find_spec("interlace") is None:  # not installed
    sys.path.insert(0, f"{ROOT}/src")

# Before torch is there: only tests of kept schedules use what an earlier test compiled.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

from tests.support.pool import Pool, launched, preload  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where pytest-timeout is not there, its setting is allowed all the same, and does nothing."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds that a test may take")


def pytest_configure(config: pytest.Config) -> None:
    """And so is its mark."""
    if importlib.util.find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): how long the test may take")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs Triton where it is not installed."""
    if item.get_closest_marker("kernels") and importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: make test EXTRAS=test-kernels")


def pytest_collection_finish() -> None:
    """Collections of garbage need not walk the modules and tests, which stay."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What random sets of Programs were tried, and their seed: also where all went well."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "fuzz":
                terminalreporter.write_line(f"fuzz: {value}")


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty cache folder: what was calibrated on this machine is no part of a test. And short
    time-outs of DNS: torch's TCPStore looks up the name of every address that connects to it, and
    where a name server loses a question, that takes 5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("RES_OPTIONS", "timeout:1")
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors of tests are small: threads of one product wait for each other, and for the cores
    that other workers of pytest have, longer than they compute. The ranks of the pool have one too.
    """
    if "torch" in sys.modules:  # a test that is to run has imported it
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def server_of_forks(request: pytest.FixtureRequest, surroundings: None) -> None:
    """Loads what ranks need before a test starts any, where there is a test that does."""
    if any("pool" in getattr(item, "fixturenames", ()) for item in request.session.items):
        preload()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real processes with gloo: `pool(world).run(function, *args)` gives a result per rank."""
    shared = Pool()
    yield shared
    shared.close()


@pytest.fixture
def launched_on_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a command launches are those of the pool, which have imported what they need."""
    for place in ("interlace.launch.launch", "interlace_bench.ranks.launch"):
        monkeypatch.setattr(place, functools.partial(launched, pool))


@pytest.fixture
def seed() -> int:
    """A fresh seed, shown when the test fails."""
    drawn = secrets.randbits(32)
    print(f"seed {drawn}")
    return drawn
