"""What goes wrong on one GPU is a bounded, typed error on all other ranks, and `reset` mends it."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.gpu import cases
from tests.gpu.cases import Case, finish, meet, prepared, run
from tests.runtime.programs import Outcome, attempt
from tests.support.pool import Died, Ranks

from interlace.comm import Spec, team_of
from interlace.comm.cuda.nccl import bind_on_stream
from interlace.ir import Op
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.cuda.waits import watchdog as watchdog_file

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

TIMEOUT_S = 1.5
LATE_S = 3.0
"""How long after the time-out the error may come."""
STRATEGIES = ("peer-get", "peer-put", "fused", "beside", "exchange", "pipeline", "ring")


def some(*quick: str) -> list[Any]:
    """All of them; the others are slow, as each takes seconds."""
    return [s if s in quick else pytest.param(s, marks=pytest.mark.slow) for s in STRATEGIES]


NAMED = ("peer-get", "peer-put", "fused", "beside")
"""Strategies in which every rank waits for every other itself, and so sees which one is late."""
CYCLES_PER_S = 1.9e9


class Fault:
    """Does something on one rank before one op of one run."""

    def __init__(self, rank: int, action: Callable[[], None]) -> None:
        self.rank, self.action = rank, action
        self.index = 0
        self.armed = self.fired = False

    def __call__(self, rank: int, index: int, op: Op) -> None:
        if self.armed and rank == self.rank and index >= self.index and not self.fired:
            self.fired = True
            self.action()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall_host() -> None:
    time.sleep(TIMEOUT_S * 2)


def stall_device() -> None:
    torch.cuda._sleep(int(CYCLES_PER_S * TIMEOUT_S * 2))


def raise_it() -> None:
    raise ValueError("the planted fault")


ACTIONS = {"dies": die, "host": stall_host, "device": stall_device, "raises": raise_it}


def suffer(strategy: str, what: str, victim: int, seed: int) -> list[Outcome]:
    """The run with the fault, one more, and two after a reset."""
    case = Case("all_gather_matmul", dist.get_world_size())
    fault = Fault(victim, ACTIONS[what])
    executor = prepared(case, strategy, fault, timeout_s=TIMEOUT_S)
    inputs = case.inputs(seed, exact=True)
    first = finish(executor, case, inputs)
    assert first[0] == "result", first
    meet()
    fault.index = random.Random(seed).randrange(3)
    fault.armed = True
    found = [finish(executor, case, inputs)]
    if found[0][0] == "result":  # a rank may be done before it hears of the others
        found = [finish(executor, case, inputs)]
    assert fault.fired == (dist.get_rank() == victim)
    found.append(finish(executor, case, inputs))
    meet()  # the stalled rank comes late
    executor.reset()
    found += [finish(executor, case, inputs) for _ in range(2)]
    assert [outcome[1] for outcome in found[2:]] == [first[1]] * 2, found
    executor.close()
    begun = time.monotonic()
    gc.collect()  # what NCCL left behind goes at once, and holds up nobody
    assert time.monotonic() - begun < TIMEOUT_S
    return found


@pytest.mark.parametrize("what", ["host", "device"])
@pytest.mark.parametrize("strategy", some("peer-get", "fused", "beside", "exchange"))
def test_a_stalled_rank_is_a_time_out_on_the_others(
    gpus: Ranks, strategy: str, what: str, seed: int
) -> None:
    victim = seed % gpus.world
    results = gpus.run(suffer, strategy, what, victim, seed, timeout_s=45)
    others = [found for rank, found in enumerate(results) if rank != victim]
    assert any(found[0][0] == "CommTimeoutError" for found in results)
    if strategy in NAMED:
        assert any(f"rank {victim}" in found[0][1] for found in others), "nobody names the culprit"
    for found in others:
        error, text, seconds = found[0]
        assert error in ("CommTimeoutError", "PeerError"), text
        assert seconds < TIMEOUT_S + LATE_S
        assert "all_gather_matmul" in text
        assert found[1][0] in ("ExecutorError", "CommTimeoutError", "PeerError")


@pytest.mark.parametrize("strategy", some("fused", "exchange", "pipeline"))
def test_a_rank_that_comes_late_to_a_replay_is_a_time_out_on_the_others(
    gpus: Ranks, strategy: str, seed: int
) -> None:
    victim = seed % gpus.world
    for rank, found in enumerate(gpus.run(late_replay, strategy, victim, seed, timeout_s=60)):
        first, second, *after = found
        if rank != victim:
            assert first[0] in ("CommTimeoutError", "PeerError"), first
            assert first[2] < TIMEOUT_S + LATE_S
        assert second[0] in ("ExecutorError", "CommTimeoutError", "PeerError"), second
        assert [outcome[0] for outcome in after] == ["result"] * 3, after


def late_replay(strategy: str, victim: int, seed: int) -> list[Outcome]:
    """The replay that one rank is late for, the next one, and three after a reset."""
    case = Case("all_gather_matmul", dist.get_world_size())
    executor = prepared(case, strategy, graph=True, timeout_s=TIMEOUT_S)
    beside = prepared(case, strategy, graph=True, timeout_s=TIMEOUT_S)
    inputs = case.inputs(seed, exact=True)
    first, *_ = [finish(each, case, inputs) for each in (executor, beside, executor)]
    meet()
    if dist.get_rank() == victim:
        time.sleep(TIMEOUT_S * 2)
    found = [finish(executor, case, inputs) for _ in range(2)]
    meet()
    executor.reset()
    found += [finish(each, case, inputs) for each in (executor, beside, executor)]
    assert [outcome[1] for outcome in found[2:]] == [first[1]] * 3, found
    executor.close()
    beside.close()
    return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("strategy", some("fused", "exchange", "pipeline"))
def test_a_run_behind_the_callers_long_work_is_not_late(
    gpus: Ranks, strategy: str, graph: bool, seed: int
) -> None:
    """Nor are those behind it; all ranks work as long."""
    gpus.run(come_behind, strategy, graph, seed, timeout_s=60)


def come_behind(strategy: str, graph: bool, seed: int) -> None:
    case = Case("all_gather_matmul", dist.get_world_size())
    executor = prepared(case, strategy, graph=graph, timeout_s=TIMEOUT_S)
    inputs = case.inputs(seed, exact=True)
    first = finish(executor, case, inputs)
    meet()
    begun = time.monotonic()
    stall_device()
    for _ in range(random.Random(seed).randrange(1, 40)):
        run(executor, case, inputs)
    last = finish(executor, case, inputs)
    assert time.monotonic() - begun > TIMEOUT_S, "it was no long work"
    assert last[:2] == first[:2]
    executor.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_on_one_rank_is_heard_by_all(gpus: Ranks, strategy: str, seed: int) -> None:
    victim = seed % gpus.world
    case = gpus.run(hear, strategy, victim, seed, timeout_s=45)
    for rank, (error, text, seconds) in enumerate(case):
        assert error in (("ValueError", "ExecutorError") if rank == victim else ("PeerError",)), (
            text
        )
        assert "the planted fault" in text
        assert seconds < TIMEOUT_S + LATE_S


def heard_within(runs: int, executor: Executor, case: Case, inputs: list[torch.Tensor]) -> Outcome:
    """What the first run that fails says; the last result, if none does."""
    heard: Outcome = ("", "", 0.0)
    for _ in range(runs):
        try:
            heard = finish(executor, case, inputs)
        except ValueError as error:
            return "ValueError", str(error), 0.0
        if heard[0] != "result":
            break
    return heard


def hear(strategy: str, victim: int, seed: int) -> Outcome:
    """What each rank hears of an exception on one, in this run or the next; then all is well."""
    case = Case("all_gather_matmul", dist.get_world_size())
    fault = Fault(victim, raise_it)
    executor = prepared(case, strategy, fault, timeout_s=10.0)
    inputs = case.inputs(seed, exact=True)
    first = finish(executor, case, inputs)
    meet()
    fault.armed = True
    heard = heard_within(3, executor, case, inputs)
    meet()
    executor.reset()
    after = finish(executor, case, inputs)
    assert after[:2] == first[:2], after
    executor.close()
    return heard


@pytest.mark.nccl
@pytest.mark.parametrize("strategy", ["ring", "pipeline"])
def test_a_failure_at_any_moment_ends_what_nccl_does(gpus: Ranks, strategy: str, seed: int) -> None:
    """Also while another rank issues the op that then waits for ever: Note [Aborts]."""
    # Replaced after it: torch's own NCCL of the default group may be among what is ended.
    found = gpus.run(hear_often, strategy, seed, timeout_s=60, replace=True)
    for rank, heard in enumerate(found):
        for number, (error, text, seconds) in enumerate(heard):
            victim = number % gpus.world == rank
            assert error in (("ValueError", "ExecutorError") if victim else ("PeerError",)), text
            assert "the planted fault" in text
            assert seconds < 2 + LATE_S


def hear_often(strategy: str, seed: int) -> list[Outcome]:
    """What is heard of exceptions of each rank in turn, each before another op and moment."""
    case = Case("all_gather_matmul", dist.get_world_size())
    rng = random.Random(seed)
    fault = Fault(0, raise_it)
    executor = prepared(case, strategy, fault, timeout_s=10.0)
    inputs = case.inputs(seed, exact=True)
    first = finish(executor, case, inputs)
    found: list[Outcome] = []
    with mock.patch.object(watchdog_file, "PERIOD_S", 0.001):  # its looks meet more of a run
        for number in range(6):
            fault.rank, fault.index = number % dist.get_world_size(), rng.randrange(3)
            late = [rng.random() * 0.004 for _ in range(dist.get_world_size())]
            meet()
            fault.armed, fault.fired = True, False
            time.sleep(late[dist.get_rank()])
            found.append(heard_within(3, executor, case, inputs))
            meet()
            fault.armed = False
            executor.reset()
            after = finish(executor, case, inputs)
            assert after[:2] == first[:2], (number, after)
    executor.close()
    return found


@pytest.mark.nccl
@pytest.mark.parametrize("strategy", ["pipeline", "ring"])
def test_nobody_is_left_in_a_connection_by_a_rank_that_fails_before_its_first_op(
    gpus: Ranks, strategy: str, seed: int
) -> None:
    victim = seed % gpus.world
    found = gpus.run(fail_at_first, strategy, victim, seed, timeout_s=45)
    for rank, (error, text, seconds) in enumerate(found):
        assert error == ("ValueError" if rank == victim else "PeerError"), text
        assert "the planted fault" in text
        assert seconds < 2 + LATE_S


def fail_at_first(strategy: str, victim: int, seed: int) -> Outcome:
    """What is heard of it in the first run of a group without NCCL; after a reset all is well."""
    case = Case("all_gather_matmul", dist.get_world_size())
    fault = Fault(victim, raise_it)
    group: Any = dist.new_group(backend="gloo")
    executor = Executor(
        case.program(strategy),
        groups={"tp": group},
        device="cuda",
        options=Options.from_dict(cases.STRATEGIES[strategy] | {"transport": "nccl"}),
        before_op=fault,
    ).prepare()
    inputs = case.inputs(seed, exact=True)
    meet()
    fault.armed = True
    heard = heard_within(3, executor, case, inputs)
    meet()
    executor.reset()
    after = [finish(executor, case, inputs)[:2] for _ in range(2)]
    assert after[0] == after[1], after
    assert after[0][0] == "result"
    executor.close()
    return heard


@pytest.mark.nccl
def test_a_rank_that_does_not_come_to_connect_is_a_time_out(gpus: Ranks, seed: int) -> None:
    """Rank 0 too, which all others come to; and the next try connects them."""
    victim = seed % gpus.world
    heard = gpus.run(connect_without, victim, timeout_s=60)
    del heard[victim]
    for error, text, seconds in heard:
        assert error in ("BackendError", "AgreementError"), "the first's own, or what it told"
        assert "could not connect team tp" in text
        assert seconds < TIMEOUT_S + LATE_S
    assert "BackendError" in [error for error, _, _ in heard]


def connect_without(victim: int) -> Outcome:
    """How long a rank waits for another; then all meet."""
    group: Any = dist.new_group(backend="gloo")
    team, found = team_of(group, "tp"), ("", "", 0.0)
    team.setup(20)
    if dist.get_rank() != victim:
        found = attempt(lambda: team.backend("nccl", "cuda", TIMEOUT_S))
    meet()
    team.num_prepared += 1  # as with whatever is prepared next
    backend = team.backend("nccl", "cuda", 20.0)
    spec = Spec("barrier", team.size, team.me, parts=(), dtype=torch.uint8)
    bind_on_stream(backend, spec, 20.0)(None, None)
    torch.cuda.synchronize()
    team.close()
    return found


@pytest.mark.parametrize("strategy", some("peer-put", "exchange"))
def test_a_killed_rank_is_named_on_all_others(gpus: Ranks, strategy: str, seed: int) -> None:
    victim = seed % gpus.world
    results = gpus.run(bury, strategy, victim, seed, timeout_s=45, may_die=[victim])
    for rank, found in enumerate(results):
        if rank == victim:
            assert found == Died(-signal.SIGKILL)
        else:
            error, text, seconds = found
            assert error in ("PeerError", "CommTimeoutError"), text
            assert str(victim) in text
            assert seconds < 10 + LATE_S


def bury(strategy: str, victim: int, seed: int) -> Outcome:
    """What a rank hears when another is killed in the middle of issuing a run."""
    case = Case("matmul_reduce_scatter", dist.get_world_size())
    fault = Fault(victim, die)
    executor = prepared(case, strategy, fault, timeout_s=10.0)
    inputs = case.inputs(seed)
    finish(executor, case, inputs)
    meet()
    fault.armed = True
    heard = ("", "", 0.0)
    for _ in range(3):
        heard = finish(executor, case, inputs)
        if heard[0] != "result":
            return heard
    return heard


def call_in_different_order(pair: tuple[str, str], seed: int) -> list[Outcome]:
    """Rank 0 calls the second Program first; afterwards all reset and call in order."""
    world = dist.get_world_size()
    cases = [Case("all_gather_matmul", world), Case("matmul_reduce_scatter", world)]
    made = [prepared(c, s, timeout_s=5.0) for c, s in zip(cases, pair, strict=True)]
    inputs = [case.inputs(seed, exact=True) for case in cases]
    for index in (0, 1):
        assert finish(made[index], cases[index], inputs[index])[0] == "result"
    meet()
    order = (1, 0) if dist.get_rank() == 0 else (0, 1)
    found = [("result", "", 0.0)]
    for index in order:
        found = [finish(made[index], cases[index], inputs[index])]
        if found[0][0] != "result":
            break
    meet()
    made[0].reset()
    found += [finish(made[index], cases[index], inputs[index]) for index in (0, 1)]
    for executor in made:
        executor.close()
    return found


@pytest.mark.parametrize("pair", [("peer-get", "peer-put"), ("fused", "exchange")], ids="-".join)
def test_ranks_that_call_in_different_order_hear_both_names(
    gpus: Ranks, pair: tuple[str, str], seed: int
) -> None:
    for first, *after in gpus.run(call_in_different_order, pair, seed, timeout_s=45):
        error, text, seconds = first
        assert error in ("AgreementError", "CommTimeoutError", "PeerError"), text
        assert "all_gather_matmul_even_bf16" in text
        assert "matmul_reduce_scatter_even_bf16" in text
        assert seconds < 5 + LATE_S
        assert [outcome[0] for outcome in after] == ["result"] * 2, after
