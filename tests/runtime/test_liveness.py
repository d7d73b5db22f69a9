"""Who is waited for, for how long, and who is blamed: processes that end, stop or come late."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import (
    Outcome,
    attempt,
    executor_of,
    inputs_of,
    prepared,
    program_of,
    world_group,
)
from tests.runtime.test_teams import MESH
from tests.support.pool import Died, Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.comm.collectives import Spec, as_bytes, bind_collective
from interlace.comm.host import messages
from interlace.comm.host.signals import BoundedWait
from interlace.comm.rendezvous import patience
from interlace.comm.rendezvous.board import Board
from interlace.frontend.teams import consent_of_ranks
from interlace.ir import Op, parse
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.host import binder as host_ops

LIMIT_S = 20.0
"""Longer than any of these waits may take."""
AT_ONCE_S = 6.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def agree_without(victim: int, what: str) -> Outcome:
    """The first meeting of all, which one rank never comes to: it has used nothing of ours."""
    dist.barrier()
    if dist.get_rank() == victim:
        die()
    if what == "consent":
        wishes = [(world_group(), True)]
        return attempt(lambda: consent_of_ranks(["mlp"], wishes, LIMIT_S))
    return attempt(executor_of(program_of("get", dist.get_world_size())).prepare)


@pytest.mark.parametrize("what", ["consent", "prepare"])
def test_nobody_waits_for_a_rank_that_died_before_the_first_meeting(
    pool: Pool, what: str, seed: int
) -> None:
    victim = seed % 3
    results = pool(3).run(agree_without, victim, what, may_die={victim})
    for rank in {0, 1, 2} - {victim}:
        error, text, seconds = results[rank]
        assert error == "AgreementError"
        assert f"rank {victim} cannot come to" in text
        assert seconds < AT_ONCE_S


def consent_alone() -> Outcome:
    executor = prepared("get", timeout_s=LIMIT_S)
    inputs = inputs_of(executor.program, dist.get_rank(), 1)
    executor.run(inputs)
    if dist.get_rank():
        return attempt(lambda: executor.run(inputs))
    wishes = [(world_group(), True)]
    return attempt(lambda: consent_of_ranks(["mlp"], wishes, LIMIT_S))


def test_a_rank_that_compiles_alone_is_told_when_another_waits_for_it_in_a_run(pool: Pool) -> None:
    for error, text, seconds in pool(2).run(consent_alone, replace=True):
        assert error == "AgreementError"
        assert "rank 0 recompiled alone" in text
        assert seconds < AT_ONCE_S


# -- who is blamed ---------------------------------------------------------------------------------


ONE = """
def one({0}: Team[{1}], x: f32[4], y: out[f32[4]]):
    main: all_reduce(x, y, reduce="sum", team={0})
