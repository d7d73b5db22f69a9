"""Segments, counters and waits: what they promise, with real processes where it takes two."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Died, Pool

from interlace.comm import (
    BoundedWait,
    Segment,
    SlotPool,
    Spec,
    bind_collective,
    fence,
    stamp,
    team_of,
)
from interlace.comm.backends import cut
from interlace.comm.host import shared_memory
from interlace.comm.host.shared_memory import default_folder, share
from interlace.comm.rendezvous.board import Board
from interlace.comm.rendezvous.liveness import PeerProcess, identity
from interlace.errors import (
    AgreementError,
    BackendError,
    CommTimeoutError,
    InterlaceError,
    PeerError,
    SharedMemoryError,
)


def left_over(pid: int) -> list[str]:
    """The names of segments that a process left; other test runs on this host have theirs."""
    return [path.name for path in default_folder().glob(f"interlace-{pid}-*")]


def test_a_segment_is_zeros_until_written_and_shared_afterwards() -> None:
    mine = Segment.create(10_000)
    theirs = Segment.open(mine.path, mine.nbytes)
    mine.unlink()
    mine.unlink()
    assert mine.nbytes % 4096 == 0
    assert not mine.bytes(0, 10_000).any()
    theirs.bytes(128, 64).view(torch.float32).fill_(2.5)
    assert mine.bytes(128, 64).view(torch.float32).eq(2.5).all()
    mine.cells[0] = 2**63
    assert theirs.cells[0] == 2**63
    kept = theirs.bytes(128, 4).view(torch.float32)
    del mine, theirs
    assert kept.item() == 2.5, "a tensor keeps its memory mapped"


def test_a_segment_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match=r"needs 1 PiB|needs 1024 TiB"):
        Segment.create(2**50)
    with pytest.raises(BackendError, match="--ipc=host"):
        Segment.open(str(tmp_path / "absent"), 4096)
    assert left_over(os.getpid()) == []


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_keeps_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    mine = [Segment.create(4096, tmp_path) for _ in range(8)]
    theirs = [Segment.open(segment.path, 4096) for segment in mine]
    assert descriptors() == before
    mine[3].cells[1] = 5
    assert theirs[3].cells[1] == 5


REFUSED = [
    ("open", errno.EMFILE, "ulimit -n"),
    ("statvfs", errno.EROFS, "remount,rw"),
    ("posix_fallocate", errno.ENOSPC, "too little shared memory"),
    ("posix_fallocate", errno.EFBIG, "ulimit -f"),
    ("listdir", errno.EIO, "working tmpfs"),
    ("map", errno.ENOMEM, "too little shared memory"),
    ("inodes", errno.ENOSPC, "nr_inodes"),
]


@pytest.mark.parametrize(("what", "code", "fix"), REFUSED)
def test_whatever_the_system_refuses_is_one_error(
    what: str, code: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    def no_inodes(_: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=1000, f_frsize=4096, f_favail=0)

    with monkeypatch.context() as patch:
        if what == "map":
            patch.setattr(shared_memory, "_mapped", refuse)
        elif what == "inodes":
            patch.setattr(os, "statvfs", no_inodes)
            patch.setattr(os, "open", refuse)
        else:
            patch.setattr(os, what, refuse)
        with pytest.raises(SharedMemoryError, match=fix):
            Segment.create(4096, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wait_returns_when_ready_and_else_says_what_it_was() -> None:
    wait = BoundedWait(0.2, lambda: "rank 0, `expect(ready, 1)`", log=lambda: "main: done")
    wait.until(lambda: True)
    start = time.monotonic()
    with pytest.raises(CommTimeoutError) as caught:
        wait.until(lambda: False, lambda: "waiting for rank 1")
    assert 0.15 < time.monotonic() - start < 2
    for words in ("no progress in 0.2 s", "expect(ready, 1)", "waiting for rank 1", "main: done"):
        assert words in str(caught.value)


def test_a_wait_ends_when_its_check_raises() -> None:
    def check() -> None:
        if time.monotonic() - start > 0.05:
            raise PeerError("rank 1 died")

    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 died"):
        BoundedWait(30, lambda: "", check).until(lambda: False)
    assert time.monotonic() - start < 5


class SlowWork:
    """A transfer that is done, well or not, when it has been looked at some times."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.looks = 0

    def wait(self, limit: timedelta | None = None) -> None:
        assert self.looks == 3
        if self.fails:
            raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        self.looks = min(self.looks + 1, 3)
        return self.looks == 3


