"""What the CUDA engines of all ranks issue for a layer of experts, done by simulated devices."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from tests.passes.experts import layer
from tests.runtime.cuda_sites import writes_what_peers_use
from tests.support.fake_cuda import MAIN, Fake, fake_engine
from tests.support.fake_device import Entry, simulate

from interlace.ir import Get, Program, parse
from interlace.options import Options
from interlace.passes import lower

RANKS, EXPERTS, ROOM, DIM, HIDDEN = 4, 2, 3, 16, 8
CASES = ("get", "put")


def program(strategy: str) -> Program:
    """The layer with tokens, weights and results of the caller."""
    text = layer(RANKS, EXPERTS, ROOM, DIM, HIDDEN, "bf16")
    lowered = lower(parse(text), Options(strategy="peer"), transport=strategy)
    assert {site.strategy for site in lowered.sites} == {"peer"}
    return lowered


def logs_of(fake: Fake, runs: int) -> list[list[Entry]]:
    """What is issued in each of some runs."""
    sizes = (RANKS * EXPERTS, ROOM, DIM), (EXPERTS, DIM, HIDDEN), (EXPERTS, HIDDEN, DIM)
    inputs = [torch.randn(shape).bfloat16() for shape in sizes]
    found: list[list[Entry]] = []
    for _ in range(runs):
        fake.run(inputs)
        found.append(list(fake.log))
    return found


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
@pytest.mark.parametrize("strategy", CASES)
def test_no_rank_waits_for_ever_nor_writes_too_early(
    strategy: str, in_order: bool, seed: int
) -> None:
    """All ends, and whoever writes what peers use in run n does so after they ended run n - 2."""
    lowered = program(strategy)
    gotten = any(isinstance(op, Get) for op in lowered.ops)
    options = Options(in_order=in_order)
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(fake_engine(lowered, r, options)) for r in range(RANKS)]
        logs = [logs_of(fake, 6) for fake in fakes]

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if writes_what_peers_use(fakes[rank], entry, gotten):
                assert min(over(peer) for peer in range(RANKS)) >= run - 2

        for number in range(5):
            assert not simulate(logs, random.Random(seed + number), look)
        # The simulation tells: without one signal it does not end.
        last = logs[2][-1]
        word = next(entry[2] for entry in last if entry[0] == "write")
        last[:] = [entry for entry in last if entry[0::2][:2] != ("write", word)]
        assert simulate(logs, random.Random(seed))


@pytest.mark.parametrize("strategy", CASES)
def test_streams_may_share_a_queue_of_the_device(strategy: str, seed: int) -> None:
    """In the order in which ops are issued, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    lowered = program(strategy)
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(fake_engine(lowered, rank)) for rank in range(RANKS)]
        logs = [logs_of(fake, 3) for fake in fakes]
        for runs, fake in zip(logs, fakes, strict=True):
            one = {MAIN, *(lane.handle for lane in fake.engine.binding.lanes.values())}
            for log in runs:
                log[:] = [(e[0], min(one) if e[1] in one else e[1], *e[2:]) for e in log]
        for number in range(5):
            assert not simulate(logs, random.Random(seed + number))
