"""The device side of a team: words, slots, and the hand-over from one run to the next.

    side = team.cuda(device, timeout_s=60)        # all ranks, together, at the first Program
    number = side.enter()                          # this rank issues its next run

Note [Two runs apart]
    Run n uses copy n % 2 of every slot, so whoever writes into peers' memory in run n first waits
    until all ranks have ended run n - 2. That is all that runs need between them: no run ends with
    a barrier. A run that awaits a signal of every other rank is `closed`: those ranks had begun it,
    so they had ended the one before, and the next run has nothing left to wait for.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import CudaSlotPool, own_memory, share_memory
from interlace.comm.cuda.words import (
    HEAP_NBYTES,
    RELEASED,
    Area,
    CudaSpace,
    WordAccess,
    WordHeap,
    area_nbytes,
    reached,
)
from interlace.comm.rendezvous.patience import Patience
from interlace.errors import BackendError, CommTimeoutError

REST_S = 10.0
"""Time for abandoned driver calls to return, once the device is done."""

if TYPE_CHECKING:
    from interlace.comm.teams import TeamComm


class CudaSide:
    def __init__(self, team: TeamComm, device: torch.device, timeout_s: float) -> None:
        self.team = weakref.proxy(team)
        self.device = device
        self.size, self.me = team.size, team.me
        self.driver = Driver()
        topic = f"{team.topic}/cuda"
        place = f"{topic}/{team.num_prepared}/words"
        self.shares_gpu = False
        """True if another rank of the team is on this GPU: copies to it need a processor."""
        if team.apart:  # nothing reaches into peers' memory: `refuse_memory`
            memory = own_memory(self.driver, self.me, self.size, HEAP_NBYTES, timeout_s)
        else:
            memory = share_memory(self.driver, team.board, place, HEAP_NBYTES, timeout_s)
            mine = str(torch.cuda.get_device_properties(device).uuid)
            told = team.board.exchange(f"{place}/gpu", {"gpu": mine}, timeout_s)
            self.shares_gpu = [note["gpu"] for note in told].count(mine) > 1
        self.heap = WordHeap(self.driver, memory)
        self.access = WordAccess(self.driver)
        """For words while runs are under way, which may hold up the driver."""
        self.slots = CudaSlotPool(self.driver, team.board, f"{topic}/slots", device)
        self.run = 0
        """Runs that this rank has issued, of Programs that reach into peers' memory."""
        first = self._ended = self.heap.take(self.size)  # the first words on every rank alike
        others = [m for m in range(self.size) if m != self.me and memory.bases[m]]
        self.told = [self.heap.address(m, first + team.seen_by(m)) for m in others]
        """The peers' words that say which run this rank has ended,"""
        self.heard = [self.heap.address(self.me, first + member) for member in others]
        """and this rank's words that say which they have."""
        self.last: tuple[int, int] | None = None
        """The stream of this rank's last run, and the event of its end."""
        self.teller: int | None = None
        """The stream that told the peers of the last run's end."""
        self.generation = 0
        self._lock = threading.RLock()  # the garbage collector may end an Executor in it
        self.closed = 0
        self.areas: list[Area] = []
        """The exchanges' staging memory; Executors made before a larger one came keep theirs."""
        self.spaces: weakref.WeakSet[CudaSpace] = weakref.WeakSet()

    def ensure_area(
        self,
        topic: str,
        needed: int,
        flag_nbytes: int,
        words_nbytes: int,
        stop_at: int,
        timeout_s: float,
    ) -> None:
        """Staging memory for exchanges, of the size that any rank needs. All ranks call this."""
        board, place = self.team.board, f"{self.team.topic}/area/{topic}"
        notes = board.exchange(f"{place}/need", {"needed": needed}, timeout_s)
        most = max(int(note["needed"]) for note in notes)
        if not most or (self.areas and self.areas[-1].stage_nbytes >= most):
            return
        stage = area_nbytes(most)
        nbytes = stage + flag_nbytes + words_nbytes
        memory = share_memory(self.driver, board, place, nbytes, timeout_s)
        self.areas.append(Area(memory, stage, flag_nbytes, words_nbytes, stop_at))

    @property
    def the_area(self) -> Area:
        return self.areas[-1]

    def enter(self) -> int:
        self.run += 1
        return self.run

    def late(self, behind: int) -> list[int]:
        """The members that have not ended the run before last, seen from `behind` runs ago."""
        due = self.run - behind - 2
        address = self.heap.address(self.me, self._ended)
        words = self.access.read(address, self.size)
        return [
            member
            for member, word in enumerate(words)
            if member != self.me and not reached(word, due)
        ]

    def release(self, generation: int) -> None:
        """Lets go of every stream and kernel that waits for a peer, but not after a reset."""
        with self._lock:
            if generation != self.generation:
                return
            address = self.heap.address(self.me, self._ended)
            with contextlib.ExitStack() as each:  # also after one that fails
                for area in self.areas:
                    each.callback(area.stop, self.access)
                for space in list(self.spaces):
                    each.callback(space.release)
                each.callback(self.access.fill, address, self.run + RELEASED, self.size)

    def finish(self, well: Callable[[], bool], timeout_s: float) -> None:
        """Waits for the end of what this rank has under way, while all goes well."""
        deadline = time.monotonic() + timeout_s
        while self.last is not None and well() and not self.driver.done(self.last[1]):
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def drain(self, timeout_s: float) -> None:
        """After a failure: lets go of all that this rank has under way, and waits for its end."""
        patience, why = Patience(timeout_s), ""
        while self.last is not None and not self.driver.done(self.last[1]):
            if patience.is_over():
                raise CommTimeoutError(
                    f"the device of rank {self.team.rank} is not done {timeout_s:g} s after a "
                    f"failure: end this process{why}"
                )
            try:
                self.release(self.generation)
            except BackendError as error:
                why = f" ({error})"
            time.sleep(0.01)

    def reset(self) -> None:
        """As if nothing had run; all streams are done, a barrier of all ranks stands around it."""
        with self._lock:
            self.access.rest(REST_S)
            self.generation += 1
            self.run = self.closed = 0
            self.teller = None
            self.driver.fill(self.heap.address(self.me, self._ended), 0, self.size)
            for space in list(self.spaces):
                space.reset()
            for area in self.areas:
                area.reset()
