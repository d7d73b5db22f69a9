"""The sum of a reduction's slots as one launch of a kernel that is compiled when it is bound.

thunk = bind_sum(binder, lane, op)        # None: some other call, or not for the kernel
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from interlace.ir import Box, Call, View
from interlace.kernels.gemm.support import ALIGNMENT
from interlace.runtime.cuda.lanes import Lane, Thunk
from interlace.runtime.values import DTYPES

if TYPE_CHECKING:
    from interlace.runtime.cuda.binder import Binder

SUM = "interlace.sum_slots"


def bind_sum(binder: Binder, lane: Lane, op: Call) -> Thunk | None:
    """The launch that adds up the first dimension of a view, where its rest lies in a row."""
    if op.fn != SUM or binder.context.device.type != "cuda" or find_spec("triton") is None:
        return None
    (slots,) = op.views()
    (out,) = op.outs
    if not isinstance(out, View):
        return None
    box, to = binder.plan.box(slots), binder.plan.box(out)
    each = Box(0, box.sizes[1:], box.strides[1:], box.dtype)
    from interlace.kernels.exchange.reduce import sum_slots
    from interlace.kernels.exchange.sums import SumSlots
    from interlace.kernels.launch import TYPES

    dtype = DTYPES[box.dtype]
    fits = dtype in TYPES and box.dtype == to.dtype and box.numel > 0
    if not (fits and each.contiguous and to.contiguous):
        return None
    count, stride = to.numel, box.strides[0]
    aligned = not (count | stride) * dtype.itemsize % ALIGNMENT
    facts = {"size": box.sizes[0], "dtype": dtype, "device": binder.context.device}
    launch = SumSlots(**facts, aligned=aligned).launch
    items, a, b = binder.values.items, binder.values.own(slots), binder.values.own(out)

    def by_torch() -> None:
        sum_slots(items[a], out=items[b])

    slowly = lane.within(by_torch)

    def run() -> None:
        source, target = items[a].data_ptr(), items[b].data_ptr()
        if aligned and (source | target) % ALIGNMENT:
            slowly()
        else:
            launch(lane.handle, source, stride, target, count)

    return run
