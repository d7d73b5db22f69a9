"""Runs of one stream in a team: words for peers, other threads, and inputs that changed."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, executor_of, world_group
from tests.support.pool import Pool

from interlace.comm import TeamComm, team_of
from interlace.comm.control import DONE, ENTERED, EXITED, PROGRESS, progress_of
from interlace.comm.host.signals import stamp

TEXT = """
def total(tp: Team[2], x: f32[4], i: i64[2], y: out[f32[2]]):
    t = alloc(f32[2])
    main: call("aten.index_select.out", x, 0, i, out=t)
    main: all_reduce(t, y, team=tp, reduce="sum", backend="peer")
"""


def own_team() -> TeamComm:
    return team_of(world_group(), "tp")


def given(seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed + dist.get_rank())
    return [torch.randn(4, generator=rng), torch.tensor([0, 3])]


def words() -> list[tuple[int, int, int]]:
    executor = executor_of(TEXT).prepare()
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


def blocked() -> list[Outcome]:
    """Another thread is at the team, and lets go in time or does not."""
    executor = executor_of(TEXT, timeout_s=0.5).prepare()
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
