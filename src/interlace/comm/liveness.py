"""Is the process of a peer still there?

A rank that was killed leaves no word. Its process can be watched where this one may see it: a pidfd
becomes readable when the process ends, even before its parent has collected it.

    >>> Life.of(*identity()).alive()
    True
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

PROBE_EVERY_S = 0.05


def identity() -> tuple[int, int]:
    """This process: its id, and when it started (0 where that is unknown), since ids are reused."""
    return os.getpid(), _started(os.getpid())


def namespace() -> int:
    """The pid namespace of this process, in which its ids mean something; 0 where it is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def exists(pid: int) -> bool:
    """Whether there is a process of this id, in this namespace."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def _started(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


class Life:
    """Watches one process of this host. Where it cannot be seen, it counts as alive."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._next_probe = 0.0
        self._ended = False

    @classmethod
    def of(cls, pid: int, started: int) -> Life:
        """The process of that identity."""
        if not started or _started(pid) != started or not hasattr(os, "pidfd_open"):
            return cls(None)  # another pid namespace, or no /proc: only time-outs will tell
        try:
            return cls(os.pidfd_open(pid))
        except OSError:
            return cls(None)

    def alive(self) -> bool:
        """Whether the process still runs; asks the system at most every `PROBE_EVERY_S`."""
        now = time.monotonic()
        if self._descriptor is None or self._ended or now < self._next_probe:
            return not self._ended
        self._next_probe = now + PROBE_EVERY_S
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        self._ended = bool(poll.poll(0))
        return not self._ended

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the process."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
