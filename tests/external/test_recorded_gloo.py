"""Real runs on gloo that hang: each rank dumps what torch recorded, and the verdict is right."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import interlace
from tests.support.pool import Pool

Case = Callable[[int, list[dist.ProcessGroup]], None]
TIME_OUT_S = 1.0


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pool]:
    """Ranks of this module alone: a recorder keeps what earlier tests did."""
    pool = Pool()
    yield pool
    pool.close()


def reduces(group: dist.ProcessGroup, size: int = 4, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.ones(size, dtype=dtype), group=group)


def left_behind(rank: int, groups: list[dist.ProcessGroup]) -> None:
    reduces(groups[0], 8)
    if rank != 1:
        dist.broadcast(torch.ones(3), 0, group=groups[0])


def opposite_order(rank: int, groups: list[dist.ProcessGroup]) -> None:
    for group in groups if rank else groups[::-1]:
        reduces(group, 16)


def another_dtype(rank: int, groups: list[dist.ProcessGroup]) -> None:
    """Does not hang: as many bytes, and sums of nonsense."""
    reduces(groups[0])
    reduces(groups[0], 4, torch.int32 if rank == 1 else torch.float32)


def another_kind(rank: int, groups: list[dist.ProcessGroup]) -> None:
    reduces(groups[0])
    if rank == 2:
        dist.barrier(group=groups[0])
    else:
        reduces(groups[0], 5)


def sound(rank: int, groups: list[dist.ProcessGroup]) -> None:
    del rank
    x = torch.ones(4)
    for group in groups:
        world = dist.get_world_size(group)
        parts = [torch.ones(4) for _ in range(world)]
        dist.all_reduce(x, group=group)
        dist.all_gather(parts, x, group=group)
        dist.broadcast(x, 0, group=group)
        dist.reduce(x, 0, group=group)
        dist.barrier(group=group)
        dist.all_to_all_single(torch.empty(4 * world), torch.ones(4 * world), group=group)
        dist.gather(x, parts if dist.get_rank(group) == 0 else None, 0, group=group)


def record(name: str, folder: str) -> None:
    """Runs a case until it ends or its time is out, and dumps."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    rank = dist.get_rank()
    limit = timedelta(seconds=TIME_OUT_S)
    groups = [dist.new_group(timeout=limit, group_desc=desc) for desc in ("tp", "dp")]
    with contextlib.suppress(RuntimeError):
        CASES[name](rank, groups)
    dump = json.loads(_dump_fr_trace_json())
    Path(folder, f"fr_trace_{rank}.json").write_text(json.dumps(dump))


CASES: dict[str, Case] = {
    case.__name__: case for case in (left_behind, opposite_order, another_dtype, another_kind, sound)
}
VERDICTS = {
    "left_behind": (3, "missing", "rank 1 did not issue broadcast [3] Float, number 2 of group 1"),
    "opposite_order": (2, "cycle", "ranks 0 and 1 wait for each other"),
    "another_dtype": (2, "mismatch", "disagree on the element type of number 2"),
    "another_kind": (4, "mismatch", "disagree on the kind of number 2: rank 2 against"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_on_a_real_hang(name: str, fresh: Pool, tmp_path: Path) -> None:
    world, kind, says = VERDICTS[name]
    fresh(world).run(record, name, str(tmp_path), replace=True)
    report = interlace.check_recorded(tmp_path)
    assert report.kinds() == {kind}, report
    assert any(says in one.message for one in report.findings), report


def test_a_real_run_that_ends(fresh: Pool, tmp_path: Path) -> None:
    fresh(3).run(record, "sound", str(tmp_path), replace=True)
    report = interlace.check_recorded(tmp_path)
    assert report.complete, report
    assert report.num_ops >= 3 * 2 * 6 and report.num_ranks == 3
