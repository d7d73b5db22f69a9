"""Keeps Python's garbage collector away from threads that must not free what it finds.

with uncollected():
    graph.capture_begin()
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Users:
    """How many want it off, and whether it was on before the first of them."""

    lock = threading.RLock()  # it may itself come by, amid the lines that turn it off
    count = 0
    was = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector. Of what it finds it asks and frees events and memory:

    - a thread that captures may not, or what it captures is lost;
    - the watchdog, which ends a stall, may wait in the driver, or for a lock of torch's, behind the
      thread that the stall holds up: Note [Held up] in access.py.

    Several threads may be in it, also at once.
    """
    with _Users.lock:
        if not _Users.count:
            _Users.was = gc.isenabled()
            gc.disable()
        _Users.count += 1
    try:
        yield
    finally:
        with _Users.lock:
            _Users.count -= 1
            if _Users.was and not _Users.count:
                gc.enable()