"""


def leave_in_turn(dead: int, leaves: int) -> Outcome:
    """One rank dies, another hears of it and ends its process; the third looks only then."""
    me, last, armed = dist.get_rank(), 3 - dead - leaves, False

    def slow(rank: int, index: int, op: Op) -> None:
        if armed and me == last:
            time.sleep(1.5)

    executor, x = executor_of(ONE.format("tp", 3), slow).prepare(), torch.ones(4)
    executor.run([x])
    armed = True
    if me == dead:
        die()
    found = attempt(lambda: executor.run([x]))
    if me == leaves:
        os._exit(7)
    return found


def test_a_survivor_that_heard_the_truth_and_left_is_not_blamed(pool: Pool) -> None:
    for dead, leaves in ((2, 1), (2, 0)):
        results = pool(3).run(leave_in_turn, dead, leaves, may_die={dead, leaves})
        assert results[leaves] == Died(7)
        error, text, _ = results[3 - dead - leaves]
        assert error == "PeerError"
        assert f"rank {dead} of team tp died" in text
        assert f"rank {leaves} of team tp died" not in text


def leave_a_mesh() -> Outcome:
    """Rank 3 dies. Rank 2 hears of it in the team of both and leaves; rank 0, which waits for rank
    2 in another team, shares none with rank 3."""
    mesh, me = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    program = parse(MESH.format("gloo"))
    groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
    x, options = torch.ones(4), Options(timeout_s=LIMIT_S)
    with Executor(program, groups=groups, options=options).prepare() as both:
        both.run(inputs_of(program, me, 1))
    executors = {
        name: Executor(
            parse(ONE.format(name, 2)), groups={name: groups[name]}, options=options
        ).prepare()
        for name in ("dp", "tp")
    }
    if me == 3:
        die()
    if me == 2:
        attempt(lambda: executors["tp"].run([x]))
        os._exit(7)
    return attempt(lambda: executors["dp"].run([x])) if me == 0 else ("", "", 0.0)


def test_what_a_survivor_heard_in_another_team_is_passed_on(pool: Pool) -> None:
    error, text, _ = pool(4).run(leave_a_mesh, may_die={2, 3})[0]
    assert error == "PeerError"
    assert "rank 2 stopped: rank 3 of team tp died" in text


def leave_a_meeting() -> Outcome:
    """The same in meetings: rank 1 leaves one with rank 2, and rank 0 waits for it in another."""
    me, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    pair = (1, 2) if me else (0, 1)
    board = Board(store, pair, me, "leaving", LIMIT_S)
    board.announce()
    dist.barrier()
    if me == 2:
        die()
    found = attempt(lambda: board.exchange(f"{pair}/1", {}, LIMIT_S))
    if me:
        os._exit(7)
    return found


def test_who_left_a_meeting_for_another_is_not_blamed(pool: Pool) -> None:
    error, text, seconds = pool(3).run(leave_a_meeting, may_die={1, 2})[0]
    assert error == "AgreementError"
    assert "rank 1 cannot come to '(0, 1)' any more, for it stopped: rank 2 cannot" in text
    assert seconds < AT_ONCE_S


# -- for how long ----------------------------------------------------------------------------------


def come_late(seconds: float) -> tuple[float, float, Outcome, list[str]]:
    """A rank that is late by more than the warning's minute, which is made shorter here."""
    patience.WARN_AFTER_S = 0.5
    group: Any = dist.new_group(timeout=timedelta(seconds=33))
    program = program_of("get", 2)
    with Executor(program, groups={"tp": group}).prepare() as executor:
        inputs = inputs_of(program, dist.get_rank(), 1)
        executor.run(inputs)
        time.sleep(seconds * dist.get_rank())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = attempt(lambda: len(executor.run(inputs)))
    default = Executor(program, groups={"tp": world_group()}).limit_s
    patience.WARN_AFTER_S = 60.0
    return executor.limit_s, default, found, [str(warning.message) for warning in told]


def test_the_time_out_follows_the_groups_and_a_warning_names_who_is_late(pool: Pool) -> None:
    for rank, (limit, default, found, told) in enumerate(pool(2).run(come_late, 1.5)):
        assert (limit, default) == (33.0, 60.0), "the groups' own time-outs"
        assert found[:2] == ("result", "1")
        if rank == 0:
            (text,) = told
            assert "rank 1 has not entered run 2" in text
            assert "33 at most (option timeout_s)" in text


