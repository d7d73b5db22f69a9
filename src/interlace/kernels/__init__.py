"""Kernels of our own, each beside its reference in torch. A Call names them `interlace.<kernel>`.

    >>> sum_slots(torch.ones(4, 2))
    tensor([4., 4.])

launch.py    compiles and launches all Triton kernels of the package
gemm/        all-gather + GEMM and GEMM + reduce-scatter;  exchange/: collectives of small tensors
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType

import torch


def sum_slots(slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over dimension 0, the ranks' slots, in index order; into `out` if that is given.

    It accumulates in fp32 (in the type itself where that is wider, or is an integer), from slot 0
    up, so the result is the same bits whatever order the slots were filled in. On CUDA one kernel
    does it where it can (exchange/sums.py), in one pass and with the same bits.
    """
    if slots.is_cuda and find_spec("triton") is not None:
        from interlace.kernels.exchange import sums

        if sums.serves(slots, out):
            return sums.sum_slots_cuda(slots, out)
    return sum_slots_reference(slots, out=out)


def sum_slots_reference(slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch, for any type and device."""
    narrow = slots.is_floating_point() and slots.dtype.itemsize < 4
    wide = torch.float32 if narrow else slots.dtype
    if out is not None and out.dtype == wide and slots.shape[0]:
        total = out.copy_(slots[0])
    elif slots.shape[0]:
        total = slots[0].to(wide, copy=True)
    else:
        total = torch.zeros(slots.shape[1:], dtype=wide, device=slots.device)
    for slot in slots[1:]:
        total += slot.to(wide)
    if out is None:
        return total.to(slots.dtype)
    return out if total is out else out.copy_(total)


KERNELS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"interlace.sum_slots": sum_slots}
)
"""The references, which are what the CPU runs: each returns its result, or fills `out`."""
