"""The ranks of a benchmark: processes of our own or torchrun's, on gloo, on GPUs also on NCCL.

    report = run(overlap.work, OverlapSettings(device="cpu"), world=4)

    def work(settings, ranks, tell):        # on every rank; rank 0's result is the report
        x = torch.ones(8, device=ranks.device)
        slowest = max(note["s"] for note in ranks.exchange({"s": 0.01}))

Alone, `run` starts a rank for each GPU (two on a CPU) and ends them all, whatever happens. Under
torchrun this process is a rank already. A rank that hangs ends by itself: after its time-out it
prints the stacks of its threads and ends.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from interlace.comm import Board
from interlace.comm.mirror import MirrorGroup
from interlace.comm.teams import host
from interlace.errors import BackendError, TeamError
from interlace.launch import Report, Tell, joined, launch
from interlace.torch_private import default_store
from interlace_bench.mirror import mirror
from interlace_bench.rows import append

if TYPE_CHECKING:
    from interlace_bench.settings import BenchSettings

WAIT_S = 60.0
"""Seconds that ranks wait for one another before they give up."""
Note = dict[str, Any]


@dataclass(slots=True)
class Ranks:
    """This rank and its peers."""

    me: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    board: Board
    hosts: tuple[tuple[int, ...], ...] = ()
    """Which of them are on each host, where there are several."""
    _met: int = 0
    _tick: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    _device_tick: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    @property
    def cuda(self) -> bool:
        """True if the ranks have GPUs."""
        return self.device.type == "cuda"

    def exchange(self, note: Note, wait_s: float = WAIT_S) -> list[Note]:
        """Every rank's note, by rank. All ranks call it, in the same order."""
        return self.board.exchange(self.topic("meet"), note, wait_s)

    def topic(self, what: str) -> str:
        """A name that all ranks give to their next meeting, and to no other."""
        self._met += 1
        return f"{self._met}/{what}"

    def agree(self, problem: str | None) -> str | None:
        """The first problem that a rank has, on all ranks."""
        told = self.exchange({"problem": problem})
        found = [(rank, note["problem"]) for rank, note in enumerate(told) if note["problem"]]
        return f"rank {found[0][0]}: {found[0][1]}" if found else None

    def maximum(self, values: list[float]) -> list[float]:
        """Elementwise maximum over the ranks."""
        columns = zip(*(note["values"] for note in self.exchange({"values": values})), strict=True)
        return [max(column) for column in columns]

    def align(self) -> None:
        """Returns on all ranks at about the same time; on GPUs, work issued next starts together.

        The hosts meet on gloo; the devices in a tiny collective on the current stream.
        """
        if self.cuda:
            torch.cuda.synchronize()
        dist.all_reduce(self._tick, group=self.group)
        if self.cuda:
            dist.all_reduce(self._device_tick, group=self.group)

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.cuda:
            torch.cuda.synchronize()

    def within(self) -> Ranks:
        """The ranks of this rank's host, as ranks of their own. All ranks call it together."""
        if not self.hosts:
            return self
        groups: list[Any] = [dist.new_group([*host]) for host in self.hosts]  # all make each
        ((mine, group),) = [e for e in zip(self.hosts, groups, strict=True) if self.me in e[0]]
        board, tick = _board(mine, self.me), self._device_tick
        at = mine.index(self.me)
        return Ranks(at, len(mine), self.device, group, board, _device_tick=tick)


Work = Callable[[Any, Ranks, Tell], Report | None]
"""A benchmark, on one rank: its settings, the ranks, and who hears of progress and rows."""


def run(work: Work, settings: BenchSettings, world: int | None = None) -> Report | None:
    """Rank 0's report; None on other ranks of torchrun. By default a rank for each GPU, or two."""
    started = "WORLD_SIZE" in os.environ  # by torchrun
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else world or 1
    device = pick_device(settings.device, on_this_host)
    size = world or (torch.cuda.device_count() if device == "cuda" else 2)
    size = int(os.environ["WORLD_SIZE"]) if started else size
    if getattr(settings, "mirror", None) is not None:
        if started:
            raise TeamError("--mirror is one process as all ranks: start it without torchrun")
        size = 1
    elif size < settings.least_ranks:
        raise TeamError(f"{size} rank: a benchmark needs two at least; --device cpu runs anywhere")
    each = functools.partial(on_rank, work, device)
    if not started:
        return launch(each, settings, size, progress(settings), settings.timeout, settings.what)
    first = os.environ["RANK"] == "0"
    return each(settings, progress(settings) if first else lambda event: None)


def on_rank(work: Work, device: str, settings: BenchSettings, tell: Tell) -> Report | None:
    """Runs a benchmark as one rank, in the default process group of torchrun or `launch`."""
    if settings.as_rivals:  # not where `auto` learns what users' runs take
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "1")  # NCCL's default, which rivals have
    limit, exact = timedelta(seconds=2 * WAIT_S), settings.exact
    mirrored = getattr(settings, "mirror", None)
    own = None if mirrored is None else mirror(mirrored)
    with joined(device, limit, settings.timeout, exact=exact, own=own) as where:
        return work(settings, here(where), tell)


def several_hosts() -> bool:
    """True if torchrun started ranks on other hosts as well."""
    size = os.environ.get("WORLD_SIZE")
    return os.environ.get("LOCAL_WORLD_SIZE", size) != size


def pick_device(device: Literal["auto", "cpu", "cuda"], ranks: int = 1) -> Literal["cpu", "cuda"]:
    """`auto` is a GPU where this host has one for each of its ranks."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendError("--device cuda: torch sees no GPU here; take --device cpu")
    return device


def progress(settings: BenchSettings) -> Tell:
    """Appends the rows that a benchmark tells to a file, as they come, and shows its steps where it
    is to be `verbose`."""
    begun = time.monotonic()

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "rows" and settings.path is not None:
            append(settings.path, event["rows"])  # what was measured stays, whatever comes next
        if "doing" in event and settings.verbose:
            since = time.monotonic() - begun
            print(f"[{since:6.1f} s] {event['doing']}", file=sys.stderr, flush=True)

    return hear


def here(device: torch.device) -> Ranks:
    """The ranks of the default process group, which is there. All of them call it."""
    world = dist.group.WORLD
    assert world is not None
    me, size = dist.get_rank(), dist.get_world_size()
    board, tick = _board(range(size), me), torch.zeros(1, device=device)
    ranks = Ranks(me, size, device, world, board, _device_tick=tick)
    ranks.align()
    places = [note["host"] for note in ranks.exchange({"host": host()})]
    if len({*places}) > 1:
        ranks.hosts = tuple(
            tuple(rank for rank, place in enumerate(places) if place == name)
            for name in dict.fromkeys(places)
        )
    return ranks


def _board(members: Sequence[int], me: int) -> Board:
    """Where these ranks meet; each of them makes one."""
    store = default_store()
    generation = Board(store, (), me, "interlace/bench").count(f"joined/{me}")
    prefix = f"interlace/bench/{generation}/{members[0]}"
    mirrors = members if isinstance(dist.group.WORLD, MirrorGroup) else ()
    return Board(store, members, me, prefix, mirrors=mirrors)
