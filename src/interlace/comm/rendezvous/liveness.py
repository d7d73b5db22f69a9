"""Is the process of a peer still there?

A rank that was killed leaves no word. Its process can be watched where this one may see it: a pidfd
becomes readable when the process ends, even before its parent has collected it.

    >>> PeerProcess.of(*identity()).alive()
    True

Where ranks are joined by gloo, a connection that is closed tells the same of a rank of which
nothing else is known: `disconnected(1)`.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.rendezvous.patience import LONGER, Errand, Patience
from interlace.errors import SharedMemoryError
from interlace.torch_private import backend_of, default_group, uses_agents_store

Note = dict[str, Any]
"""A small JSON text that a rank leaves in the store."""
PROBE_EVERY_S = 0.05
"""Time between questions to the system whether processes still run."""
END_S = 0.5
"""Time for a process to end once its connections are closed."""
PROBE_TAG = (1 << 30) + 7
"""The tag of messages that nobody takes: neither users' nor those of `messages.py`."""
CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def identity() -> tuple[int, int, str]:
    """This process: its id, when it started (ids are reused), and where ids mean something."""
    return os.getpid(), own_start(), place()


def own_start() -> int:
    """When this process started, as `started` tells it. From no file: it may have none left."""
    return _start_of(os.getpid())


@lru_cache(maxsize=1)
def _start_of(pid: int) -> int:
    return started(pid)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Names this boot of this host; empty where it is unknown."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


def place() -> str:
    """This boot of this host and this pid namespace; empty where either is unknown."""
    return f"{boot_id()}/{namespace()}" if boot_id() and namespace() else ""


def namespace() -> int:
    """The pid namespace of this process, in which its ids mean something; 0 where it is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def uptime() -> float:
    """Seconds since this host started, as the start of a process is counted."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def moment() -> Note:
    """Now, by the clock of this boot of this host, which none sets, and by the wall clock."""
    return {"boot": boot_id(), "at": uptime(), "wall": time.time()}


def precedes(note: Note) -> bool:
    """True if the moment of a note lies before the start of this process. For a note of another
    host only the wall clocks tell."""
    age = uptime() - own_start() / os.sysconf("SC_CLK_TCK")
    if note["boot"] == boot_id():
        return note["at"] < uptime() - age
    return note["wall"] < time.time() - age


def started(pid: int) -> int:
    """When a process started, in clock ticks since the host did; 0 where that is unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields in /proc of a process, from its state on; empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


boot_id()  # now: later there may be no descriptor left to read it
own_start()
os.register_at_fork(after_in_child=own_start)


def can_open(count: int) -> bool:
    """True if this process may have `count` file descriptors more."""
    held: list[int] = []
    try:
        held.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count))
    except OSError:
        return False
    finally:
        for descriptor in held:
            os.close(descriptor)
    return True


def default_gloo() -> Any:
    """The default group's gloo; None where it has none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        group = default_group()
        backend: Any = backend_of(group, torch.device("cpu"))
    except RuntimeError:
        return None
    return backend if backend.name() == "gloo" else None


def disconnected(rank: int) -> bool:
    """True if the default group's gloo refuses a message to the rank: its process has ended."""
    gloo = default_gloo()
    return gloo is not None and refuses(gloo, rank)


def refuses(gloo: Any, rank: int) -> bool:
    """True if a gloo backend refuses a message to one of its ranks: the process has ended, or has
    cut its connections."""
    if rank >= gloo.size() or rank == gloo.rank():
        return False
    try:
        gloo.send([torch.empty(1, dtype=torch.uint8)], rank, PROBE_TAG)
    except RuntimeError as error:
        return any(words in str(error) for words in CLOSED)
    return False


class PeerProcess:
    """Watches one process of this host. Where it cannot be seen, it counts as alive."""

    def __init__(self, descriptor: int | None, pid: int = 0, ended: bool = False) -> None:
        self._descriptor = descriptor
        self._pid = pid
        self._ended = ended

    @classmethod
    def of(cls, pid: int, since: int, where: str = "") -> PeerProcess:
        here = bool(where) and where == place()
        if not since or (where and not here) or not hasattr(os, "pidfd_open"):
            return cls(None)  # another host or pid namespace, or no /proc: only time-outs will tell
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return cls(None, ended=here)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise SharedMemoryError(
                    f"this process cannot watch a peer, process {pid} ({error.strerror}): close "
                    "files, or allow more (ulimit -n)"
                ) from error
            return cls(None)
        now = started(pid)
        if now == since:
            return cls(descriptor, pid)
        os.close(descriptor)  # another has its id, it has gone, or /proc cannot be read
        return cls(None, ended=here and (now > 0 or not exists(pid)))

    @property
    def seen(self) -> bool:
        return self._descriptor is not None or self._ended

    def alive(self) -> bool:
        """True if the process still runs."""
        if self._descriptor is None or self._ended:
            return not self._ended
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        self._ended = bool(poll.poll(0))
        return not self._ended

    def stopped(self) -> bool:
        """True if the process is alive and is stopped, by a signal or a debugger."""
        fields = _stat(self._pid) if self._descriptor is not None and self.alive() else []
        return fields[:1] in (["T"], ["t"])

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


HOLDER = "the process that holds it (rank 0, where no launcher does)"


def lost_store(
    error: Exception, rank: int, lives: Mapping[int, PeerProcess], known: bool = False
) -> str:
    """The message for a store that is gone: rank 0 may have left after the end of another. `known`
    is one that was gone before."""
    what = f"the store of torch.distributed does not answer ({str(error).splitlines()[0]})"
    patience = Patience(END_S)
    # Asked anew: whoever ended did so an instant before the store did, or at that moment.
    while True:
        ended = {each for each, life in lives.items() if not life.alive()}
        if rank and (0 not in lives or not lives[0].seen):
            call = Errand(lambda: disconnected(0))  # gloo may connect only now
            ended |= {0} if call.is_back(PROBE_EVERY_S) and call.result() else set()
        if ended or known or patience.is_over():
            break
        time.sleep(PROBE_EVERY_S)
    holder = set[int]() if uses_agents_store() else {0}
    if culprits := sorted(ended - holder) or sorted(ended):
        who = " and ".join(f"rank {culprit}" for culprit in culprits)
        return f"the process of {who} has ended, and {what}: {HOLDER} has left too"
    return f"{what}: {HOLDER} has ended, or is out of reach"


def silent_store(limit_s: float) -> str:
    return (
        f"the store of torch.distributed has not answered for {limit_s:g} s: {HOLDER} is stopped, "
        f"or its host is overloaded; {LONGER}"
    )
