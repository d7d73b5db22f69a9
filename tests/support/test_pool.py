"""The pool itself: results, failures that name the rank, deaths, time-outs, and no process left."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import LOADED, Died, Pool, RankFailure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def total(scale: float) -> tuple[int, float]:
    x = torch.ones(1) * dist.get_rank() * scale
    dist.all_reduce(x)
    return os.getpid(), x.item()


def misbehave(how: str) -> int:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the planted fault")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return os.getpid()


def hold_the_lock() -> None:
    """Rank 1 keeps Python's lock, as a destructor may, and rank 0 fails meanwhile."""
    if dist.get_rank() == 0:
        raise ValueError("the planted fault")
    ctypes.PyDLL(None).sleep(60)


def not_loaded() -> list[str]:
    return [name for name in LOADED if name not in sys.modules]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there they find torch alone")
def test_ranks_find_loaded_what_they_would_import(pool: Pool) -> None:
    """Who is new, that is: an import that fails in the server of forks is passed over."""
    pool.close()
    assert pool(2).run(not_loaded) == [[], []]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_come_back_by_rank_from_processes_that_stay(pool: Pool, world: int) -> None:
    first = pool(world).run(total, 2.0)
    again = pool(world).run(total, 3.0)
    ranks = sum(range(world))
    assert [value for _, value in first] == [2.0 * ranks] * world
    assert [value for _, value in again] == [3.0 * ranks] * world
    assert [pid for pid, _ in first] == [pid for pid, _ in again]
    assert len({pid for pid, _ in first}) == world


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "the planted fault"), ("die", "exit code -9"), ("stall", "time.sleep|misbehave")],
)
def test_a_failure_names_the_rank_and_leaves_a_working_pool(
    pool: Pool, how: str, words: str
) -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2") as caught:
        pool(2).run(misbehave, how, timeout_s=3)
    assert any(word in str(caught.value) for word in words.split("|"))
    assert [value for _, value in pool(2).run(total, 1.0)] == [1.0, 1.0]


@pytest.mark.slow
def test_where_a_rank_stands_is_told_although_it_keeps_the_lock(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2 did not finish") as caught:
        pool(2).run(hold_the_lock, timeout_s=24)
    assert "in hold_the_lock" in str(caught.value).split("did not finish")[1]


def test_an_expected_death_is_a_result(pool: Pool) -> None:
    alive, dead = pool(2).run(misbehave, "die", may_die={1})
    assert dead == Died(-signal.SIGKILL)
    with pytest.raises(ProcessLookupError):  # the survivor was replaced too
        os.kill(alive, 0)


def added_on_a_mesh() -> tuple[bool, float]:
    """If what DTensor gives lies on the mesh that it was made on, and its sum over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    x: Any = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    y = x + x
    return y.device_mesh is mesh, float(y.sum().full_tensor())


def test_meshes_of_an_earlier_group_are_forgotten(pool: Pool) -> None:
    """torch keeps meshes in caches, where one of the same name and ranks is found."""
    for world in (4, 2, 4):
        assert pool(world).run(added_on_a_mesh) == [(True, 4.0 * world)] * world
