"""Leaving autocast for a while, at no cost where there is none to leave.

    with without_autocast(x.device.type):
        y = torch.mm(x, w)                  # in the types that x and w have
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
