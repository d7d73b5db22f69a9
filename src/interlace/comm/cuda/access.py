"""Bounded reads and writes of this rank's own words, also while the CUDA driver is held up.

    access = WordAccess(driver)
    access.fill(address, value=1 << 30, count=8)    # DriverHeldUpError if it takes too long
    access.read(address, 8)
    access.rest(time_out_s=10)      # after it no abandoned call can write any more

Note [Held up]
    A stream that waits for a word in device memory is released by a write of that word, and that is
    a call of the driver on a stream of ours. Such a call may not return while other streams wait:

    - a thread of the caller's that itself waits in the driver may hold a lock that other calls
      need. It launches into a full queue (some thousand launches behind the run that waits, on the
      default stream), it copies from or to memory that is not pinned, or it frees device memory;
    - streams are more than the hardware has queues: what stands behind a stream that waits, waits
      too. With CUDA_DEVICE_MAX_CONNECTIONS=1 there is one queue for all, also for those of the
      highest priority.

    Whether events are done can be asked in all these states, so the watchdog still finds the stall.
    A call here runs in a thread of its own, for a bounded time. If the driver is still held up some
    seconds after a run has failed, nothing in this process can release the caller's thread: the
    watchdog ends the process with a report, as NCCL's does. Peers have the error by then, and
    torchrun sees the exit code.

    An abandoned call may still write later: when it returns at last, or from a queue. `rest` waits
    for both, and after it words count anew.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from interlace.comm.cuda.driver import Driver
from interlace.errors import BackendError, CommTimeoutError

PATIENCE_S = 0.5
"""How long a call of the driver's gets, which takes less than a millisecond."""


class DriverHeldUpError(BackendError):
    """The CUDA driver did not return from a call in time."""


class WordAccess:
    """Access to this rank's words through one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._abandoned: list[threading.Thread] = []
        """Calls that did not return in time."""

    def read(self, address: int, count: int) -> list[int]:
        """32-bit words of this rank's part of the memory, as they are now."""
        return self._call(lambda: self._driver.read(address, count))

    def fill(self, address: int, value: int, count: int) -> None:
        """Sets 32-bit words of this rank's part, and returns when they are set."""
        self._call(lambda: self._driver.fill(address, value & 0xFFFFFFFF, count))

    def rest(self, time_out_s: float) -> None:
        """Returns when no abandoned call is under way any more."""
        deadline = time.monotonic() + time_out_s
        calls = list(self._abandoned)
        for call in calls:
            call.join(max(0.0, deadline - time.monotonic()))
        if any(call.is_alive() for call in calls):
            raise CommTimeoutError(
                f"a call of the CUDA driver has not returned after {time_out_s:g} s, and may write "
                "signal words at any time: end this process"
            )
        if calls:
            driver = self._driver
            driver.finish(driver.private_stream(), max(1.0, deadline - time.monotonic()))
        for call in calls:
            with contextlib.suppress(ValueError):  # another thread rests too
                self._abandoned.remove(call)

    def _call(self, action: Callable[[], Any]) -> Any:
        """What the driver returns; an error where it does not return in time."""
        if any(call.is_alive() for call in self._abandoned):
            raise DriverHeldUpError("the CUDA driver is held up: an earlier call has not returned")
        found: list[Any] = []
        errors: list[Exception] = []

        def act() -> None:
            try:
                self._driver.relax_captures()
                found.append(action())
            except Exception as error:
                errors.append(error)

        call = threading.Thread(target=act, name="interlace words", daemon=True)
        try:
            call.start()
        except RuntimeError as error:
            if not sys.is_finalizing():
                raise DriverHeldUpError(f"no thread can be started: {error}") from error
            act()
        else:
            call.join(PATIENCE_S)
        if found:
            return found[0]
        if errors:
            raise errors[0]
        self._abandoned.append(call)
        raise DriverHeldUpError(
            f"the CUDA driver is held up: a call has not returned in {PATIENCE_S:g} s"
        )
