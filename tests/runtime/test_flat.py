"""Runs of one stream in a team: words for peers, other threads, and inputs that changed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.runtime.programs import executor_of, world_group
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
