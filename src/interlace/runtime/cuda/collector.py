"""Keeps Python's garbage collector away from threads that must not free what it finds.

with uncollected():
    graph.capture_begin()
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector. Of what it finds it asks and frees events and memory:

    - a thread that captures may not, or what it captures is lost;
    - the thread that ends a stall may wait for it in the driver, or for a lock of torch's, behind
      the thread that the stall holds up: Note [Held up] in access.py.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
