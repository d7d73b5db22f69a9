"""Runs of one stream in a team: the same results, faults and words for peers as step by step."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt
from tests.support.pool import Died, Pool

from interlace.comm import TeamComm, release_teams, team_of
from interlace.comm.control import DONE, ENTERED, EXITED, PROGRESS, progress_of
from interlace.comm.host.signals import stamp
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

TIME_OUT_S = 2.5

BEFORE = """
def before(tp: Team[2], x: f32[4], i: i64[2], y: out[f32[2]]):
    t = alloc(f32[2])
    main: call("aten.index_select.out", x, 0, i, out=t)
    main: all_reduce(t, y, team=tp, reduce="sum", backend="{}")
"""
"""An op that fails before the ranks meet,"""
AFTER = """
def after(tp: Team[2], x: f32[4], i: i64[2], y: out[f32[2]]):
    t = alloc(f32[4])
    main: all_reduce(x, t, team=tp, reduce="sum", backend="{}")
    main: call("aten.index_select.out", t, 0, i, out=y)
"""
"""and one that fails after they met."""
TEXTS = {"before": BEFORE, "after": AFTER}
RING = """
def ring(tp: Team[2], x: f32[4], y: out[f32[4]]):
    slot = alloc(f32[4], symmetric=tp)
    fresh = empty(f32[4])
    main: put(x, slot, peer=tp.rank + 1)
    main: notify(came, to=tp.rank + 1)
    main: expect(came, tp.rank - 1)
    main: call("aten.add.out", slot, x, out=fresh)
    main: free(slot)
    main: barrier(team=tp)
    main: copy(fresh, y)
    return y, fresh
