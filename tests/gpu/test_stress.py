"""Delays on the device, callers on changing streams, thousands of calls: always the same bits."""

from __future__ import annotations

import gc
import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import KINDS, STRATEGIES, Case, meet, poison, prepared, run
from tests.support.pool import Ranks

from interlace.ir import Op
from interlace.runtime import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

RUNS = 20
"""Runs with delays of each site and strategy: more than 500 in all."""
LONGEST = 600_000
"""Cycles of a delay at most, some 0.3 ms: longer than any op of these sizes."""
INPUTS = 3


class Jitter:
    """Delays ops of this rank on the device, each on its own stream: often not at all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slept = 0
        self.on = False

    def __call__(self, rank: int, index: int, op: Op) -> None:
        if self.on and self.random.random() < 0.4:
            self.slept += 1
            torch.cuda._sleep(int(self.random.random() ** 3 * LONGEST))


class Subject:
    """An Executor with delays, and the results that it must give for some inputs."""

    def __init__(self, stack: ExitStack, case: Case, strategy: str, seed: int) -> None:
        self.case, self.name = case, f"{case.kind} {strategy}"
        self.jitter = Jitter(seed * 31 + dist.get_rank())
        self.executor: Executor = stack.enter_context(prepared(case, strategy, self.jitter))
        self.inputs = [case.inputs(seed + number) for number in range(INPUTS)]
        with prepared(case, strategy, in_order=True) as twin:
            self.wanted = [run(twin, case, given) for given in self.inputs]
            twin.synchronize()
        torch.cuda.synchronize()
        self.jitter.on = True


def delayed(strategy: str, seed: int) -> tuple[list[str], int]:
    """Runs of all three sites by one strategy: what differs, and how many ops slept."""
    world, rank = dist.get_world_size(), dist.get_rank()
    alike, own = random.Random(seed), random.Random(seed + 7 * rank + 1)
    wrong: list[str] = []
    with ExitStack() as stack:
        cases = [Case(kind, world, "bf16", alike.choice(("even", "odd"))) for kind in KINDS]
        subjects = [Subject(stack, case, strategy, seed) for case in cases]
        streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
        for subject in subjects:
            done: list[tuple[int, torch.Tensor]] = []
            for _ in range(RUNS):
                which, clean = alike.randrange(INPUTS), alike.random() < 0.4
                if clean:
                    poison(subject.executor)
                stream = own.choice(streams)
                with torch.cuda.stream(stream):
                    if own.random() < 0.3:
                        torch.cuda._sleep(own.randrange(LONGEST))
                    done.append((which, run(subject.executor, subject.case, subject.inputs[which])))
            subject.executor.synchronize()
            torch.cuda.synchronize()
            wrong += [
                f"{subject.name}, run {number}"
                for number, (which, found) in enumerate(done)
                if not torch.equal(found, subject.wanted[which])
            ]
        return wrong, sum(subject.jitter.slept for subject in subjects)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_delays_and_streams_never_change_a_bit(gpus: Ranks, strategy: str, seed: int) -> None:
    for wrong, slept in gpus.run(delayed, strategy, seed, timeout_s=90):
        assert not wrong
        assert slept > RUNS


def many_calls(strategy: str, graph: bool, calls: int, seed: int) -> dict[str, Any]:
    """Memory before and after many calls, by torch's count and by the device's."""
    case = Case("matmul_reduce_scatter", dist.get_world_size())
    with prepared(case, strategy, graph=graph) as executor:
        inputs, y = case.inputs(seed), case.output()

        def state() -> tuple[int, int]:
            executor.synchronize()
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

        def call(times: int) -> None:
            for number in range(times):
                executor.run(inputs, out=[y])
                if number % 250 == 249:
                    executor.synchronize()

        call(60)
        wanted, before = y.clone(), state()
        call(calls)
        right, after = torch.equal(y, wanted), state()
        return {"right": right, "torch": after[0] - before[0], "device": before[1] - after[1]}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("strategy", ["peer-put", "fused", "exchange", "pipeline"])
def test_two_thousand_calls_leak_nothing(
    gpus: Ranks, strategy: str, graph: bool, seed: int
) -> None:
    for found in gpus.run(many_calls, strategy, graph, 2000, seed, timeout_s=60):
        assert found["right"]
        assert found["torch"] <= 0
        assert found["device"] < 8 << 20, "memory of the device that torch does not count"


def many_executors(strategy: str, rounds: int) -> tuple[int, int]:
    """Bytes that are gone after making and closing an Executor again and again, before the garbage
    collector comes by: of the device, for each rank that is on it, and of what torch counts."""
    case = Case("all_gather_matmul", dist.get_world_size())
    inputs = case.inputs(1)

    def make(times: int) -> tuple[int, int]:
        for _ in range(times):
            with prepared(case, strategy) as executor:
                run(executor, case, inputs)
                executor.synchronize()
        torch.cuda.synchronize()
        meet()  # who shares this GPU has closed all of it too
        free = torch.cuda.mem_get_info()[0]
        meet()
        return free, torch.cuda.memory_allocated()

    gc.disable()
    try:
        (free, allocated), (less, more) = make(3), make(rounds)
    finally:
        gc.enable()
    sharing = -(-dist.get_world_size() // torch.cuda.device_count())
    return (free - less) // sharing, more - allocated


@pytest.mark.parametrize("strategy", ["peer-get", "fused", "exchange"])
def test_closed_executors_give_their_memory_back(gpus: Ranks, strategy: str) -> None:
    for gone, held in gpus.run(many_executors, strategy, 20, timeout_s=60):
        assert gone < 8 << 20
        assert held <= 0
