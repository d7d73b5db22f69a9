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


@dataclass(slots=True)
class Stream:
    name: str
    steps: list[Step] = field(default_factory=list[Step])
    runs: list[Thunk] = field(default_factory=list[Thunk])
    last: int = 0
    """The cell that says that the stream is done; 0: none."""


class StreamOrder:
    """Points that the streams of one rank await: events, and turns in the teams' queues."""

    def __init__(self, flight: Flight, grace_s: float = GRACE_S) -> None:
        """`grace_s` is how much longer than an op that waits for peers a stream waits for it."""
        self._flight, self._grace_s = flight, grace_s
        self._changed = threading.Condition()
        self._reached: dict[object, int] = {}
        self.run = 0
        """Counts runs: in a new one, every point lies ahead again."""

    def reach(self, point: object) -> None:
        with self._changed:
            self._reached[point] = self.run
            self._changed.notify_all()

    def wake(self) -> None:
        """Lets every waiting stream look whether it should still wait."""
        with self._changed:
            self._changed.notify_all()

    def pass_by(self, point: object, wait: BoundedWait) -> None:
        """Returns when the run has got to this point. The waits of the other stream know more of
        the cause, so this one gives up only when no stream has begun an op for longer than the
        time-out."""
        reached, run = self._reached, self.run
        if reached.get(point) == run:
            return
        patience, stood = Patience(wait.time_out_s + self._grace_s), list[int]()
        with self._changed:
            while reached.get(point) != run:
                wait.check()
                if (stands := [op for op, _ in self._flight.stands.values()]) != stood:
                    stood = stands
                    patience.restart()
                if patience.is_over():
                    raise wait.late()
                self._changed.wait(SLICE_S)


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
    def __init__(self, name: str, drive: Callable[[Stream, int], None]) -> None:
        self.name = name
        self.lost = False
        self.finished = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._run: tuple[Stream, int] | None = None
        self._mode = (0, False)
        self._drive = drive
        self._thread = threading.Thread(
            target=self._live, name=f"interlace stream {name}", daemon=True
        )
        self._thread.start()

    def start_run(self, stream: Stream, mark: int, mode: tuple[int, bool]) -> None:
        """Runs this stream, in the caller's `mode` (number of threads, inference mode); then
        `finished` is released."""
        self._run, self._mode = (stream, mark), mode
        self._go.release()

    def _live(self) -> None:
        num_threads = 0
        while True:
            self._go.acquire()
            if self._run is None:
                return
            wanted, inference = self._mode  # see Note [Threads and arithmetic]
            if wanted != num_threads:
                torch.set_num_threads(num_threads := wanted)
            with torch.inference_mode(inference), torch.no_grad():
                self._drive(*self._run)
            self._run = None
            self.finished.release()

    def stop(self) -> None:
        """Ends the thread, unless it hangs."""
        self._run = None
        self._go.release()
        if not self.lost and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
