"""Interrupts that torch loses while it looks whether what it compiled still serves.

    look_for_lost_interrupts()      # from now on they are raised as TorchDynamo compiles again

Note [Interrupts amid guards]
    Before a compiled call TorchDynamo checks guards, some of which are Python functions, as those
    of DTensors are. Where a signal handler raises in one (Ctrl-C does), torch takes the guard for
    one that does not hold, and drops the exception: this rank would compile anew, alone, for peers
    that wait for it in a run, and nobody would hear of the interrupt. Such a compilation is told by
    guards that hold when they are asked again. It ends at its start, by the interrupt.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.guards import DeletedGuardManagerWrapper


def look_for_lost_interrupts() -> None:
    """Has TorchDynamo ask `raise_lost` before it compiles; its reset forgets that."""
    if raise_lost not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(raise_lost)


def raise_lost(_: object) -> None:
    """Raises the interrupt that made TorchDynamo compile what serves, if one did."""
    if threading.current_thread() is not threading.main_thread():
        return  # no signal handler runs here
    asked = _compilation()
    entries: Any = asked.get("cache_entries_for_reasons", ())
    frame: Any = asked.get("frame")
    if not entries or frame is None:
        return
    wanted = innermost_backend(asked["compiler_fn"])
    if any(_serves(entry, wanted, frame.f_locals) for entry in entries):
        raise KeyboardInterrupt("in a guard of torch.compile, which lost it")


def _compilation() -> dict[str, Any]:
    """TorchDynamo's local variables in the compilation that begins: the callback gets none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if "cache_entries_for_reasons" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            return frame.f_locals
        frame = frame.f_back
    return {}


def _serves(entry: Any, wanted: object, values: dict[str, Any]) -> bool:
    """Returns True if this backend compiled that entry, and its guards hold."""
    guards = entry.guard_manager
    if isinstance(guards, DeletedGuardManagerWrapper):  # what it stood on is gone
        return False
    return entry.backend is wanted and guards.check(values)
