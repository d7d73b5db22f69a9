"""Bounded reads and writes of this rank's own words, whatever holds up the driver or the device.

    access = access_to(driver.bus_id())
    access.fill(memory, memory.bases[me] + 64, value=1 << 30, count=8)
    access.read(memory, memory.bases[me] + 64, 8)
    access.rest(driver, time_out_s=10)      # no write through this driver is to come any more

Note [Held up]
    A stream that waits for a word in device memory is let go by a write of that word, and that is a
    call of the driver on a stream of ours. Neither is sure to go on while other streams wait:

    - a thread of the caller's that itself waits in the driver may keep a lock that other calls
      need. It launches into a full queue (some thousand launches behind the run that waits, on the
      default stream), it copies from or to memory that is not pinned, or it frees device memory.
      So a host that runs ahead of a stalled run would never hear of it;
    - streams are more than the hardware has queues: what stands behind a stream that waits, waits
      too. With CUDA_DEVICE_MAX_CONNECTIONS=1 there is one queue for all, also for those of the
      highest priority.

    Whether events are done can be asked in all these states. So a call here has a thread of its own
    and some time. Where that is not enough, another process does it (helper.py): it maps the memory
    by its CUDA IPC handle, and has locks and queues of its own. That takes a second or two, and
    some hundred MB of the GPU's memory until some seconds after its last use.

    Where neither can (the GPU is in exclusive mode, or full), a warning says so, and it is tried
    again and again: the caller's thread cannot be reached, but is let go if the late rank comes.

    What was given up may still be done later: a call that returns at last, or a write that stands
    in a queue. Both write what lets go. `rest` waits for them, and after it words count anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from interlace.comm.cuda.collector import uncollected
from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import PeerMemory
from interlace.errors import BackendError, CommTimeoutError

PATIENCE_S = 0.5
"""How long a call of the driver's gets, which takes less than a millisecond."""
HELP_S = 10.0
"""How long the other process gets to start and to answer."""
PAUSE_S = 5.0
"""How long after one that failed the next one is started."""
HELPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("helper.py")))