def prepare_late(seconds: float) -> tuple[Outcome, list[str]]:
    """A rank that is late to prepare the second Program: both have met for the first."""
    program = program_of("get", 2)
    executors = [Executor(program, groups={"tp": world_group()}) for _ in range(2)]
    with executors[0].prepare(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patience.WARN_AFTER_S = 0.5
        time.sleep(seconds * dist.get_rank())
        found = attempt(lambda: executors[1].prepare().close())
        patience.WARN_AFTER_S = 60.0
    return found, [str(warning.message) for warning in told]


def test_a_warning_names_who_is_late_to_a_meeting(pool: Pool) -> None:
    (found, told), (_, none) = pool(2).run(prepare_late, 1.5)
    assert found[0] == "result"
    assert [text.rpartition("): ")[2] for text in told] == ["rank 1 did not come to 'prepare'"]
    assert none == []


@contextlib.contextmanager
def before_each_transfer(act: Callable[[], None]) -> Iterator[None]:
    """Does something between the rendezvous of a collective on gloo and this rank's part of it."""

    def bound(backend: Any, spec: Spec, timeout_s: float, counts: Any) -> Any:
        run = bind_collective(backend, spec, timeout_s, counts)

        def held(src: Any, dst: Any, wait: BoundedWait) -> None:
            act()
            run(src, dst, wait)

        return held

    with mock.patch.object(host_ops, "bind_collective", bound):
        yield


def step_for(seconds: float, limit: float, within: str) -> Outcome:
    """Steps of a Program on gloo, in which rank 0 waits for most of the time: for rank 1 to enter a
    run, or `within` a collective or a message."""
    nap = 0.3 * dist.get_rank()
    with before_each_transfer(lambda: time.sleep(nap if within else 0)):
        executor = prepared("shift" if within == "message" else "pipeline", timeout_s=limit)
    inputs = inputs_of(executor.program, dist.get_rank(), 1)
    end = time.monotonic() + seconds

    def late(tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(nap if within == "message" else 0)
        return as_bytes(tensor)

    def go() -> str:
        with mock.patch.object(messages, "as_bytes", late):
            return step()

    def step() -> str:
        going = True
        while going:
            time.sleep(0 if within else nap)
            executor.run(inputs)
            stop = torch.tensor([float(time.monotonic() >= end)])
            dist.all_reduce(stop)
            going = not stop.item()
        return "done"

    return attempt(go)


def wake(pid: int, seconds: float) -> None:
    """Lets a process go on that is stopped for so long."""
    for _ in range(600):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        time.sleep(seconds if state == "T" else 0.05)
        if state == "T":
            return os.kill(pid, signal.SIGCONT)


def in_a_while(seconds: float, act: Callable[[], object]) -> threading.Timer:
    thread = threading.Timer(seconds, act)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "within", [pytest.param("", marks=pytest.mark.slow), "collective", "message"]
)
def test_a_pause_of_the_whole_job_is_no_time_out(pool: Pool, within: str) -> None:
    limit, held_s = 1.5, 3.0
    pool(2).run(step_for, 0.0, LIMIT_S, "")  # the processes are there

    def pause() -> None:
        for sign in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pool.pids:
                os.kill(pid, sign)
            time.sleep(held_s if sign == signal.SIGSTOP else 0)

    thread = in_a_while(1.5, pause)
    results = pool(2).run(step_for, held_s + 2.5, limit, within, replace=True)
    thread.join()
    assert [found[:2] for found in results] == [("result", "done")] * 2


def stop_within(kind: str, victim: int, limit: float) -> Outcome:
    """A rank is stopped between the rendezvous of a transfer and its part of it."""
    armed = False

    def stop() -> None:
        nonlocal armed
        if armed and dist.get_rank() == victim:
            armed = False
            # To this thread: sent to the process, another thread may take it, and meanwhile this
            # one goes on for milliseconds, in which it can end its part of the run.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def stopped(tensor: torch.Tensor) -> torch.Tensor:
        stop()
        return as_bytes(tensor)

    with before_each_transfer(stop), mock.patch.object(messages, "as_bytes", stopped):
        executor = prepared(kind, timeout_s=limit)
        inputs = inputs_of(executor.program, dist.get_rank(), 1)
        executor.run(inputs)
        armed = True
        return attempt(lambda: executor.run(inputs))


@pytest.mark.parametrize("kind", [pytest.param("pipeline", marks=pytest.mark.slow), "shift"])
def test_a_rank_that_is_stopped_in_a_transfer_of_gloo_is_named(
    pool: Pool, kind: str, seed: int
) -> None:
    victim, limit = seed % 3, 1.5
    pool(3).run(step_for, 0.0, LIMIT_S, "")
    thread = in_a_while(0.0, lambda: wake(pool.pids[victim], limit + 3))
    results = pool(3).run(stop_within, kind, victim, limit, replace=True)
    thread.join()
    others = [results[rank] for rank in range(3) if rank != victim]
    assert any(error == "CommTimeoutError" for error, _, _ in others), others
    for error, text, seconds in others:
        assert error in ("CommTimeoutError", "PeerError")
        assert f"waiting for rank {victim}:" in text
        assert "its process is stopped" in text
        assert seconds < limit + 2
