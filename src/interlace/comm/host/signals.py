"""Counters that one process raises and another awaits, and the one bounded wait of this library.

A signal is a 64-bit cell of shared memory with one writer, whose values only grow: a `stamp` puts
the number of the run above the value that the Program counts from the start of the run.

    >>> wait = BoundedWait(timeout_s=5, describe=lambda: "expect(ready, 1)")
    >>> wait.until(lambda: cells[3] >= stamp(run, 1))

Note [Memory order]
    x86 keeps the order of stores, and of loads; ARM does not. Python has no fence, but its locks
    are atomic operations: an acquire, a release and an acquire of one lock order everything before
    them with everything after them. A writer calls `fence()` between its data and its stamp, a
    reader between seeing a stamp and touching the data. Tensors may be copied by stores that go
    around the cache, which no processor keeps in order; cells are not, so between cells alone
    `order_cells()` will do.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from interlace.comm.rendezvous.patience import LONGER, Errand, Patience
from interlace.errors import CommTimeoutError
from interlace.ir import VALUE_BITS

T = TypeVar("T")
Cells = memoryview | list[int]
Missing = Callable[[list[int]], str]
"""Text about those of some cells, by their numbers, that have not come to a mark."""
SPINS = 50
LONGEST_SLEEP_S = 0.001
CHECK_EVERY_S = 0.005
SLICE = timedelta(seconds=0.05)
SETTLED_S = 0.5
"""Time for a transfer that is given up to end by itself."""


def stamp(run: int, value: int) -> int:
    """The cell's content for `value` in `run`: it grows with the run, then with the value."""
    assert 0 <= value < 1 << VALUE_BITS, f"signal value {value} does not fit in {VALUE_BITS} bits"
    return run << VALUE_BITS | value


def fence() -> None:
    """Orders the memory accesses before it with those after it; see Note [Memory order]."""
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def tell(cells: Sequence[tuple[Cells, int]], mark: int) -> None:
    """Writes a mark into these cells, after everything that came before."""
    fence()
    for cell, at in cells:
        cell[at] = mark


def _nothing() -> None:
    pass


order_cells = _nothing if platform.machine().lower() in ("x86_64", "amd64") else fence
"""`fence` between cells, where nothing but cells is written or read; see Note [Memory order]."""


def _no_detail() -> str:
    return ""


@dataclass(slots=True)
class BoundedWait:
    """The wait of an op: its time-out, checks that end it early, and texts for its errors."""

    timeout_s: float
    describe: Callable[[], str]
    check: Callable[[], None] = _nothing
    """Raises when waiting has become pointless: a peer failed, or another stream of this rank."""
    log: Callable[[], str] = _no_detail
    behind: Callable[[], str] = _no_detail
    """Who may hold up a transfer that all have begun."""
    cut: Callable[[], None] = _nothing
    """Ends a transfer that this rank waits for no longer."""
    progress: Callable[[], object] = _nothing
    """State of the work that is waited for: while it changes, nothing is late."""

    def until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], str] | None = None,
        spins: int = SPINS,
    ) -> None:
        """Returns when `ready()`; raises `CommTimeoutError`, or what `check` raises. Spins, then
        sleeps for growing moments: spinning threads could keep the one that they wait for from
        running. A wait that knows what is `missing` warns of it when it takes long."""
        for _ in range(spins):
            if ready():
                return fence()
        pause, first_check = 10e-6, time.monotonic() + CHECK_EVERY_S
        while not ready():
            if time.monotonic() >= first_check:
                return self._until_late(ready, missing)
            time.sleep(pause)
            pause = min(pause * 1.3, LONGEST_SLEEP_S)
        return fence()

    def _until_late(self, ready: Callable[[], bool], missing: Callable[[], str] | None) -> None:
        """The rest of a wait that takes long enough to look whether it has become pointless."""
        patience, state, next_check = Patience(self.timeout_s), self.progress(), 0.0
        late = missing and (lambda: _lines(self.describe(), missing()))
        while not ready():
            if time.monotonic() >= next_check:
                self.check()
                if (found := self.progress()) != state:
                    state = found
                    patience.restart()
                if patience.is_over(late):
                    error = self.late(missing() if missing else "")
                    self.check()  # a peer may have failed while this rank found out who is missing
                    raise error
                next_check = time.monotonic() + CHECK_EVERY_S
            time.sleep(LONGEST_SLEEP_S)
        return fence()

    def for_marks(
        self, cells: Sequence[tuple[Cells, int]], mark: int, missing: Missing | None = None
    ) -> None:
        """Returns when each of these cells has come to `mark`; `missing` tells of those that have
        not, by their numbers."""
        for cell, at in cells:
            if cell[at] < mark:
                break
        else:
            return fence()

        def late() -> list[int]:
            return [n for n, (cell, at) in enumerate(cells) if cell[at] < mark]

        return self.until(lambda: not late(), missing and (lambda: missing(late())))

    def result_of(self, call: Errand[T], missing: Callable[[], str]) -> T:
        """The result of a call once it is back. To be woken costs less than to look, and spins
        would put the first check off."""
        self.until(lambda: call.is_back(CHECK_EVERY_S), missing, spins=1)
        return call.result()

    def finish(self, work: dist.Work) -> None:
        """Returns when a torch `Work` is done; raises its error."""
        try:
            self.until(work.is_completed, self.behind)
            work.wait(SLICE)
        except BaseException:
            leave(work.is_completed, self.cut)
            raise

    def late(self, missing: str = "") -> CommTimeoutError:
        """The time-out's error, with what is missing and the flight log."""
        first = f"no progress in {self.timeout_s:g} s: {self.describe()}"
        log = self.log()
        return CommTimeoutError(_lines(first, "" if missing in log else missing, log, LONGER))


def leave(is_completed: Callable[[], bool], cut: Callable[[], None]) -> None:
    """Ends a transfer, unless it ends by itself: others may have all that it needs."""
    patience = Patience(SETTLED_S)
    while not (is_completed() or patience.is_over()):
        time.sleep(LONGEST_SLEEP_S)
    if not is_completed():
        cut()


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
