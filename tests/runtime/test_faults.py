"""What goes wrong on one rank becomes a bounded, typed error on every other.

Faults are planted by `before_op`, at an op drawn anew each time, and each test shows that its fault
did fire.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import (
    FLAT,
    TEXTS,
    Outcome,
    attempt,
    executor_of,
    inputs_of,
    prepared,
    program_of,
)
from tests.support.pool import Died, Pool

from interlace.errors import InterlaceError
from interlace.ir import Alloc, Notify, Op, Program, Record, parse
from interlace.options import Options
from interlace.runtime import Executor

TIMEOUT_S = 2.5


class Fault:
    """Does something to one rank before one op of one run."""

    def __init__(self, rank: int, index: int, action: Callable[[], None]) -> None:
        self.rank = rank
        self.index = index
        self.action = action
        self.armed = False
        self.fired = False

    def __call__(self, rank: int, index: int, op: Op) -> None:
        if self.armed and rank == self.rank and index == self.index and not self.fired:
            self.fired = True
            self.action()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    time.sleep(TIMEOUT_S * 1.6)


def raise_it() -> None:
    raise ValueError("the planted fault")


ACTIONS = {"dies": die, "stalls": stall, "raises": raise_it}


def early_op(program: Program, seed: int) -> int:
    """One of the ops up to the first by which a rank lets anybody else go on."""
    ops = program.ops
    told = (i for i, op in enumerate(ops) if isinstance(op, Notify | Record))
    last = next(told, len(ops) - 1)
    steps = [i for i in range(last + 1) if not isinstance(ops[i], Alloc) or _symmetric(ops[i])]
    return random.Random(seed).choice(steps)


def plant(kind: str, what: str, victim: int, seed: int) -> tuple[Executor, Fault]:
    """An Executor that has run once, with a fault that will hit `victim` in the next run."""
    fault = Fault(victim, 0, ACTIONS[what])
    executor = prepared(kind, before_op=fault, timeout_s=TIMEOUT_S)
    fault.index = early_op(executor.program, seed)
    executor.run(inputs_of(executor.program, dist.get_rank(), seed))
    dist.barrier()  # no rank's fault reaches another's first run
    fault.armed = True
    return executor, fault


def _symmetric(op: Op) -> bool:
    return isinstance(op, Alloc) and op.buffer.kind == "symmetric"


def suffer(kind: str, what: str, victim: int, seed: int) -> list[Outcome]:
    """The run with the fault, one more, and one after a reset."""
    executor, fault = plant(kind, what, victim, seed)
    inputs = inputs_of(executor.program, dist.get_rank(), seed)
    found = [attempt(lambda: executor.run(inputs))]
    if what != "dies":
        assert fault.fired == (dist.get_rank() == victim)
        found.append(attempt(lambda: executor.run(inputs)))
        executor.reset()
        (y,) = executor.run(inputs)
        found.append(("result", "equal" if torch.equal(y, executor.run(inputs)[0]) else "", 0.0))
    executor.close()
    return found


@pytest.mark.parametrize(
    ("kind", "world"),
    [("pipeline", 2), ("flat-peer", 2), *((kind, 3) for kind in TEXTS)],
)
def test_a_killed_rank_is_named_on_all_others_at_once(
    pool: Pool, kind: str, world: int, seed: int
) -> None:
    victim = seed % world
    results = pool(world).run(suffer, kind, "dies", victim, seed, may_die={victim})
    assert results[victim] == Died(-signal.SIGKILL)
    for rank in set(range(world)) - {victim}:
        ((error, text, seconds),) = results[rank]
        assert error == "PeerError"
        assert f"rank {victim} of team tp died" in text
        assert seconds < TIMEOUT_S


@pytest.mark.parametrize("kind", ["get", *FLAT])
def test_a_raising_op_stops_all_ranks_until_they_reset(pool: Pool, kind: str, seed: int) -> None:
    world = 3
    victim = seed % world
    results = pool(world).run(suffer, kind, "raises", victim, seed)
    for rank in range(world):
        failed, again, after = results[rank]
        assert failed[0] == ("ExecutorError" if rank == victim else "PeerError")
        assert "ValueError: the planted fault" in failed[1]
        assert rank == victim or f"rank {victim} of team tp stopped" in failed[1]
        assert failed[2] < TIMEOUT_S
        assert again[0] == "ExecutorError"
        assert "reset()" in again[1]
        assert after[1] == "equal"


@pytest.mark.parametrize(
    "kind", ["get", "flat-peer", pytest.param("pipeline", marks=pytest.mark.slow)]
)
def test_a_stalled_rank_is_named_within_the_time_out(pool: Pool, kind: str, seed: int) -> None:
    world = 3
    victim = seed % world
    results = pool(world).run(suffer, kind, "stalls", victim, seed)
    others = [results[rank][0] for rank in range(world) if rank != victim]
    assert any(error == "CommTimeoutError" for error, _, _ in others)
    for error, text, seconds in others:
        assert error in ("CommTimeoutError", "PeerError")
        assert f"rank {victim}" in text
        assert f"(op {early_op(program_of(kind, world), seed)} of" in text, "the op that stalls"
        assert "what the streams of rank" in text
        assert kind != "flat-peer" or "all_reduce" in text.partition("did last")[2]
        assert TIMEOUT_S - 0.5 < seconds < TIMEOUT_S + 1.5
    assert results[victim][0][0] == "PeerError"
    assert all(results[rank][2][1] == "equal" for rank in range(world))


def run_until_it_fails(kind: str, victim: int, seed: int) -> tuple[list[Outcome], bool, bool]:
    """A fault at any op of any stream; the other ranks hear of it in this run or the next."""
    fault = Fault(victim, 0, raise_it)
    executor = prepared(kind, before_op=fault, timeout_s=10)
    ops = executor.program.ops
    steps = [i for i in range(len(ops)) if not isinstance(ops[i], Alloc) or _symmetric(ops[i])]
    fault.index = random.Random(seed).choice(steps)
    fault.armed = True
    inputs = inputs_of(executor.program, dist.get_rank(), seed)
    found: list[Outcome] = []
    while not found or (found[-1][0] == "result" and len(found) < 4):
        found.append(attempt(lambda: executor.run(inputs)))
    executor.reset()
    (y,) = executor.run(inputs)
    same = torch.equal(y, executor.run(inputs)[0])
    executor.close()
    return found, fault.fired, same


@pytest.mark.parametrize("kind", TEXTS)
def test_a_fault_anywhere_is_heard_by_all(pool: Pool, kind: str, seed: int) -> None:
    for again in range(3):  # each rank in turn
        victim = (seed + again) % 3
        results = pool(3).run(run_until_it_fails, kind, victim, seed + again)
        for rank, (found, fired, same) in enumerate(results):
            assert fired == (rank == victim)
            error, text, seconds = found[-1]
            assert error == ("ExecutorError" if rank == victim else "PeerError")
            assert "the planted fault" in text
            assert seconds < 5
            assert len(found) <= 2 if rank != victim else len(found) == 1
            assert same


def hang_in_compute() -> list[Outcome]:
    """A stream hangs in a computation long after another has failed."""

    def before(rank: int, index: int, op: Op) -> None:
        if armed and op.stream == "side":
            time.sleep(3.0)
        if armed and op.stream == "main":
            time.sleep(0.2)
            raise_it()

    armed = False
    executor = Executor(parse(TWO_STREAMS), options=Options(timeout_s=0.5), before_op=before)
    executor.prepare()
    executor.run([torch.ones(2)])
    armed = True
    found = [attempt(lambda: executor.run([torch.ones(2)])) for _ in range(2)]
    executor.reset()
    armed = False
    found.append(attempt(lambda: executor.run([torch.ones(2)])))
    return found


TWO_STREAMS = """
def two(x: f32[2]):
    t = alloc(f32[2])
    y = empty(f32[2])
    side: copy(x, t)
    side: record(e)
    main: wait(e)
    main: copy(t, y)
    return y
