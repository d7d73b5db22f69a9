"""The ranks of a benchmark: one process each, on gloo alone or with a GPU and NCCL.

    with join("cuda", time_out_s=600) as ranks:
        x = torch.ones(8, device=ranks.device)
        slowest = max(note["s"] for note in ranks.exchange({"s": 0.01}))

Whatever hangs ends by itself: after `time_out_s` the process prints where its threads are and ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import Board
from interlace.errors import BackendError, TeamError
from interlace.launch import joined

WAIT_S = 60.0
"""How long ranks wait for one another before they give up."""
Note = dict[str, Any]


@dataclass(slots=True)
class Ranks:
    """This rank and its peers."""

    me: int
    size: int
    device: torch.device
    group: dist.ProcessGroup
    board: Board
    _met: int = 0
    _tick: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    _device_tick: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    @property
    def cuda(self) -> bool:
        """Whether the ranks have GPUs."""
        return self.device.type == "cuda"

    def exchange(self, note: Note, wait_s: float = WAIT_S) -> list[Note]:
        """Every rank's note, by rank. All ranks call it, in the same order."""
        everyone = range(self.size)
        return self.board.exchange(self.topic("meet"), everyone, self.me, note, wait_s)

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
        dist.all_reduce(self._tick)
        if self.cuda:
            dist.all_reduce(self._device_tick)

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.cuda:
            torch.cuda.synchronize()


class Alone(Ranks):
    """One rank with nobody to meet, for what is measured on one device."""

    def __init__(self, device: torch.device) -> None:
        self.me, self.size, self.device = 0, 1, device

    def exchange(self, note: Note, wait_s: float = WAIT_S) -> list[Note]:
        """The note."""
        return [note]

    def align(self) -> None:
        """Waits for the device."""
        self.synchronize()


def default_world(device: str) -> int:
    """How many ranks a benchmark has that runs alone."""
    return torch.cuda.device_count() if device == "cuda" else 2


def pick_device(device: str) -> str:
    """`auto` is a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise BackendError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendError("--device cuda: torch sees no GPU here; take --device cpu")
    return device


@contextlib.contextmanager
def join(device: str, time_out_s: float) -> Iterator[Ranks]:
    """Joins the default process group, as torchrun or `launch` says."""
    with joined(device, timedelta(seconds=2 * WAIT_S), time_out_s) as where:
        yield here(where)


def register_in_graphs() -> None:
    """NCCL's own default in captures, for all: rivals have it, and so do ours beside them."""
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "1")


def here(device: torch.device) -> Ranks:
    """The ranks of the default process group, which is there. All of them call it."""
    if dist.get_world_size() < 2:
        raise TeamError(
            "a benchmark of overlap needs two ranks at least: --world 2 --device cpu runs anywhere"
        )
    store = dist.distributed_c10d._get_default_store()
    world = dist.group.WORLD
    assert world is not None
    board = Board(store, "interlace/bench")
    generation = board.count(f"joined/{dist.get_rank()}")
    ranks = Ranks(
        *(dist.get_rank(), dist.get_world_size(), device, world),
        Board(store, f"interlace/bench/{generation}"),
        _device_tick=torch.zeros(1, device=device),
    )
    ranks.align()
    return ranks
