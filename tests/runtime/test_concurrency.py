"""Streams and ranks really run at once, and no interleaving changes a bit."""

from __future__ import annotations

import random
import statistics
import time

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import TEXTS, executor_of, inputs_of, prepared, program_of
from tests.support.interpreter import run_ranks
from tests.support.pool import Pool

from interlace.ir import Alloc, Call, Collective, Copy, Free, Get, Group, Op, Put, parse_set

RUNS = 200
"""Runs with seeded delays, over all kinds and worlds."""
CASES = [(kind, world) for kind in TEXTS for world in (2, 3)]


class Jitter:
    """Delays each op of each rank at random: rarely long, often not at all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slept = 0
        self.on = False

    def __call__(self, rank: int, index: int, op: Op) -> None:
        if self.on and self.random.random() < 0.3:
            self.slept += 1
            time.sleep(self.random.random() ** 3 * 0.008)


def run_with_delays(kind: str, seed: int, runs: int) -> tuple[int, int]:
    """How many runs with delays differ from the one without, in order, and how many ops slept."""
    jitter = Jitter(seed + dist.get_rank())
    with (
        prepared(kind, before_op=jitter) as executor,
        prepared(kind, in_order=True) as twin,
    ):
        inputs = inputs_of(executor.program, dist.get_rank(), seed)
        inputs = [x + torch.rand(x.shape) * 1e-3 for x in inputs]  # sums round
        (wanted,) = twin.run(inputs)
        jitter.on = True
        differ = sum(not torch.equal(executor.run(inputs)[0], wanted) for _ in range(runs))
        return differ, jitter.slept


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_random_delays_never_change_a_bit(pool: Pool, kind: str, world: int, seed: int) -> None:
    runs = RUNS // len(CASES)
    for differ, slept in pool(world).run(run_with_delays, kind, seed, runs):
        assert differ == 0
        assert slept > runs


class Log:
    """Notes when ops begin, and delays some."""

    def __init__(self, delays: dict[type[Op], float]) -> None:
        self.delays = delays
        self.begun: list[tuple[int, float]] = []

    def __call__(self, rank: int, index: int, op: Op) -> None:
        self.begun.append((index, time.monotonic()))
        time.sleep(self.delays.get(type(op), 0.0))


LINGER_S = 0.1


def run_apart(kind: str) -> tuple[list[tuple[int, float]], list[torch.Tensor], int, int]:
    """Rank 1 lingers before it gives its slot back; what began when, and the results."""
    log = Log({Free: LINGER_S} if dist.get_rank() == 1 else {})
    with prepared(kind, before_op=log) as executor:
        results = [
            executor.run(inputs_of(executor.program, dist.get_rank(), run))[0] for run in range(4)
        ]
        ops = executor.program.ops
        first = next(i for i, op in enumerate(ops) if not isinstance(op, Alloc))
        last = next(i for i, op in enumerate(ops) if isinstance(op, Free))
        return log.begun, results, first, last


@pytest.mark.parametrize("kind", ["get", "put", "slots"])
def test_a_rank_may_be_a_run_ahead(pool: Pool, kind: str) -> None:
    (ahead, results, first, _), (behind, _, _, free) = pool(2).run(run_apart, kind)
    starts = [at for index, at in ahead if index == first]
    frees = [at for index, at in behind if index == free]
    assert len(starts) == len(frees) == 4
    for run in range(3):  # rank 0 has taken its slot for the next run while rank 1 holds this one's
        assert starts[run + 1] < frees[run] + LINGER_S
    program = program_of(kind, 2)
    for run, result in enumerate(results):
        inputs = [inputs_of(program, rank, run) for rank in range(2)]
        assert torch.equal(result, run_ranks(program, inputs, in_order=True)[0][0])  # pyright: ignore


PUSH = """
def give(tp: Team[[0, 1]], x: f32[64]):
    ranks(0)
    slot = alloc(f32[64], symmetric=tp)
    main: put(x, slot, peer=1)
    main: notify(sent, to=1)
    main: free(slot)


