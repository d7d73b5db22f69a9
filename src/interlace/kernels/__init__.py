"""Kernels of our own, each beside its plain-torch twin. A Call names them `interlace.<kernel>`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from interlace.kernels.exchange.reduce import sum_slots

KERNELS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"interlace.sum_slots": sum_slots}
)
"""The plain-torch twins, which are what the CPU runs: each returns its result, or fills `out`."""

__all__ = ["KERNELS", "sum_slots"]
