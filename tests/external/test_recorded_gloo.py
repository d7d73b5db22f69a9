"""Real runs on gloo that hang: each rank dumps what torch recorded, and the verdict is right."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as bound
import torch.distributed as dist
from tests.support.pool import Pool
from torch.distributed import distributed_c10d as c10d

import interlace
from interlace.errors import RecordingError

Case = Callable[[int, list[dist.ProcessGroup]], None]
TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pool]:
    """Ranks of this module alone: a recorder keeps what earlier tests did."""
    pool = Pool()
    yield pool
    pool.close()


def made(desc: str) -> dist.ProcessGroup:
    group = dist.new_group(timeout=timedelta(seconds=60), group_desc=desc)
    assert isinstance(group, dist.ProcessGroup)
    return group


def about_to_hang(groups: list[dist.ProcessGroup]) -> None:
    """All ranks have come this far; from here on what waits ends soon."""
    dist.barrier()
    for group in groups:
        c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)


def reduces(group: dist.ProcessGroup, size: int = 4, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.ones(size, dtype=dtype), group=group)


def left_behind(rank: int, groups: list[dist.ProcessGroup]) -> None:
    reduces(groups[0], 8)
    about_to_hang(groups)
    if rank != 1:
        dist.broadcast(torch.ones(3), 0, group=groups[0])


def another_dtype(rank: int, groups: list[dist.ProcessGroup]) -> None:
    """Does not hang: as many bytes, and sums of nonsense."""
    reduces(groups[0])
    reduces(groups[0], 4, torch.int32 if rank == 1 else torch.float32)


def default_group(rank: int, groups: list[dist.ProcessGroup]) -> None:
    about_to_hang([*groups, c10d._get_default_group()])
    if rank == 0:
        dist.all_reduce(torch.ones(4))


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


def dump() -> bytes:
    return getattr(bound, "_dump_fr_trace_json")()  # noqa: B009


def record(name: str, folder: str) -> None:
    """Runs a case until it ends or its time is out, and dumps."""
    rank = dist.get_rank()
    groups = [made(desc) for desc in ("tp", "dp")]
    with contextlib.suppress(RuntimeError):
        CASES[name](rank, groups)
    deadline = time.monotonic() + 10
    while b'"retired":false' in dump() and time.monotonic() < deadline:
        time.sleep(0.01)  # another thread says that an op has ended
    raw = Path(folder, "raw")
    raw.mkdir(exist_ok=True)
    (raw / f"fr_trace_{rank}").write_bytes(dump())
    interlace.save_recording(Path(folder, "saved"))


CASES: dict[str, Case] = {
    case.__name__: case for case in (left_behind, another_dtype, default_group, sound)
}
VERDICTS = {
    "left_behind": (3, "missing", "rank 1 did not issue broadcast [3] Float, number 2 of group 1"),
    "another_dtype": (2, "mismatch", "disagree on the element type of number 2"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_on_a_real_hang(name: str, fresh: Pool, tmp_path: Path) -> None:
    world, kind, says = VERDICTS[name]
    fresh(world).run(record, name, str(tmp_path), replace=True)
    report = interlace.check_recorded(tmp_path / "saved")
    assert report.kinds() == {kind}, report
    assert any(says in one.message for one in report.findings), report
    assert not report.assumed
    with pytest.raises(RecordingError, match=r"which ranks group [12] .* has .*save_recording"):
        interlace.check_recorded(tmp_path / "raw")


def test_a_real_run_that_ends(fresh: Pool, tmp_path: Path) -> None:
    fresh(3).run(record, "sound", str(tmp_path), replace=True)
    report = interlace.check_recorded(tmp_path / "saved")
    assert report.sound, report
    assert (report.num_ops, report.num_ranks) == (3 * 2 * 7, 3)


def test_torch_s_own_dump_of_the_default_group(fresh: Pool, tmp_path: Path) -> None:
    """gloo does not record a group's ranks; those of the default group are all ranks."""
    fresh(2).run(record, "default_group", str(tmp_path), replace=True)
    report = interlace.check_recorded(tmp_path / "raw")
    assert report.kinds() == {"missing"}, report
    assert any("do not say which ranks" in one for one in report.assumed)


def watch(folder: str) -> None:
    """A rank whose host sleeps while its peers wait; each is recorded from a thread."""
    group = made("tp")
    timer = threading.Timer(0.3, interlace.save_recording, [folder])
    timer.start()
    if dist.get_rank() == 1:
        sleep_until_saved(folder)
    reduces(group)
    timer.join()


def sleep_until_saved(folder: str) -> None:
    deadline = time.monotonic() + 30
    while len(list(Path(folder).glob("trace_rank_*.json"))) < 3:
        assert time.monotonic() < deadline, "a rank saved nothing"
        time.sleep(0.05)


def test_a_thread_records_while_the_run_hangs(fresh: Pool, tmp_path: Path) -> None:
    fresh(3).run(watch, str(tmp_path), replace=True)
    report = interlace.check_recorded(tmp_path)
    (finding,) = report.findings
    assert finding.missing == (1,)
    assert finding.waiting == (0, 2)
    last = finding.ops[-1]
    assert last.rank == 1
    assert "its host is at sleep_until_saved (" in last.role


SUM = """
def total(tp: Team[2], x: f32[4]):
    y = empty(f32[4])
    main: all_reduce(x, y, reduce="sum", team=tp, backend="gloo")
    return y
"""


def runs_a_schedule(folder: str) -> None:
    """A schedule's sum by gloo, for which Interlace connects a group of its own; then a hang."""
    executor = interlace.Executor(interlace.parse(SUM), groups={"tp": made("tp")})
    with executor.prepare() as prepared:
        (total,) = prepared.run([torch.ones(4)])
        assert total.tolist() == [2.0] * 4
        group = made("dp")
        about_to_hang([group])
        if dist.get_rank() == 0:
            with contextlib.suppress(RuntimeError):
                reduces(group)
        interlace.save_recording(folder)


def test_sums_of_schedules_are_recorded(fresh: Pool, tmp_path: Path) -> None:
    fresh(2).run(runs_a_schedule, str(tmp_path), replace=True)
    report = interlace.check_recorded(tmp_path)
    assert report.kinds() == {"missing"}, report
    assert "interlace/" in "".join(p.read_text() for p in tmp_path.iterdir())


def test_nothing_is_saved_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(interlace.InterlaceError, match="there is no process group"):
        interlace.save_recording(tmp_path)
