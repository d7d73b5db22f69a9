"""Events by which others than the caller see how far the runs of an engine are.

    marks = Marks(driver, 1024)
    begin, end = marks.of(run)            # recorded where the run begins and ends on its stream
    marks.probe(stream, run)              # then, where it is `next`: seen however many runs go on
    marks.passed()                        # the last run that a probe has seen the end of

A run's two events are those of the run `num` before it: once so many are issued on top, they tell
nothing of it any more, so `num` is more than a device lets a host be ahead, as a rule. And one run
in `APART` leaves an event besides, which is used again only when it was seen to be done: progress
is seen however far that is.

Note [Events that are asked for as they go]
    The driver crashes where an event is asked for that is destroyed, and the watchdog may be asking
    when a thread closes an engine, or the garbage collector does, amid the question itself. So they
    take turns; for who asks afterwards all is over.
"""

from __future__ import annotations

import threading
from collections import deque

from interlace.comm.cuda.driver import Driver, Event

APART = 8


class Marks:
    """Events of the last `num` runs, and probes. One thread records, others look."""

    def __init__(self, driver: Driver, num: int) -> None:
        self.num = num
        self._driver = driver
        self.events = [(driver.event(), driver.event()) for _ in range(num)]
        """Events of the begin and the end of runs; run r has number r % num."""
        self._probes: deque[tuple[int, Event]] = deque()
        """Runs and events that were not seen to be done, in order."""
        self.probes = [driver.event(), driver.event()]
        self._free = deque(self.probes)
        self.next = 0
        """The run that leaves the next one."""
        self._turn = threading.RLock()  # Note [Events that are asked for as they go]
        self._asking = self._closed = False

    def of(self, run: int) -> tuple[Event, Event]:
        return self.events[run % self.num]

    def probe(self, stream: int, run: int) -> None:
        """After the end of a run, from `next` on: leaves an event behind it."""
        if not self._free:  # further ahead than ever before
            self.probes.append(self._driver.event())
            self._free.append(self.probes[-1])
        event = self._free.popleft()
        self._driver.record(stream, event)
        self._probes.append((run, event))
        self.next = run + min(APART, self.num)

    def passed(self) -> int:
        """The last run whose probe is done; 0: none since the last call. One thread at a time."""
        last = 0
        while self._probes and self._done(self._probes[0][1]):
            last, event = self._probes.popleft()
            self._free.append(event)
        return last

    def begun(self, run: int) -> bool:
        return self._done(self.of(run)[0])

    def ended(self, run: int) -> bool:
        """True if a run, one of the last few, or the later run in its place has ended."""
        return self._done(self.of(run)[1])

    def _done(self, event: Event) -> bool:
        with self._turn:
            if self._closed:
                return True
            self._asking = True
            try:
                return self._driver.done(event)
            finally:
                self._asking = False
                if self._closed:
                    self._destroy()

    def owns(self, event: Event) -> bool:
        return any(event in pair for pair in self.events)

    def close(self) -> None:
        with self._turn:
            closed, self._closed = self._closed, True
            if not (closed or self._asking):
                self._destroy()

    def _destroy(self) -> None:
        for event in (*self.probes, *(event for pair in self.events for event in pair)):
            self._driver.destroy_event(event)
