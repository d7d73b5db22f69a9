"""Teams that span hosts on GPUs: processes of one machine that take each other for other hosts.

Each has a host name of its own, and an id by which NCCL takes its network between them. So ranks
may share a GPU, which within a host NCCL refuses.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.test_hierarchy import ALL, CUDA_TIMEOUT_S, SERVE, exact, run_on, text_of
from tests.runtime.programs import attempt, world_group
from tests.support.pool import Died, Pool, work

from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


class NamedHosts(Pool):
    """Two ranks in a row on each host."""

    def __init__(self) -> None:
        super().__init__("cuda", {"NCCL_SOCKET_IFNAME": "lo"})

    def _target(self, rank: int) -> tuple[Any, ...]:
        return work_on, f"interlace-{'abcd'[rank // 2]}", f"rank {rank}"


def work_on(
    name: str, of_nccl: str, connection: Connection, port: int, environ: Mapping[str, str]
) -> None:
    """A worker's life under another host name."""
    socket.gethostname = lambda: name
    os.environ["NCCL_HOSTID"] = of_nccl
    work(connection, port, environ)


@pytest.fixture(scope="module")
def pairs() -> Iterator[NamedHosts]:
    if not torch.cuda.device_count():
        pytest.skip("needs a GPU")
    shared = NamedHosts()
    yield shared
    shared.close()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ALL)
def test_all_strategies_on_two_hosts_of_two_ranks(
    pairs: NamedHosts, kind: str, graph: bool, seed: int
) -> None:
    more = {"graph": graph, "transport": "nccl"}
    found = pairs(4).run(_exact, kind, seed, more, timeout_s=140.0)
    assert found == [[]] * 4


def _exact(kind: str, seed: int, more: dict[str, Any]) -> list[str]:
    return exact(SERVE, (kind,), seed, device="cuda", **more)


@pytest.mark.parametrize("strategy", ["ring", "pipeline"])
def test_a_killed_rank_is_named_with_its_host(
    pairs: NamedHosts, strategy: str, tmp_path: Path, seed: int
) -> None:
    args = str(tmp_path / "running"), seed, 3, strategy, "cuda"
    results = pairs(4).run(run_on, *args, may_die={3}, timeout_s=140.0)
    assert results.pop(3) == Died(-signal.SIGKILL)
    for error, text, seconds in results:
        assert error in ("PeerError", "CommTimeoutError"), text
        assert "rank 3" in text, text
        assert seconds < CUDA_TIMEOUT_S + 5


def astray(seed: int) -> list[str]:
    """Rank 1 calls another Program than the others; then all reset."""
    found, made = list[str](), list[Executor]()
    for name in ("one", "two"):
        serial = text_of("reduce", [4] * 4, [[0, 1], [2, 3]]).replace(name=name)
        options = Options(strategy="serial", transport="nccl", timeout_s=20)
        program = lower(serial, options)
        groups = {"tp": world_group()}
        made.append(Executor(program, groups=groups, device="cuda", options=options).prepare())
    inputs = [torch.ones(size, device="cuda") for size in ((16, 16), (16, 24))]
    error, text, seconds = attempt(lambda: made[dist.get_rank() == 1].run(inputs))
    found += [error, text, str(seconds < 5)]
    made[0].reset()
    (y,) = made[0].run(inputs)
    return [*found, str(bool((y == 64).all()))]


def test_a_rank_that_calls_another_program_is_told_before_data_moves(
    pairs: NamedHosts, seed: int
) -> None:
    for error, text, soon, after in pairs(4).run(astray, seed, timeout_s=100.0):
        assert error == "AgreementError", text
        assert "rank 1 on host interlace-a called 'two'" in text
        assert (soon, after) == ("True", "True")
