"""Leaving autocast for a while: entering and leaving a context of torch's takes microseconds.

    with without_autocast(x.device.type):
        y = torch.mm(x, w)                  # in the types that x and w have

Where autocast is off already, nothing is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Switches autocast off for a kind of device."""
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
