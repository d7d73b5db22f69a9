"""Time-outs that count observed time, and calls that may not come back.

    patience = Patience(timeout_s)
    while not there():
        if patience.is_over(lambda: "rank 1 has not come"):
            raise CommTimeoutError(...)

    call = Errand(lambda: store.check([key]))     # in a thread of its own
    found = call.result() if call.is_back(within_s=1.0) else None

Note [Observed time]
    While a whole job is paused (a suspended machine, a debugger) no rank is late, so of what lies
    between two looks at the clock a wait counts at most `LONGEST_STEP_S`, or a quarter of it.

Note [Interrupts]
    A signal handler may raise (Ctrl-C does) after any call of the main thread, also in the middle
    of `threading`'s own classes, which are written in Python: a `Condition` then keeps its lock for
    ever, a `Semaphore` loses a count. So what the main thread shares with others is state that one
    side writes and the other looks at; a `SimpleQueue`, which is written in C, only wakes it up.
"""

from __future__ import annotations

import _thread
import contextlib
import time
import warnings
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
LONGEST_STEP_S = 1.0
WARN_AFTER_S = 60.0
LONGER = "if it is only late, give the option timeout_s more seconds"


class Patience:
    """A bound in observed time; after a minute of waiting it warns, once, of what is missing."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._warned = False
        self._longest = min(LONGEST_STEP_S, timeout_s / 4)
        self.restart()

    def restart(self) -> None:
        """Counts from now: there was progress."""
        self.waited_s, self.since = 0.0, time.monotonic()
        self._last = self.since

    def is_over(self, missing: Callable[[], str] | None = None) -> bool:
        """True if the time-out has passed; to be called several times a second."""
        now = time.monotonic()
        self.waited_s += min(now - self._last, self._longest)
        self._last = now
        if self.waited_s > self.timeout_s:
            return True
        if missing is not None and self.waited_s > WARN_AFTER_S and not self._warned:
            self._warned = True
            with contextlib.suppress(RuntimeWarning):  # where warnings are errors
                warnings.warn(
                    f"waiting for {self.waited_s:.0f} s, of {self.timeout_s:.0f} at most (option "
                    f"timeout_s): {missing()}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return False


class Errand(Generic[T]):
    """A call in a thread of its own, which is left behind where the call does not return."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._found: list[T] = []
        self._error: list[Exception] = []
        self._bell = SimpleQueue[None]()

        def run() -> None:
            try:
                self._found.append(act())
            except Exception as error:
                self._error.append(error)
            self._bell.put(None)

        _thread.start_new_thread(run, ())  # in one call: Note [Interrupts]

    def is_back(self, within_s: float) -> bool:
        with contextlib.suppress(Empty):
            if not (self._found or self._error):
                self._bell.get(timeout=within_s)
        return bool(self._found or self._error)

    @property
    def failed(self) -> bool:
        """True if the call has come back with an error."""
        return bool(self._error)

    def result(self) -> T:
        if self._error:
            raise self._error[0]
        return self._found[0]
