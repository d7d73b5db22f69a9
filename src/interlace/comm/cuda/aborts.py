"""Ends NCCL's communicators.

    aborts = abort(backends)                 # begins
    if not all_ended(aborts, time_out_s=10): ...

Note [Aborts]
    NCCL's ops end only with their communicator, and a call of NCCL in another thread may keep an
    abort from ever returning, as may a kernel of another communicator that waits on the same device
    (the abort frees memory, which waits for the device). So

    - each abort has a thread of its own: one that stands still holds up neither the next one, nor
      the watchdog, nor the caller (torch's own abort, in a destructor, would keep Python's lock);
    - after a failure, the watchdog begins it once no thread of this process is issuing a run with
      the communicator, as far as its patience goes: the device itself may hold that thread up, in
      a full queue, which only the abort ends. No run begins and no NCCL op is issued after a
      failure;
    - a communicator of ours that a reset or `interlace.release()` leaves behind is aborted there,
      by all ranks, while nothing is under way, and not when the garbage collector comes by;
    - the abort waits for the graphs that the communicator's ops were captured in: they go first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any


def abort(backends: Sequence[Any]) -> list[threading.Thread]:
    """Begins to end what these backends are doing; they cannot be used again."""
    threads: list[threading.Thread] = []
    for backend in backends:
        thread = threading.Thread(target=backend.abort, name="interlace abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and the connections with it
            break
        threads.append(thread)
    return threads


def all_ended(aborts: Sequence[threading.Thread], time_out_s: float) -> bool:
    """Whether they end within this time."""
    deadline = time.monotonic() + time_out_s
    for thread in aborts:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in aborts)
