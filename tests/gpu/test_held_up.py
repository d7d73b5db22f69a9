"""A host that waits in the driver behind a stalled run, or streams that share a queue: the process
ends itself with a report, and its peers hear why. Note [Held up] in `comm/cuda/words.py`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import KINDS, Case, finish, here, meet, prepared, run
from tests.runtime.programs import Outcome, attempt
from tests.support.pool import Died, Pool, Ranks

from interlace.runtime.cuda.waits.watchdog import EXIT_CODE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

TIMEOUT_S = 1.5
LATE_S = 4.0
"""How long after the time-out an error may come."""
ENDS_S = 6.0
"""How long after the time-out the process must have ended."""
LAUNCHES = 4000
"""More than the queue of a stream takes."""


def item(z: torch.Tensor) -> None:
    z[0].item()


def to_host(z: torch.Tensor) -> None:
    z.cpu()


def from_host(z: torch.Tensor) -> None:
    z.copy_(torch.ones(z.shape))


def launches(z: torch.Tensor) -> None:
    for _ in range(LAUNCHES):
        z.add_(1)


def free(z: torch.Tensor) -> None:
    torch.cuda.empty_cache()


BEHIND: dict[str, Callable[[torch.Tensor], None]] = {
    "item": item,
    "to-host": to_host,
    "from-host": from_host,
    "launches": launches,
    "free": free,
}


@pytest.fixture(scope="module")
def one_queue() -> Iterator[Pool]:
    """Processes with one queue for all streams of a device."""
    pool = Pool("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    yield pool
    pool.close()


def wait_behind(
    strategy: str, graph: bool, what: str, victim: int, seed: int, folder: str
) -> Outcome:
    """A run that one rank comes to too late, and something behind it that the host waits for."""
    case, rank = Case("all_gather_matmul", dist.get_world_size()), dist.get_rank()
    executor = prepared(case, strategy, graph=graph, timeout_s=TIMEOUT_S)
    inputs, z = case.inputs(seed, exact=True), torch.zeros(1 << 22, device="cuda")
    first = finish(executor, case, inputs)
    assert finish(executor, case, inputs)[:2] == first[:2]
    BEHIND[what](z)
    torch.empty(1 << 28, device="cuda")
    torch.cuda.synchronize()
    meet()
    if rank == victim:
        time.sleep(TIMEOUT_S + ENDS_S)
        return finish(executor, case, inputs)

    def both() -> None:
        run(executor, case, inputs)
        BEHIND[what](z)
        executor.synchronize()

    stderr, report = os.dup(2), os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(report, 2)
    os.write(2, f"{time.time()}\n".encode())
    heard = attempt(both)
    os.dup2(stderr, 2)
    return heard


def look_at(
    found: list[Outcome | Died], victim: int, folder: Path, outcomes: tuple[str, ...] = ("ended",)
) -> None:
    """Every stalled rank ended itself with a report (or was released, where that is allowed)."""
    texts: list[str] = []
    for rank, outcome in enumerate(found):
        if not isinstance(outcome, Died):
            error, text, seconds = outcome
            assert error in ("CommTimeoutError", "PeerError"), text
            assert rank == victim or "raised" in outcomes, "the driver was not held up"
            assert seconds < TIMEOUT_S + ENDS_S
        else:
            begun, _, text = (folder / str(rank)).read_text().partition("\n")
            assert "ended" in outcomes
            assert outcome.exit_code == EXIT_CODE, text
            assert f"rank {rank} ends its process" in text
            assert "held up" in text
            assert "(most recent call first)" in text, "the stacks of the threads are missing"
            assert (folder / str(rank)).stat().st_mtime - float(begun) < TIMEOUT_S + ENDS_S
        assert "all_gather_matmul" in text
        texts += [text] if rank != victim else []
    assert any(f"rank {victim}" in text for text in texts), "nobody names the culprit"


@pytest.mark.parametrize(
    ("strategy", "graph", "what"),
    [
        *[("peer-get", False, what) for what in BEHIND if what != "item"],
        ("fused", False, "launches"),
        ("exchange", True, "to-host"),
    ],
)
def test_a_process_that_waits_in_the_driver_behind_a_stalled_run_ends_itself(
    gpus: Ranks, strategy: str, graph: bool, what: str, seed: int, tmp_path: Path
) -> None:
    victim = seed % gpus.world
    given = (strategy, graph, what, victim, seed, str(tmp_path))
    stalled = set(range(gpus.world)) - {victim}
    look_at(gpus.run(wait_behind, *given, timeout_s=60, may_die=stalled), victim, tmp_path)


@pytest.mark.parametrize("strategy", ["peer-get", "fused"])
def test_a_host_that_waits_outside_of_the_driver_is_released(
    gpus: Ranks, strategy: str, seed: int, tmp_path: Path
) -> None:
    victim = seed % gpus.world
    given = (strategy, False, "item", victim, seed, str(tmp_path))
    found = gpus.run(wait_behind, *given, timeout_s=60, replace=True)
    look_at(found, victim, tmp_path, outcomes=("raised",))


@pytest.mark.nccl
@pytest.mark.parametrize("what", ["to-host", "launches"])
@pytest.mark.parametrize("strategy", ["ring", "pipeline"])
def test_a_wait_behind_nccl_is_bounded(
    gpus: Ranks, strategy: str, what: str, seed: int, tmp_path: Path
) -> None:
    """Aborting the communicator may release the driver in time, and then the error is raised."""
    victim = seed % gpus.world
    given = (strategy, False, what, victim, seed, str(tmp_path))
    stalled = set(range(gpus.world)) - {victim}
    found = gpus.run(wait_behind, *given, timeout_s=60, may_die=stalled, replace=True)
    look_at(found, victim, tmp_path, outcomes=("ended", "raised"))


@pytest.mark.parametrize("what", ["item", "launches"])
@pytest.mark.parametrize("strategy", ["peer-put", "fused"])
def test_a_process_whose_streams_share_one_queue_ends_itself(
    gpus: Ranks, one_queue: Pool, strategy: str, what: str, seed: int, tmp_path: Path
) -> None:
    ranks, victim = one_queue(gpus.world), seed % gpus.world
    given = (strategy, False, what, victim, seed, str(tmp_path))
    stalled = set(range(gpus.world)) - {victim}
    look_at(ranks.run(wait_behind, *given, timeout_s=60, may_die=stalled), victim, tmp_path)


def capture_beside(strategy: str, victim: int, seed: int) -> tuple[str, Outcome]:
    """A stall while another thread captures a graph, in the mode that forbids most to others."""
    case = Case("all_gather_matmul", dist.get_world_size())
    executor = prepared(case, strategy, timeout_s=TIMEOUT_S)
    inputs, z = case.inputs(seed, exact=True), torch.zeros(1 << 22, device="cuda")
    first = finish(executor, case, inputs)
    begun, ends, stream = threading.Event(), threading.Event(), torch.cuda.Stream()
    told: list[str] = []

    def capture() -> None:
        torch.cuda.set_device(z.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
                z.add_(1)
                begun.set()
                assert ends.wait(30)
                z.add_(1)
            told.append("captured")
        except RuntimeError as error:
            told.append(str(error))
        finally:
            begun.set()
        del graph

    y = case.output()  # within the capture there may be no memory for it

    def only_run() -> None:
        executor.run(inputs, out=[y])

    thread = threading.Thread(target=capture, daemon=True)
    thread.start()
    assert begun.wait(20)
    meet()
    heard = ("", "", 0.0)
    if dist.get_rank() != victim:  # which does not come at all
        heard = attempt(only_run)
        engine, deadline = executor.engine, time.monotonic() + TIMEOUT_S + LATE_S
        assert engine is not None
        while engine.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)  # this thread may not ask for events
        time.sleep(0.5)
    ends.set()
    thread.join(20)
    if heard[0] == "result":
        heard = attempt(executor.synchronize)
    meet()
    executor.reset()
    assert finish(executor, case, inputs)[:2] == first[:2]
    executor.close()
    return told[0], heard


@pytest.mark.parametrize("strategy", ["peer-get", "exchange"])
def test_a_capture_of_another_thread_outlives_a_stall(
    gpus: Ranks, strategy: str, seed: int
) -> None:
    victim = seed % gpus.world
    found = gpus.run(capture_beside, strategy, victim, seed, timeout_s=40)
    for rank, (told, (error, text, seconds)) in enumerate(found):
        assert told == "captured"
        if rank != victim:
            assert error in ("CommTimeoutError", "PeerError"), text
            assert "all_gather_matmul" in text
            assert seconds < LATE_S


def right_on_one_queue(seed: int) -> list[str]:
    """What differs from serial where all streams of a device share one queue."""
    wrong: list[str] = []
    for kind in KINDS:
        case = Case(kind, dist.get_world_size())
        inputs = case.inputs(seed, exact=True)
        with prepared(case, "serial") as serial:
            wanted = run(serial, case, inputs)
            serial.synchronize()
        for strategy in here():
            for graph in (False, True):
                with prepared(case, strategy, graph=graph) as executor:
                    found = [run(executor, case, inputs) for _ in range(12)]
                    executor.synchronize()
                torch.cuda.synchronize()
                if not all(torch.equal(y, wanted) for y in found):
                    wrong.append(f"{case} {strategy}, graph={graph}")
    return wrong


def test_one_queue_is_enough(gpus: Ranks, one_queue: Pool, seed: int) -> None:
    """Every strategy ends, and is right: no stream waits for what stands behind it in a queue."""
    for wrong in one_queue(gpus.world).run(right_on_one_queue, seed, timeout_s=120):
        assert not wrong, "\n".join(wrong)