"""


def prepared(text: str, **options: Any) -> Executor:
    group = dist.group.WORLD
    assert group is not None
    limit: dict[str, Any] = {"time_out_s": TIME_OUT_S} | options
    return Executor(parse(text), groups={"tp": group}, options=Options(**limit)).prepare()


def own_team() -> TeamComm:
    group = dist.group.WORLD
    assert group is not None
    return team_of(group, "tp")


def given(seed: int, good: bool = True) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed + dist.get_rank())
    return [torch.randn(4, generator=rng), torch.tensor([0, 3 if good else 4])]


def beside_the_engine(seed: int) -> list[bool]:
    """The same Programs with every op watched, as a trace does; in turn."""
    same: list[bool] = []
    for text in (*(t.format(b) for t in TEXTS.values() for b in ("gloo", "peer")), RING):
        quick, slow = prepared(text), prepared(text, trace=True)
        for number in range(20):
            inputs = given(seed + number)[: sum(b.kind == "input" for b in quick.program.params)]
            order = [quick, slow]
            random.Random(seed + number).shuffle(order)
            found = {one: one.run(inputs) for one in order}
            pairs = zip(found[quick], found[slow], strict=True)
            same.append(all(torch.equal(mine, theirs) for mine, theirs in pairs))
    return same


def test_results_are_the_engines(pool: Pool, seed: int) -> None:
    for same in pool(2).run(beside_the_engine, seed):
        assert len(same) == 100
        assert all(same)


def words() -> list[tuple[int, int, int]]:
    executor = prepared(BEFORE.format("peer"))
    control = own_team().control
    found: list[tuple[int, int, int]] = []
    for number in range(3):
        executor.run(given(number))
        entered = control.cells[ENTERED]
        assert control.cells[PROGRESS] == stamp(entered, DONE)
        assert progress_of(control.cells, 1, entered)[0][0] == -2
        found.append((entered, control.cells[EXITED], control.run))
    return found


def test_peers_can_read_where_a_rank_is(pool: Pool) -> None:
    first, second = pool(2).run(words)
    assert first == second
    assert all(entered == left == run for entered, left, run in first)
    assert [run - first[0][2] for _, _, run in first] == [0, 1, 2]


def raises(kind: str, backend: str, victim: int, seed: int) -> list[Outcome]:
    executor = prepared(TEXTS[kind].format(backend))
    bad = given(seed, good=dist.get_rank() != victim)
    executor.run(given(seed))
    found: list[Outcome] = []
    while not found or (found[-1][0] == "result" and len(found) < 4):
        found.append(attempt(lambda: executor.run(bad)))
    found.append(attempt(lambda: executor.run(given(seed))))
    executor.reset()
    assert torch.is_grad_enabled()
    found.append(attempt(lambda: executor.run(given(seed))))
    return found


@pytest.mark.parametrize("backend", ["gloo", "peer"])
@pytest.mark.parametrize("kind", TEXTS)
def test_an_op_that_raises_is_named_on_all_ranks(
    pool: Pool, kind: str, backend: str, seed: int
) -> None:
    victim = seed % 2
    results = pool(2).run(raises, kind, backend, victim, seed)
    for rank in range(2):
        *_, failed, again, after = results[rank]
        assert failed[0] == ("ExecutorError" if rank == victim else "PeerError")
        assert "index_select" in failed[1]
        assert f"(op {1 if kind == 'before' else 2} of {kind}, from <text>:" in failed[1]
        assert rank == victim or f"rank {victim} of team tp stopped" in failed[1]
        assert failed[2] < TIME_OUT_S
        assert again[0] == "ExecutorError"
        assert "out of order since a run failed" in again[1]
        assert after[0] == "result"


def dies(backend: str, victim: int, seed: int) -> list[Outcome]:
    executor = prepared(BEFORE.format(backend))
    executor.run(given(seed))
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return [attempt(lambda: executor.run(given(seed)))]


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_a_rank_that_died_is_named(pool: Pool, backend: str, seed: int) -> None:
    victim = seed % 2
    results = pool(2).run(dies, backend, victim, seed, may_die={victim})
    assert results[victim] == Died(-signal.SIGKILL)
    ((error, text, seconds),) = results[1 - victim]
    assert error == "PeerError"
    assert f"rank {victim} of team tp died" in text
    assert "all_reduce" in text
    assert seconds < TIME_OUT_S


def stalls(victim: int, seed: int) -> list[Outcome]:
    executor = prepared(AFTER.format("peer"))
    executor.run(given(seed))
    if dist.get_rank() == victim:
        time.sleep(TIME_OUT_S * 1.6)
    found = [attempt(lambda: executor.run(given(seed)))]
    executor.reset()
    return [*found, attempt(lambda: executor.run(given(seed)))]


def test_a_rank_that_does_not_come_is_named_within_the_time_out(pool: Pool, seed: int) -> None:
    victim = seed % 2
    results = pool(2).run(stalls, victim, seed)
    error, text, seconds = results[1 - victim][0]
    assert error == "CommTimeoutError"
    assert f"waiting for rank {victim}" in text
    assert "(op 1 of after, from <text>:" in text
    assert f"what the streams of rank {1 - victim} did last" in text
    assert "all_reduce" in text.partition("did last")[2], "the op that it is at"
    assert TIME_OUT_S - 0.5 < seconds < TIME_OUT_S + 1.5
    assert results[victim][0][0] == "PeerError"
    assert all(result[1][0] == "result" for result in results)


def blocked() -> list[Outcome]:
    """Another thread is at the team, and lets go in time or does not."""
    executor = prepared(BEFORE.format("peer"), time_out_s=0.5)
    dist.barrier()
    found: list[Outcome] = []
    for seconds in (0.2, 1.5):
        held = threading.Event()

        def hold(held: threading.Event = held, seconds: float = seconds) -> None:
            with own_team().lock:
                held.set()
                time.sleep(seconds)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        found.append(attempt(lambda: executor.run(given(0))))
        thread.join()
        dist.barrier()
    found.append(attempt(lambda: executor.run(given(0))))
    return found


def test_runs_wait_for_another_thread_and_not_for_ever(pool: Pool) -> None:
    for waits, fails, after in pool(2).run(blocked):
        assert waits[0] == after[0] == "result"
        assert fails[0] == "ExecutorError"
        assert "waited 0.5 s for another thread's run on the same teams" in fails[1]


def released() -> list[Outcome]:
    executor = prepared(BEFORE.format("peer"))
    executor.run(given(0))
    release_teams()
    return [attempt(lambda: executor.run(given(0))) for _ in range(2)]


def test_a_team_that_was_released_is_not_touched(pool: Pool) -> None:
    for outcomes in pool(2).run(released):
        for error, text, _ in outcomes:
            assert error == "TeamError"
            assert "was released: make and prepare new Executors" in text


def refused(seed: int) -> list[Outcome]:
    """What is wrong with an input is said before any peer is told of a run."""
    executor = prepared(BEFORE.format("peer"))
    control, wrong = own_team().control, given(seed)
    executor.run(wrong)
    before = control.run
    wrong[0].resize_(2, 2)
    found = [attempt(lambda: executor.run(wrong))]
    assert control.run == before
    return [*found, attempt(lambda: executor.run(given(seed)))]


def test_an_input_that_changed_in_place_is_seen(pool: Pool, seed: int) -> None:
    for refusal, after in pool(2).run(refused, seed):
        assert refusal[0] == "ExecutorError"
        assert "has shape [2, 2], not [4]" in refusal[1]
        assert after[0] == "result"


def nested() -> list[Outcome]:
    """An op of a run calls the Executor that it is an op of."""
    group = dist.group.WORLD
    assert group is not None
    text, options = BEFORE.format("peer"), Options(time_out_s=TIME_OUT_S)

    def again(*_: object) -> None:
        executor.run(given(0))

    executor = Executor(
        parse(text),
        groups={"tp": group},
        options=options,
        before_op=again,
    ).prepare()
    return [attempt(lambda: executor.run(given(0)))]


def test_a_run_within_a_run_of_its_own_is_refused(pool: Pool) -> None:
    for ((error, text, _),) in pool(2).run(nested, replace=True):
        assert error in ("ExecutorError", "PeerError")
        assert "was called in a run of its own" in text
