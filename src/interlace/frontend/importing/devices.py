"""Which device a graph runs on, and what of it stays on the host.

    device_of([x, w])             # "cpu", or "cuda:1"
    on_host(x, torch.device("cuda"))

A graph runs on one device. On a GPU a few tensors stay on the CPU even so: scalars that torch mixes
with CUDA tensors, states of a random number generator. They go in and out of torch's own operators
and nowhere else: nothing copies, sends or fuses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from interlace.errors import UnsupportedError

_NO_PLACE = ("cpu", "meta")


def device_of(values: Iterable[Any]) -> str:
    """The one device that is no CPU among the tensors, as `torch.device` takes it, else `cpu`."""
    found = {
        str(value.device)
        for value in values
        if isinstance(value, torch.Tensor) and value.device.type not in _NO_PLACE
    }
    if len(found) > 1:
        raise UnsupportedError(
            f"tensors are on {' and '.join(sorted(found))}: a compiled function runs on one device "
            "of each process; move them there, or compile the parts apart"
        )
    return found.pop() if found else "cpu"


def on_host(value: torch.Tensor, main: torch.device) -> bool:
    """Whether a tensor of a graph on `main` stays on the CPU."""
    return value.device.type == "cpu" != main.type
