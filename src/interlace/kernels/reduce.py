"""The reduction that ends a GEMM + reduce-scatter: a sum over the ranks' slots, in rank order.

    >>> sum_slots(torch.ones(4, 2))
    tensor([4., 4.])

It accumulates in fp32 (in the type itself where that is wider, or is an integer), from slot 0 up,
so the result is the same bits whatever order the slots were filled in.
"""

from __future__ import annotations

import torch


def sum_slots(slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over dimension 0, in index order; into `out` if that is given."""
    narrow = slots.is_floating_point() and slots.dtype.itemsize < 4
    wide = torch.float32 if narrow else slots.dtype
    if out is not None and out.dtype == wide and slots.shape[0]:
        total = out.copy_(slots[0])
    elif slots.shape[0]:
        total = slots[0].to(wide, copy=True)
    else:
        total = torch.zeros(slots.shape[1:], dtype=wide, device=slots.device)
    for slot in slots[1:]:
        total += slot
    if out is None:
        return total.to(slots.dtype)
    return out if total is out else out.copy_(total)