"""


def test_a_stream_that_does_not_stop_is_named(pool: Pool) -> None:
    ((hangs, again, after),) = pool(1).run(hang_in_compute, replace=True)
    assert [outcome[0] for outcome in (hangs, again, after)] == ["ExecutorError"] * 3
    assert "stream side of rank 0 does not stop" in hangs[1]
    assert hangs[2] < 2.5
    assert "still hangs" in again[1]
    assert "still hangs" in after[1]


SIZED = """
def sized(tp: Team[2], S: Size[12], x: f32[S, 4]):
    y = empty(f32[S, 4])
    main: all_reduce(x, y, reduce="sum")
    return y
"""


def turned() -> str:
    """What a run of another size says whose kernels rank 1 cannot compile."""
    with executor_of(parse(SIZED), timeout_s=60.0).prepare() as executor:
        executor.run([torch.ones(12, 4)])
        engine, message = executor.engine, "no error"
        assert engine is not None
        full = mock.Mock(side_effect=OSError("no space left on device"))
        held = mock.patch.object(type(engine), "turn", full) if dist.get_rank() else nullcontext()
        try:
            with held:
                executor.run([torch.ones(10, 4)])
        except (OSError, InterlaceError) as error:
            message = f"{type(error).__name__}: {error}"
        executor.reset()
        (y,) = executor.run([torch.ones(8, 4)])
        assert torch.equal(y, torch.full((8, 4), 2.0))  # type: ignore[arg-type]
    return message


def test_peers_hear_of_an_error_amid_the_turn_to_other_sizes(pool: Pool) -> None:
    began = time.monotonic()
    first, second = pool(2).run(turned)
    assert second == "OSError: no space left on device"
    assert first.startswith(
        "PeerError: rank 1 of team tp stopped: OSError: no space left on device"
    )
    assert time.monotonic() - began < 40
