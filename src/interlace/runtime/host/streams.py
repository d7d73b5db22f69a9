"""The streams of a Program on the CPU: their steps, their threads, and the points that they await.

Note [Threads and arithmetic]
    How MKL and OpenMP split a matrix multiplication depends on the number of threads, which is set
    per calling thread. A stream's thread takes the caller's number before each run, so that a Call
    gives the same bits on whatever stream it runs. It takes the caller's inference mode too: what
    the caller allocates in that mode may not be written out of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch

from interlace.comm import BoundedWait
from interlace.comm.control import ENTERED, PROGRESS
from interlace.comm.rendezvous.patience import Patience
from interlace.runtime.calling.calls import Thunk
from interlace.runtime.flight import Flight

SLICE_S = 0.05
GRACE_S = 1.0

Step = tuple[int, int, Thunk]
"""The cell that tells of it (0: none, as of what only comes along with an op), the op, the call."""

Bell = SimpleQueue[None]


@dataclass(slots=True)
class Stream:
    name: str
    steps: list[Step] = field(default_factory=list[Step])
    runs: list[Thunk] = field(default_factory=list[Thunk])
    last: int = 0
    """The cell that says that the stream is done; 0: none."""


Task = tuple[Stream, int, tuple[int, bool]]


class StreamOrder:
    """Points that the streams of one rank await: events, and turns in the teams' queues."""

    def __init__(self, flight: Flight, grace_s: float = GRACE_S) -> None:
        """`grace_s` is how much longer than an op that waits for peers a stream waits for it."""
        self._flight, self._grace_s = flight, grace_s
        self._reached: dict[object, int] = {}
        self._waiting: dict[Bell, None] = {}
        self.run = 0
        """Counts runs: in a new one, every point lies ahead again."""

    def next_run(self) -> None:
        self.run += 1
        self._waiting.clear()  # an interrupt may have left one

    def reach(self, point: object) -> None:
        self._reached[point] = self.run
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        """Lets every waiting stream look whether it should still wait."""
        for bell in tuple(self._waiting):
            bell.put(None)

    def pass_by(self, point: object, wait: BoundedWait) -> None:
        """Returns when the run has got to this point. The waits of the other stream know more of
        the cause, so this one gives up only when no stream has begun an op for longer than the
        time-out."""
        reached, run = self._reached, self.run
        if reached.get(point) == run:
            return
        patience, stood = Patience(wait.time_out_s + self._grace_s), list[int]()
        bell = Bell()
        try:
            self._waiting[bell] = None
            while reached.get(point) != run:
                wait.check()
                if (stands := [op for op, _ in self._flight.stands.values()]) != stood:
                    stood = stands
                    patience.restart()
                if patience.is_over():
                    raise wait.late()
                rung(bell, SLICE_S)
        finally:
            self._waiting.pop(bell, None)


class LocalProgress:
    """Cells like a team's control block, where no team has them for these streams."""

    def __init__(self, num_streams: int) -> None:
        self.cells = [0] * (PROGRESS + 2 * num_streams)

    def enter(self, *_: object) -> int:
        """The number of the run that begins."""
        self.cells[ENTERED] += 1
        return self.cells[ENTERED]

    def leave(self) -> None:
        """Nobody waits for the end."""


class StreamThread:
    """The thread of a stream. `_task` is what it has to do, and None when that is done; the bells
    only say that there is something to look at (Note [Interrupts] in patience.py)."""

    def __init__(self, name: str, drive: Callable[[Stream, int], None]) -> None:
        self.name = name
        self.lost = False
        self._task: Task | None = None
        self._stops = False
        self._go, self._done = Bell(), Bell()
        self._drive = drive
        self._thread = threading.Thread(
            target=self._live, name=f"interlace stream {name}", daemon=True
        )
        self._thread.start()

    @property
    def usable(self) -> bool:
        """True if the thread is alive: it is not in a process that was forked since."""
        return self._thread.is_alive()

    def start_run(self, stream: Stream, mark: int, mode: tuple[int, bool]) -> None:
        """Runs this stream, in the caller's `mode` (number of threads, inference mode)."""
        self._task = stream, mark, mode
        self._go.put(None)

    def is_done(self, within_s: float) -> bool:
        """True if the run has ended; waits for it up to `within_s` seconds."""
        if not rung(self._done, within_s):
            self._go.put(None)  # an interrupt may have come before it was told to go
        return self._task is None

    def _live(self) -> None:
        num_threads = 0
        while not self._stops:
            self._go.get()
            if (task := self._task) is None:
                continue
            stream, mark, (wanted, inference) = task  # see Note [Threads and arithmetic]
            if wanted != num_threads:
                torch.set_num_threads(num_threads := wanted)
            with torch.inference_mode(inference), torch.no_grad():
                self._drive(stream, mark)
            self._task = task = stream = None
            self._done.put(None)

    def stop(self) -> None:
        """Ends the thread, unless it hangs."""
        self._stops = True
        self._go.put(None)
        if not self.lost and threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def rung(bell: Bell, within_s: float) -> bool:
    try:
        bell.get(timeout=within_s)
    except Empty:
        return False
    return True
