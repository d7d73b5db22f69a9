"""`interlace.reset()` after an error of a rank's own code, heard of by its teams or not."""

from __future__ import annotations

import time
from typing import Any

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
from tests.support.pool import Pool

from interlace.comm import team_of
from interlace.comm.resets import reset_teams
from interlace.frontend.teams import consent_of_ranks
from interlace.ir import Notify, Op
from interlace.options import Options
from interlace.runtime import Executor

TIMEOUT_S = 20.0


def reset_alone(kind: str, first: int, failed: bool, early: bool, seed: int) -> list[Outcome]:
    """Rank `first` leaves out what the others do, and resets: while they wait for it, or before
    they come to it. A run of its own may have `failed` before, which all have heard of."""

    def stop(rank: int, index: int, op: Op) -> None:
        if armed and rank == first:
            raise ValueError("of its own code")

    armed, me = False, dist.get_rank()
    executor = prepared("get", stop, timeout_s=TIMEOUT_S)
    inputs = inputs_of(executor.program, me, seed)
    (before,) = executor.run(inputs)
    dist.barrier()
    armed = failed
    assert not failed or attempt(lambda: executor.run(inputs))[0] != "result"
    armed = False

    def act() -> object:
        if kind == "compile":
            return consent_of_ranks(["mlp"], [(world_group(), True)], TIMEOUT_S)
        if kind == "prepare":
            return executor_of(program_of("shift", 3)).prepare()
        return executor.run(inputs)

    found: list[Outcome] = []
    if early == (me != first):
        time.sleep(0.5)
    if me != first:
        found.append(attempt(act))
    found.append(attempt(lambda: reset_teams(TIMEOUT_S)))
    found.append(attempt(lambda: torch.equal(executor.run(inputs)[0], before)))
    executor.close()
    return found


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("kind", "failed"),
    [("run", False), ("prepare", False), ("prepare", True), ("compile", True)],
)
def test_who_resets_first_is_heard_at_once_and_met(
    pool: Pool, kind: str, failed: bool, early: bool, seed: int
) -> None:
    first = seed % 3
    results = pool(3).run(reset_alone, kind, first, failed, early, seed)
    for rank, (*heard, reset, after) in enumerate(results):
        assert [len(heard), reset[0]] == [rank != first, "result"], reset
        assert reset[2] < 5
        assert after[:2] == ("result", "True")
        for error, text, seconds in heard:
            assert error in ("PeerError", "AgreementError")
            assert f"rank {first}" in text
            assert "interlace.reset()" in text
            assert seconds < 5


def reset_of_several(seed: int) -> list[Outcome]:
    """Rank 1 resets all teams while rank 0 waits for it in a run of one, and then of the other."""
    program, options = program_of("get", 2), Options(timeout_s=TIMEOUT_S)
    inputs = inputs_of(program, dist.get_rank(), seed)
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(2)]
    executors = [Executor(program, groups={"tp": g}, options=options).prepare() for g in groups]
    found: list[Outcome] = []
    for executor in executors:
        executor.run(inputs)
        dist.barrier()
        if dist.get_rank() == 0:
            found.append(attempt(lambda executor=executor: executor.run(inputs)))
        found.append(attempt(lambda: reset_teams(TIMEOUT_S)))
    for executor in executors:
        executor.run(inputs)
        executor.close()
    for group in groups:
        dist.destroy_process_group(group)
    return found


def test_a_reset_is_heard_at_once_in_each_of_several_teams(pool: Pool, seed: int) -> None:
    waiting, resetting = pool(2).run(reset_of_several, seed)
    assert [outcome for outcome, _, _ in waiting] == ["PeerError", "result"] * 2, waiting
    assert [outcome for outcome, _, _ in resetting] == ["result"] * 2, resetting
    assert all(seconds < 5 for _, _, seconds in waiting + resetting)
    assert all("interlace.reset()" in text for _, text, _ in waiting[::2])


def reset_unasked(seed: int) -> tuple[bool, bool]:
    """A reset when nothing failed: whether the user's connections stay, and runs go on."""
    executor, me = prepared("pipeline", timeout_s=TIMEOUT_S), dist.get_rank()
    inputs = inputs_of(executor.program, me, seed)
    (before,) = executor.run(inputs)
    team = team_of(world_group(), "tp")
    backend = team.backend("gloo", "cpu", TIMEOUT_S)
    for _ in range(2):
        reset_teams(TIMEOUT_S)
    same = team.backend("gloo", "cpu", TIMEOUT_S) is backend
    right = torch.equal(executor.run(inputs)[0], before)
    executor.close()
    return same, right


def test_a_reset_when_nothing_failed_keeps_connections(pool: Pool, seed: int) -> None:
    assert pool(2).run(reset_unasked, seed) == [(True, True)] * 2


RING = """
def ring(tp: Team[3], x: f32[4], y: out[f32[4]]):
    s = alloc(f32[4], symmetric=tp)
    main: copy(x, s)
    main: notify(ready, to=tp.rank + 1)
    main: expect(ready, tp.rank - 1)
    main: get(s, y, peer=tp.rank - 1)
    main: free(s)
"""


def reset_beside_a_run(slow: int, seed: int) -> list[Outcome]:
    """Rank `slow` is late in a run: the next one waits for it, the one before resets meanwhile."""

    def wait(rank: int, index: int, op: Op) -> None:
        if armed and rank == slow and isinstance(op, Notify):
            time.sleep(1.0)

    armed, executor = False, executor_of(RING, wait).prepare()
    inputs = [torch.ones(4)]
    executor.run(inputs)
    dist.barrier()
    armed = True
    found = [attempt(lambda: executor.run(inputs)), attempt(lambda: reset_teams(TIMEOUT_S))]
    executor.close()
    return found


def test_a_run_that_needs_nothing_more_of_who_resets_goes_well(pool: Pool, seed: int) -> None:
    slow = seed % 3
    results = pool(3).run(reset_beside_a_run, slow, seed)
    assert [outcome for found in results for outcome, _, _ in found] == ["result"] * 6, results
    assert results[(slow + 1) % 3][0][2] > 0.5 > results[slow - 1][0][2]


def reset_beside_a_group_that_is_gone(seed: int) -> list[Outcome]:
    """A group that some ranks still refer to after its end."""
    group: Any = dist.new_group([0, 1])
    executor = Executor(
        program_of("get", 2), groups={"tp": group}, options=Options(timeout_s=TIMEOUT_S)
    ).prepare()
    executor.close()
    del executor
    dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        del group
    return [attempt(lambda: reset_teams(2.0))]


def test_a_group_that_is_gone_is_not_met_for(pool: Pool, seed: int) -> None:
    for ((outcome, text, _),) in pool(2).run(reset_beside_a_group_that_is_gone, seed):
        assert outcome == "result", text