def test_a_transfer_that_is_done_raises_its_own_error() -> None:
    wait = BoundedWait(5.0, lambda: "all_reduce")
    good: Any = SlowWork(fails=False)
    bad: Any = SlowWork(fails=True)
    wait.finish(good)
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait.finish(bad)


def test_a_wait_is_not_over_while_there_is_progress() -> None:
    steps = iter(range(1000))
    wait = BoundedWait(0.2, lambda: "event", progress=lambda: next(steps) // 2 if going else 0)
    going, start = True, time.monotonic()
    wait.until(lambda: time.monotonic() - start > 0.6)
    going = False
    with pytest.raises(CommTimeoutError, match=r"no progress in 0\.2 s"):
        wait.until(lambda: False)


def test_stamps_grow_with_runs_and_then_with_values() -> None:
    stamps = [stamp(run, value) for run in range(4) for value in (0, 1, 7, 2**24 - 1)]
    assert stamps == sorted(set(stamps))
    with pytest.raises(AssertionError):
        stamp(1, 2**24)


def test_a_process_is_alive_until_it_ends() -> None:
    assert PeerProcess.of(*identity()).alive()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    life = PeerProcess.of(child.pid, started)
    assert life.alive()
    child.kill()
    deadline = time.monotonic() + 10
    while life.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not life.alive(), "it ended, though nobody has collected it yet"
    child.wait()
    life.close()
    assert PeerProcess.of(child.pid, started).alive(), "what cannot be seen counts as alive"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
def test_a_forgotten_watcher_leaves_no_descriptor() -> None:
    before = descriptors()
    lives = [PeerProcess.of(*identity()) for _ in range(8)]
    assert all(life.alive() for life in lives)
    if descriptors() == before:
        pytest.skip("this system lets no process be watched")
    del lives
    assert descriptors() == before


def test_a_process_whose_entry_cannot_be_read_counts_as_alive() -> None:
    """So it is where this process may open no more files."""
    me = identity()
    with mock.patch("interlace.comm.rendezvous.liveness._stat", return_value=[]):
        assert PeerProcess.of(*me).alive()


def ping_pong(rounds: int, seed: int) -> bool:
    """Ranks pass data through a segment, guarded by counters alone, without a lock."""
    me, world = dist.get_rank(), dist.get_world_size()
    board = Board(dist.distributed_c10d._get_default_store(), range(world), me, f"ping-{seed}")
    shared = share(board, "x", 1 << 16, {}, 20.0)
    data = [segment.bytes(4096, 8000).view(torch.int64) for segment in shared.segments]
    cells = [segment.cells for segment in shared.segments]
    wait = BoundedWait(20.0, lambda: "ping-pong")
    ahead = (me + 1) % world
    generator = random.Random(seed + me)
    good = True
    for turn in range(1, rounds + 1):
        data[me].fill_(turn * 10 + me)
        fence()
        cells[me][0] = turn
        if generator.random() < 0.2:
            time.sleep(generator.random() * 0.002)
        wait.until(lambda turn=turn: cells[ahead][0] >= turn)
        good &= bool(data[ahead].eq(turn * 10 + ahead).all())
        cells[ahead][1] = turn
        wait.until(lambda turn=turn: cells[me][1] >= turn)
    return good


@pytest.mark.parametrize("world", [2, 4])
def test_data_behind_a_counter_is_whole(pool: Pool, world: int, seed: int) -> None:
    assert pool(world).run(ping_pong, 300, seed) == [True] * world


def share_without_descriptors(poor: int, left: int) -> tuple[str, str, float, list[str]]:
    """One rank may open `left` more files; its own segment takes one, and each peer's."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    board = Board(store, range(3), me, f"poor-{left}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    started, spare, kind, text = time.monotonic(), list[int](), "shared", ""
    if me == poor:
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 9
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        for _ in range(left):
            os.close(spare.pop())
    try:
        share(board, "x", 4096, {}, 20.0)
    except InterlaceError as error:
        kind, text = type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in spare:
            os.close(descriptor)
    return kind, text, time.monotonic() - started, left_over(os.getpid())


@pytest.mark.parametrize("left", [0, 1])
def test_all_ranks_hear_at_once_that_one_may_open_no_more_files(pool: Pool, left: int) -> None:
    """A descriptor is enough, one after another; without any it is told."""
    for rank, found in enumerate(pool(3).run(share_without_descriptors, 1, left)):
        kind, text, seconds, names = found
        assert kind == ("shared" if left else "SharedMemoryError"), text
        assert left or ("rank 1: " in text) == (rank != 1)
        assert left or "Too many open files" in text
        assert seconds < 5
        assert names == []


def leave_names(folder: str) -> None:
    """A process that is killed when it has created segments, before its peers have them."""
    for _ in range(2):
        Segment.create(4096, Path(folder))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_goes_with_the_next_segment(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool(1).run(leave_names, str(tmp_path), may_die={0}) == [Died(-signal.SIGKILL)]
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2
    other = tmp_path / "interlace-1-abc-of another container"
    for path in (other, tmp_path / "interlace-notes"):
        path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "namespace", lambda: 0)
        Segment.create(4096, tmp_path).unlink()
    assert set(left) < set(tmp_path.iterdir()), "where ids say nothing, nothing goes"
    mine = [Segment.create(4096, tmp_path) for _ in range(2)]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {other.name, "interlace-notes", *(Path(m.path).name for m in mine)}
    for segment in mine:
        segment.unlink()


def share_alone() -> str:
    board = Board(dist.distributed_c10d._get_default_store(), (0, 1), 0, "alone")
    if dist.get_rank() == 1:
        return "away"
    try:
        share(board, "x", 4096, {}, 0.5)
    except AgreementError as error:
        return f"{error} {left_over(os.getpid())}"
    return "shared"


def test_a_rank_that_does_not_come_to_share_is_named(pool: Pool) -> None:
    text, _ = pool(2).run(share_alone)
    assert "rank 1 did not come to 'memory' within 0.5 s" in text
    assert text.endswith(" []"), "the segment has no name any more"


def push(seed: int, takes: int) -> list[int]:
    """Rank 0 writes into rank 1's copies, as fast as it may; what rank 1 found, slowly."""
    group = dist.group.WORLD
    assert group is not None
    team = team_of(group, "tp")
    team.setup(20.0)
    pool = SlotPool(team.board, f"push-{seed}")
    slot = pool.ensure("1", {"s": 64}, 20.0)["s"]
    wait = BoundedWait(20.0, lambda: "take")
    generator, found = random.Random(seed), []
    for number in range(takes):
        take, slot.takes = slot.takes, slot.takes + 1
        slot.take(take, wait, team.control.where)
        there = slot.copies[1][take % 2].view(torch.int64)
        if team.me == 0:
            there[1:].fill_(number)
            fence()
            there[0] = number + 1
        elif team.me == 1:
            wait.until(lambda t=there, n=number: int(t[0]) > n)
            time.sleep(generator.random() * 0.002)
            found.append(int(there[1:].sum()) - 7 * number)
        slot.free(take)
    return found


def test_a_slot_is_not_taken_before_all_have_freed_it(pool: Pool, seed: int) -> None:
    assert pool(3).run(push, seed, 100)[1] == [0] * 100


def break_and_mend() -> tuple[str, float]:
    """A transfer that only one rank starts breaks its connections; a reset makes new ones."""
    group = dist.group.WORLD
    assert group is not None
    team = team_of(group, "tp")
    team.setup(20.0)
    spec = Spec("all_reduce", team.size, team.me, (4,), torch.float32, "sum")
    backend = team.backend("gloo", "cpu", 20.0)
    run = bind_collective(backend, spec, 0.5)
    said = ""
    if team.me == 0:
        try:
            wait = BoundedWait(0.5, lambda: "alone", cut=partial(cut, backend))
            run(torch.ones(4), torch.empty(4), wait)
        except CommTimeoutError as error:
            said = str(error)
    team.reset(20.0)
    mended = bind_collective(team.backend("gloo", "cpu", 20.0), spec, 20.0)
    out = torch.empty(4)
    mended(torch.ones(4), out, BoundedWait(20.0, lambda: "together"))
    return said, out.sum().item()


def test_a_reset_renews_broken_connections(pool: Pool) -> None:
    results = pool(3).run(break_and_mend, replace=True)
    assert "no progress in 0.5 s" in results[0][0]
    assert [total for _, total in results] == [12.0] * 3
