"""The memory of temporaries: one arena of the process for each device, shared by all Executors.
(Captured graphs have theirs in the pool of graphs.)

    arena = arena_of(device)
    arena.hold(nbytes)                  # an Executor was prepared that needs so many bytes
    arena.enter(values)                 # a run begins: its table has views of memory of its own
    arena.leave(values)                 # it has been issued
    arena.let_go(nbytes)                # the Executor was closed; with the last one the memory goes

Note [Who has the arena]
    An arena is one run's at a time. A run takes further memory, for itself alone, where another
    thread is amid a run, or where the device has not ended the last run, which was on another
    stream. It never waits for such a run: ranks may issue runs of different teams in different
    orders, and would wait for one another. On one stream, runs follow each other anyway.

Note [When an arena is replaced]
    Where an Executor needs more bytes, or the one that needed most has gone, the next run replaces
    the storage. The old one is emptied at once, so views that idle Executors have of it keep
    nothing alive. A table whose views are of another storage than the arena's makes them anew when
    its next run begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from interlace.runtime.values import ValueTable, new_storage

Last = tuple[int, Any, Any]
"""A run on a GPU: its stream, the event of its end, and the `Marks` that have the event."""


class Arena:
    """Memory that one run at a time has its temporaries in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storage = new_storage(0, device)
        self.last: Last | None = None
        """The last run that had the memory, on a GPU."""
        self._needs: list[int] = []
        self._shrinks = False
        """True since an Executor went, which may have been the one that needed most."""
        self._user: dict[str, object] = {}
        """Under "run", who has the memory: the table of a run, or the arena while it is emptied.
        `setdefault` is one step, also for threads and for the garbage collector."""

    def hold(self, nbytes: int) -> None:
        """An Executor was prepared that needs this many bytes."""
        self._needs.append(nbytes)

    def let_go(self, nbytes: int) -> None:
        """An Executor that needed this many bytes was closed, and its runs have ended."""
        self._needs.remove(nbytes)
        self._shrinks = True
        if not self._needs and self._user.setdefault("run", self) is self:
            self._replace(0)
            self._user.clear()

    def enter(
        self, values: ValueTable, stream: int = 0, follows: Callable[[Last], bool] | None = None
    ) -> None:
        """Gives a run its memory: Note [Who has the arena]. `follows` tells of the last run on
        another stream whether the run comes after it."""
        if self._user.setdefault("run", values) is values:
            last = self.last
            if last is None or last[0] == stream or (follows is not None and follows(last)):
                if values.arena is not self.storage or self._shrinks:
                    self._fit(values)
                return
            self._user.clear()
        values.move(new_storage(values.nbytes, self.device))

    def leave(self, values: ValueTable, last: Last | None = None) -> None:
        """A run has been issued: others may use its memory after it."""
        if self._user.get("run") is values:
            self.last = last
            self._user.clear()
        else:
            values.move(new_storage(0, self.device))

    def abandon(self) -> None:
        """Leaves the memory to a run that may never end."""
        self.storage, self.last = new_storage(0, self.device), None

    def _fit(self, values: ValueTable) -> None:
        """Gives a run the memory, which is replaced where it does not fit all needs."""
        if self._shrinks or self.storage.nbytes() < values.nbytes:
            self._shrinks = False
            self._resize(max([values.nbytes, *self._needs]))
        if values.arena is not self.storage:
            values.move(self.storage)

    def _resize(self, nbytes: int) -> None:
        if nbytes == self.storage.nbytes():
            return
        if self.device.type == "cuda":  # the allocator may have it of another stream
            whole = torch.empty(0, dtype=torch.uint8, device=self.device)
            whole.set_(self.storage)  # pyright: ignore
            whole.record_stream(torch.cuda.current_stream(self.device))
        self._replace(nbytes)

    def _replace(self, nbytes: int) -> None:
        self.storage.resize_(0)
        self.storage = new_storage(nbytes, self.device)


@cache
def arena_of(device: torch.device) -> Arena:
    """The arena of a device."""
    return Arena(device)