class Helper:
    """The other process."""

    def __init__(self, bus_id: str) -> None:
        try:
            self._process = subprocess.Popen(
                [*HELPER, bus_id],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is not meant for it
            )
        except (OSError, TypeError) as error:  # TypeError: this interpreter does not know its path
            raise BackendError(f"no helper process can be started: {error}") from error
        self._asks: Any = self._process.stdin
        self._answers: Any = self._process.stdout

    @property
    def ended(self) -> bool:
        """Whether it is there no more."""
        return self._process.poll() is not None

    @property
    def left(self) -> bool:
        """Whether it ended by itself, as nothing was asked for a while."""
        return self._process.poll() == 0

    def ask(self, question: dict[str, Any]) -> list[int]:
        """Its answer, bounded. After an error it is of no use any more."""
        deadline, line = time.monotonic() + HELP_S, b""
        with contextlib.suppress(OSError):  # it has ended, and said why
            self._asks.write(json.dumps(question).encode() + b"\n")
        waits = select.poll()
        waits.register(self._answers, select.POLLIN)
        while not line.endswith(b"\n"):
            if not waits.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise BackendError(f"the helper process did not answer in {HELP_S:g} s")
            part = os.read(self._answers.fileno(), 1 << 16)
            if not part:
                self._wait()
                raise BackendError(f"the helper process ended with {self._process.returncode}")
            line += part
        try:
            answer = json.loads(line)
            if "error" not in answer:
                return [int(word) for word in answer["words"]]
        except (ValueError, TypeError, KeyError) as error:
            raise BackendError(f"the helper process answered {line[:80]!r}") from error
        raise BackendError(f"the helper process cannot help: {answer['error']}")

    def end(self) -> None:
        """It ends with its input; if it does not, it is killed."""
        for pipe in (self._asks, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        if not self._wait():
            self._process.kill()
            self._wait()  # not without bound: a call into a broken device may outlast the kill

    def _wait(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return self.ended


class WordAccess:
    """To the words of one device of this process."""

    def __init__(self, bus_id: str) -> None:
        self._bus_id = bus_id
        self._calls: list[tuple[Driver, threading.Thread]] = []
        """Calls of the driver's that were given up."""
        self._lock = threading.Lock()
        self._helper: Helper | None = None
        self._failure: tuple[float, str] | None = None

    def read(self, memory: PeerMemory, address: int, count: int) -> list[int]:
        """32-bit words of this rank's part of the memory, as they are now."""
        found = self._try(memory.driver, lambda: memory.driver.read(address, count))
        return self._ask(memory, address, {"count": count}) if found is None else found[0]

    def fill(self, memory: PeerMemory, address: int, value: int, count: int) -> None:
        """Sets 32-bit words of this rank's part, and returns when they are set."""
        value &= 0xFFFFFFFF
        done = self._try(memory.driver, lambda: memory.driver.fill(address, value, count))
        if done is None:
            self._ask(memory, address, {"count": count, "value": value})

    def rest(self, driver: Driver, time_out_s: float) -> None:
        """Returns when nothing that was given up is to be done any more; the helper has ended."""
        deadline = time.monotonic() + time_out_s
        calls = [item for item in self._calls if item[0] is driver]
        for _, call in calls:
            call.join(max(0.0, deadline - time.monotonic()))
        if any(call.is_alive() for _, call in calls):
            raise CommTimeoutError(
                f"a call of the CUDA driver has not returned after {time_out_s:g} s, and may write "
                "signal words at any time: end this process"
            )
        if calls:
            driver.finish(driver.private_stream(), max(1.0, deadline - time.monotonic()))
        for item in calls:
            with contextlib.suppress(ValueError):  # another thread rests too
                self._calls.remove(item)
        self.dismiss()

    def dismiss(self) -> None:
        """The helper ends, if there is one."""
        with uncollected(), self._lock:
            self._failure = None
            self._dismiss()

    def _try(self, driver: Driver, action: Callable[[], Any]) -> list[Any] | None:
        """What the driver returns, alone in a list; None where it does not return in time."""
        if any(call.is_alive() for _, call in self._calls):
            return None
        found: list[Any] = []
        errors: list[Exception] = []

        def act() -> None:
            try:
                driver.relax_captures()
                found.append(action())
            except Exception as error:
                errors.append(error)

        call = threading.Thread(target=act, name="interlace words", daemon=True)
        try:
            call.start()
        except RuntimeError:  # there is no room for a thread, or the interpreter is ending
            if not sys.is_finalizing():
                return None
            act()
        else:
            call.join(PATIENCE_S)
        if found:
            return found
        if errors:
            raise errors[0]
        self._calls.append((driver, call))
        return None

    def _ask(self, memory: PeerMemory, address: int, what: dict[str, int]) -> list[int]:
        """What the helper answers."""
        place = {"handle": memory.handle, "at": address - memory.bases[memory.me]}
        with uncollected(), self._lock:  # an Executor that it ends may want this lock, or a side's
            return self._helped({**place, **what})

    def _helped(self, question: dict[str, Any]) -> list[int]:
        if self._failure is not None and time.monotonic() < self._failure[0] + PAUSE_S:
            raise BackendError(self._failure[1])
        try:
            words = self._answer(question)
        except BaseException as error:
            self._dismiss()
            if isinstance(error, BackendError):
                self._failure = time.monotonic(), str(error)
                _warn(f"the CUDA driver is held up, and {error}")
            raise
        self._failure = None
        return words

    def _answer(self, question: dict[str, Any]) -> list[int]:
        if self._helper is not None:
            try:
                return self._helper.ask(question)
            except BackendError:
                if not self._helper.left:
                    raise
        self._dismiss()
        self._helper = Helper(self._bus_id)
        return self._helper.ask(question)

    def _dismiss(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()


def _warn(why: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # where warnings are errors
        warnings.warn(
            f"a stalled run cannot be ended: {why}; if this process does not go on, end it",
            RuntimeWarning,
            stacklevel=2,
        )


@cache
def access_to(bus_id: str) -> WordAccess:
    """To the words of a device, one for all teams: there is one helper at most."""
    return WordAccess(bus_id)