def take(tp: Team[[0, 1]], x: f32[64]):
    ranks(1)
    slot = alloc(f32[64], symmetric=tp)
    y = empty(f32[64])
    main: expect(sent, 0)
    main: copy(slot, y)
    main: free(slot)
    return y
"""


def push(runs: int) -> list[float]:
    program = parse_set(PUSH)[dist.get_rank()]
    with executor_of(program, Log({Copy: 0.003})).prepare() as executor:
        found = [executor.run([torch.full((64,), float(run))]) for run in range(runs)]
    return [y.unique().item() for result in found for y in result]


def test_a_fast_writer_waits_for_a_slow_reader(pool: Pool) -> None:
    _, read = pool(2).run(push, 40)
    assert read == [float(run) for run in range(40)]


def timed(kind: str, delay: float, runs: int) -> tuple[float, float]:
    """Seconds per run with every transfer and computation slowed: overlapped, and in order."""
    slow: dict[type[Op], float] = dict.fromkeys((Get, Put, Group, Collective, Call), delay)
    found: list[list[float]] = [[], []]
    with (
        prepared(kind, before_op=Log(slow)) as overlapped,
        prepared(kind, before_op=Log(slow), in_order=True) as serial,
    ):
        inputs = inputs_of(overlapped.program, dist.get_rank(), 0)
        for _ in range(runs):
            for seconds, executor in zip(found, (overlapped, serial), strict=True):
                dist.barrier()
                start = time.monotonic()
                executor.run(inputs)
                seconds.append(time.monotonic() - start)
    return statistics.median(found[0]), statistics.median(found[1])


@pytest.mark.parametrize("kind", ["get", "shift", "pipeline"])
def test_slowed_communication_is_hidden_under_computation(pool: Pool, kind: str) -> None:
    """With both slowed alike, an overlapped run takes a part of what the same ops take in order.

    Of n transfers and m computations in a row n + m delays pass; overlapped, about max(n, m) + 1.
    """
    for overlapped, serial in pool(3).run(timed, kind, 0.04, 5):
        print(f"{kind}: overlapped {overlapped * 1e3:.0f} ms, in order {serial * 1e3:.0f} ms")
        assert overlapped < 0.85 * serial


def pause_between_runs() -> int:
    with prepared("pipeline", timeout_s=0.5) as executor:
        inputs = inputs_of(executor.program, dist.get_rank(), 0)
        executor.run(inputs)
        time.sleep(1.8)
        return len(executor.run(inputs))


def test_time_between_runs_counts_for_no_time_out(pool: Pool) -> None:
    assert pool(2).run(pause_between_runs) == [1, 1]


def _takes_no_time(op: Op) -> bool:
    return isinstance(op, Alloc) and op.buffer.kind != "symmetric"


def trace_of(kind: str) -> list[tuple[str, str, float]]:
    delays: dict[type[Op], float] = {Get: 0.03, Call: 0.03}
    with prepared(kind, before_op=Log(delays), trace=True) as executor:
        inputs = inputs_of(executor.program, dist.get_rank(), 0)
        executor.run(inputs)
        dist.barrier()  # a rank that is late by a whole matmul would have nothing to overlap
        executor.run(inputs)
        timeline = executor.timeline()
        ops = executor.program.ops
        wanted = [i for i, op in enumerate(ops) if not _takes_no_time(op)]
        assert [span.op_index for span in timeline.spans] == wanted
        assert timeline.figures().overlap_s > 0
        return [(s.name, s.kind, s.seconds) for s in timeline.spans]


def test_a_trace_times_every_op_of_the_last_run(pool: Pool) -> None:
    for spans in pool(2).run(trace_of, "get"):
        assert [kind for name, kind, _ in spans if name == "aten.mm.out"] == ["compute"] * 2
        gets = [seconds for name, kind, seconds in spans if name == "get" and kind == "comm"]
        assert len(gets) == 1
        assert gets[0] > 0.01
