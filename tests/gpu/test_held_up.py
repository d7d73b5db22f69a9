"""A stall is a bounded, typed error also where the host waits in the driver, or streams share a
queue: Note [Held up] in `comm/cuda/access.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import KINDS, Case, Outcome, attempt, finish, here, meet, prepared, run
from tests.support.pool import Pool, Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

TIME_OUT_S = 1.5
LATE_S = 4.0
"""How long after the time-out the error may come: another process has to start for it."""
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
Found = tuple[float, bool, Outcome]
"""Seconds that the host was held up, whether another process had to help, what it heard."""
HELD = 0.5
"""The part of the time-out that the host must have been held up for the test to be one."""


@pytest.fixture(scope="module")
def one_queue() -> Iterator[Pool]:
    """Processes with one queue for all streams of a device."""
    pool = Pool("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    yield pool
    pool.close()


def wait_behind(strategy: str, graph: bool, what: str, victim: int, seed: int) -> Found:
    """A run that one rank does not come to, and something behind it that the host waits for."""
    case = Case("all_gather_matmul", dist.get_world_size())
    executor = prepared(case, strategy, graph=graph, time_out_s=TIME_OUT_S)
    inputs, z = case.inputs(seed, exact=True), torch.zeros(1 << 22, device="cuda")
    first = finish(executor, case, inputs)
    assert finish(executor, case, inputs)[:2] == first[:2]
    BEHIND[what](z)
    torch.empty(1 << 28, device="cuda")
    torch.cuda.synchronize()
    meet()
    begun, heard = time.monotonic(), ("", "", 0.0)

    def both() -> None:
        run(executor, case, inputs)
        BEHIND[what](z)

    if dist.get_rank() != victim:  # which does not come at all
        heard = attempt(both)
    held = time.monotonic() - begun
    if heard[0] == "result":
        heard = attempt(executor.synchronize)
    helped = any(side.access._helper is not None for side in executor._engine.sides)
    meet()
    executor.reset()
    after = [finish(executor, case, inputs) for _ in range(3)]
    assert [outcome[1] for outcome in after] == [first[1]] * 3, after
    executor.close()
    return held, helped, heard


def look_at(found: list[Found], victim: int, needs_help: bool) -> None:
    for rank, (held, helped, (error, text, _)) in enumerate(found):
        if rank != victim:
            assert error in ("CommTimeoutError", "PeerError"), text
            assert "all_gather_matmul" in text
            assert TIME_OUT_S * HELD < held < TIME_OUT_S + LATE_S
            assert helped or not needs_help, "the driver was not held up"
            print(f"rank {rank} was held up for {held:.2f} s, {helped=}: {text}")
    texts = [text for rank, (*_, (_, text, _)) in enumerate(found) if rank != victim]
    assert any(f"rank {victim}" in text for text in texts), "nobody names the culprit"


@pytest.mark.parametrize("what", BEHIND)
@pytest.mark.parametrize(
    ("strategy", "graph"),
    [("peer-get", False), ("fused", False), ("exchange", True)],
    ids=["peer-get", "fused", "exchange-graph"],
)
def test_a_host_that_waits_behind_a_stalled_run_is_let_go(
    gpus: Ranks, strategy: str, graph: bool, what: str, seed: int
) -> None:
    victim = seed % gpus.world
    found = gpus.run(wait_behind, strategy, graph, what, victim, seed, time_out_s=40)
    look_at(found, victim, needs_help=what != "item")


@pytest.mark.nccl
@pytest.mark.parametrize("what", ["to-host", "launches"])
@pytest.mark.parametrize("strategy", ["shift", "pipeline"])
def test_so_is_one_that_waits_for_nccl(gpus: Ranks, strategy: str, what: str, seed: int) -> None:
    victim = seed % gpus.world
    found = gpus.run(wait_behind, strategy, False, what, victim, seed, time_out_s=40)
    look_at(found, victim, needs_help=True)


@pytest.mark.parametrize("what", ["item", "launches"])
@pytest.mark.parametrize("strategy", ["peer-put", "fused"])
def test_streams_that_share_one_queue_are_let_go(
    gpus: Ranks, one_queue: Pool, strategy: str, what: str, seed: int
) -> None:
    ranks, victim = one_queue(gpus.world), seed % gpus.world
    found = ranks.run(wait_behind, strategy, False, what, victim, seed, time_out_s=40)
    look_at(found, victim, needs_help=True)


def capture_beside(strategy: str, victim: int, seed: int) -> tuple[str, Outcome]:
    """A stall while another thread captures a graph, in the mode that forbids most to others."""
    case = Case("all_gather_matmul", dist.get_world_size())
    executor = prepared(case, strategy, time_out_s=TIME_OUT_S)
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

    def only_run() -> None:
        run(executor, case, inputs)

    thread = threading.Thread(target=capture, daemon=True)
    thread.start()
    assert begun.wait(20)
    meet()
    heard = ("", "", 0.0)
    if dist.get_rank() != victim:  # which does not come at all
        heard = attempt(only_run)
        deadline = time.monotonic() + TIME_OUT_S + LATE_S
        while executor._engine.watched.failure is None and time.monotonic() < deadline:
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
    found = gpus.run(capture_beside, strategy, victim, seed, time_out_s=40)
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
    for wrong in one_queue(gpus.world).run(right_on_one_queue, seed, time_out_s=120):
        assert not wrong, "\n".join(wrong)
