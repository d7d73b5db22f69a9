"""The reduction that ends a GEMM + reduce-scatter: a sum over the ranks' slots, in rank order.

    >>> sum_slots(torch.ones(4, 2))
    tensor([4., 4.])

It accumulates in fp32 (in the type itself where that is wider, or is an integer), from slot 0 up,
so the result is the same bits whatever order the slots were filled in. On CUDA one kernel does it
where it can (sums.py), in one pass and with the same bits.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch


def sum_slots(slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over dimension 0, in index order; into `out` if that is given."""
    if slots.is_cuda and find_spec("triton") is not None:
        from interlace.kernels.exchange import sums

        if sums.serves(slots, out):
            return sums.sum_slots_cuda(slots, out)
    return sum_slots_twin(slots, out=out)


def sum_slots_twin(slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
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
