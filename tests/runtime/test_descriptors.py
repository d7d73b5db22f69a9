"""A rank that has few file descriptors left gets a typed error, and so do its peers, at once."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, inputs_of, prepared
from tests.support.pool import Pool

from interlace.comm import release_teams

AT_ONCE_S = 8.0


@contextlib.contextmanager
def left(count: int) -> Iterator[None]:
    """This process may open so many files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for descriptor in held[:count]:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + max(0, count - len(held)), hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held[count:]:
            os.close(descriptor)


def prepare_with_few(kind: str, counts: list[int], seed: int) -> list[tuple[int, Outcome, bool]]:
    """Rank 1 prepares with few descriptors, and then both with enough."""
    found: list[tuple[int, Outcome, bool]] = []
    for count in counts:
        with left(count) if dist.get_rank() else contextlib.nullcontext():
            outcome = attempt(lambda: prepared(kind, timeout_s=20.0).close())
        dist.barrier()
        with prepared(kind, timeout_s=20.0) as executor:
            inputs = inputs_of(executor.program, dist.get_rank(), seed)
            equal = torch.equal(executor.run(inputs)[0], executor.run(inputs)[0])
        found.append((count, outcome, equal))
        dist.barrier()
        release_teams()
        dist.barrier()
    return found


@pytest.mark.parametrize("kind", ["get", "shift"])
def test_few_descriptors_are_a_typed_error_on_all_ranks(pool: Pool, kind: str, seed: int) -> None:
    counts = [0, 1, 2, 5, 64]
    here, there = pool(2).run(prepare_with_few, kind, counts, seed, timeout_s=110, replace=True)
    for (_, mine, equal), (count, theirs, also) in zip(here, there, strict=True):
        for error, text, seconds in (mine, theirs):
            assert error in ("result", "SharedMemoryError", "BackendError", "AgreementError"), text
            assert error == "result" or "Too many open files" in text or count > 0, text
            assert seconds < AT_ONCE_S, (count, text)
        assert equal
        assert also
    assert there[0][1][0] != "result"
    assert there[-1][1][0] == "result"
