"""Launches of our kernels: of the one that a Fused op names, and of the sum of a reduction's slots.

Without a kernel, and on a GPU that has none (with a warning), its members run one after another:
slower, and the same result.

Note [The same bits in order]
    With the option `in_order` members run one by one. A matmul's bits may depend on what kernel
    does it, so those of a Fused that has a kernel are then done by the same code, part by part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from interlace.ir import Box, Call, Fused, Op, Record, View
from interlace.ir.kernels import KernelMatmul, factors, kernel_matmul
from interlace.ir.sizes import Int, number
from interlace.kernels.gemm import support
from interlace.runtime.calling.calls import Thunk
from interlace.runtime.cuda.lanes import CounterPoint, Lane, Words
from interlace.runtime.values import DTYPES

if TYPE_CHECKING:
    import torch

    from interlace.runtime.cuda.binder import Binder


Launch = Callable[..., object]
"""Launches a kernel on a stream, given first."""


def bind_kernel(binder: Binder, lane: Lane, index: int, op: Fused) -> Thunk | None:
    """The launch of the kernel of op `index`; None where it has none, or the GPU."""
    if op.kernel is None:
        return None
    matmul = _matmul(binder, op)
    why = _refusal(binder, matmul)
    if why is not None:
        warnings.warn(
            f"op {index} of {binder.plan.program.name}: no {op.kernel.kind} here, so its parts run "
            f"one after another: {why}",
            stacklevel=2,
        )
        return None
    if op.kernel.kind == "gather_matmul":
        return _gather(binder, lane, matmul)
    return _scatter(binder, lane, index, op, matmul)


def bind_member(binder: Binder, lane: Lane, op: Fused, call: Call) -> Thunk | None:
    """One matmul of a Fused by the code of its kernel: Note [The same bits in order]."""
    product = factors(call)
    if op.kernel is None or product is None:
        return None
    matmul = _matmul(binder, op)
    if _refusal(binder, matmul):
        return None
    from interlace.kernels.gemm.matmul import GatherMatmul

    def launch_of(numbers: tuple[int, ...]) -> Launch:
        whole = replace(matmul, rows=numbers[0], inner=numbers[1], columns=numbers[2])
        facts = {**_facts(whole), "rows": numbers[3], "size": 1, "rank": 0}
        config = _kernel(binder, matmul, numbers[:3]).config
        return GatherMatmul(**facts, device=binder.context.device, config=config).launch

    sizes = *_sizes(matmul), binder.plan.box(product.a).sizes[0]
    launch = binder.values.sizes.sized(sizes, launch_of)
    values, items = binder.values, binder.values.items
    a, b, out = values.own(product.a), values.own(product.b), values.own(product.out)
    c = None if product.bias is None else values.own(product.bias)

    def run() -> None:
        added = None if c is None else items[c]
        launch.now(lane.handle, items[a], items[b], None, items[out], added, 0, 0)

    return _aligned(lane, items, run, (a, b) if c is None else (a, b, c), out)


def _matmul(binder: Binder, op: Fused) -> KernelMatmul:
    plan = binder.plan
    return kernel_matmul(op, plan.box, plan.buffers, plan.where)


def _refusal(binder: Binder, matmul: KernelMatmul) -> str | None:
    """Why this GPU has no kernel for it."""
    device = binder.context.device
    return support.refuse_device(device) or (support.refuse_packed() if matmul.packed else None)


def _facts(matmul: KernelMatmul) -> dict[str, Any]:
    same = ("rows", "inner", "columns", "size", "rank", "transposed")
    facts = {name: getattr(matmul, name) for name in same}
    if matmul.packed is not None:
        kinds = tuple(DTYPES[dtype] for dtype in matmul.packed)
        facts |= {"inner": matmul.inner - support.TAIL, "packed": kinds}
    return {**facts, "dtype": DTYPES[matmul.dtype], "bias": matmul.bias is not None}


def _sizes(matmul: KernelMatmul) -> tuple[Int, ...]:
    return matmul.rows, matmul.inner, matmul.columns


def _kernel(binder: Binder, matmul: KernelMatmul, sizes: tuple[int, ...]) -> Any:
    """The kernel for these numbers of `_sizes`."""
    rows, inner, columns = sizes
    matmul = replace(matmul, rows=rows, inner=inner, columns=columns)
    facts, asked = _facts(matmul), matmul.kernel
    if asked.kind == "gather_matmul":
        from interlace.kernels.gemm.matmul import GatherMatmul

        return GatherMatmul(**facts, subs=asked.pieces, device=binder.context.device)
    from interlace.kernels.gemm.matmul import ScatterMatmul

    facts |= {"subs": asked.pieces, "own_parts": asked.own}
    return ScatterMatmul(**facts, device=binder.context.device)


def _gather(binder: Binder, lane: Lane, matmul: KernelMatmul) -> Thunk:
    values, items = binder.values, binder.values.items
    launch = values.sizes.sized(_sizes(matmul), lambda sizes: _kernel(binder, matmul, sizes).launch)
    space = binder.spaces[matmul.team]
    gates, value = space.own(matmul.signal, 0), matmul.value
    x, slots, y = values.at(*matmul.own), values.at(*matmul.others), values.at(*matmul.whole)
    w = values.own(matmul.weight)
    bias = None if matmul.bias is None else values.own(matmul.bias)

    def run() -> None:
        added = None if bias is None else items[bias]
        due = space.base + value
        launch.now(lane.handle, items[x], items[w], items[slots], items[y], added, gates, due)

    return _aligned(lane, items, run, (x, w) if bias is None else (x, w, bias), y)


def _scatter(binder: Binder, lane: Lane, index: int, op: Fused, matmul: KernelMatmul) -> Thunk:
    values, items, kernel = binder.values, binder.values.items, matmul.kernel
    pieces, halved = kernel.pieces, kernel.own > kernel.pieces
    count = matmul.size * pieces + halved
    binding, counters = binder.binding, binder.spaces[matmul.team].local(count)
    tiles, runs, before = 0, 0, 0

    def due() -> int:
        return before + (binding.runs - runs) * tiles

    def launch_of(sizes: tuple[int, ...]) -> Launch:
        nonlocal tiles, runs, before
        kernel = _kernel(binder, matmul, sizes)
        assert kernel.subs == pieces, "validate asks for ranges of whole tiles"
        before, runs, tiles = due(), binding.runs, kernel.raised
        return kernel.launch

    launch = values.sizes.sized(_sizes(matmul), launch_of)

    def due_half() -> int:
        return due() // 2

    spot = 0
    for part, (chunk, piece) in zip(op.parts, matmul.order, strict=True):
        for place, member in enumerate(part, start=spot):
            if isinstance(member, Record):
                half = halved and chunk == matmul.rank and piece >= pieces - 1
                word = count - 1 if piece == pieces else chunk * pieces + piece
                reach = due_half if half else due
                binder.points[index, place] = CounterPoint(
                    binder.driver, counters + 4 * word, reach
                )
        spot += len(part)
    x, stage, own = values.at(*matmul.whole), values.at(*matmul.others), values.at(*matmul.own)
    w = values.own(matmul.weight)
    bias = None if matmul.bias is None else values.own(matmul.bias)

    def run() -> None:
        added = None if bias is None else items[bias]
        launch.now(lane.handle, items[x], items[w], items[stage], items[own], added, counters)

    return _aligned(lane, items, run, (x, w) if bias is None else (x, w, bias), own)


def _aligned(
    lane: Lane, items: list[torch.Tensor], run: Thunk, reads: tuple[int, ...], written: int
) -> Thunk:
    """`run`, with copies of what the caller gave that begins where TMA cannot."""
    first, second, third = reads if len(reads) == 3 else (*reads, reads[0])

    def careful() -> None:
        given = [(place, items[place]) for place in (*reads, written)]
        try:
            for place, tensor in given:
                if tensor.data_ptr() % support.ALIGNMENT:
                    items[place] = tensor.clone()
            run()
            if items[written] is not given[-1][1]:
                given[-1][1].copy_(items[written])
        finally:
            for place, tensor in given:
                items[place] = tensor

    slowly = lane.within(careful)

    def either() -> None:
        starts = items[first].data_ptr() | items[second].data_ptr() | items[third].data_ptr()
        if (starts | items[written].data_ptr()) % support.ALIGNMENT:
            slowly()
        else:
            run()

    return either


SUM = "interlace.sum_slots"
Awaited = tuple[tuple[int, ...], Callable[[], int]]
"""Words, and what they are to reach in this run."""


def sums_itself(binder: Binder, lane: Lane, op: Op) -> bool:
    """True if an op is a sum that may wait itself: sums.py, Note [Sums that wait]. Traces keep
    waits apart from sums."""
    options = binder.context.options
    if lane is not binder.binding.main or options.in_order or (options.trace and not options.graph):
        return False
    return isinstance(op, Call) and _summed(binder, op) is not None


def bind_sum(binder: Binder, lane: Lane, op: Call, awaited: Awaited | None = None) -> Thunk | None:
    """The launch that adds up the first dimension of a view, where its rest lies in a row; with the
    words that it awaits and what they are to reach."""
    views = _summed(binder, op)
    if views is None:
        return None
    slots, out = views
    box, to = binder.plan.box(slots), binder.plan.box(out)
    parts = number(box.sizes[0])
    from interlace.kernels import sum_slots
    from interlace.kernels.exchange.sums import SumSlots, few_registers

    dtype, (words, due) = DTYPES[box.dtype], awaited or ((), lambda: 0)
    facts: dict[str, Any] = {"size": parts, "dtype": dtype, "device": binder.context.device}
    wait = Words.of("wait", binder.driver, lane, words, due) if words else None

    def launch_of(numbers: tuple[int, ...]) -> tuple[int, int, bool, bool, Launch]:
        """The elements and the stride of a slot, and the kernel for them: whether it reads widely
        and waits itself."""
        count, stride = numbers
        aligned = not (count | stride) * dtype.itemsize % support.ALIGNMENT
        itself = len(words) > 0 and few_registers(parts, aligned)
        made = SumSlots(**facts, aligned=aligned, words=len(words) if itself else 0)
        return count, stride, aligned, itself, made.launch

    bound = binder.values.sizes.sized((to.numel, box.strides[0]), launch_of)
    items, a, b = binder.values.items, binder.values.own(slots), binder.values.own(out)

    def by_torch() -> None:
        sum_slots(items[a], out=items[b])

    slowly = lane.within(by_torch)

    def run() -> None:
        source, target = items[a].data_ptr(), items[b].data_ptr()
        count, stride, aligned, itself, launch = bound.now
        odd = aligned and (source | target) % support.ALIGNMENT
        if wait is not None and (odd or not itself):
            wait()
        if odd:
            slowly()
        elif itself:
            launch(lane.handle, source, stride, target, count, words, due())
        else:
            launch(lane.handle, source, stride, target, count)

    return run


def has_kernel(device: torch.device) -> bool:
    """True if the kernel that sums runs on the device."""
    return device.type == "cuda" and find_spec("triton") is not None


def _summed(binder: Binder, op: Call) -> tuple[View, View] | None:
    """The slots and the result of a sum that the kernel does."""
    if op.fn != SUM or not has_kernel(binder.context.device):
        return None
    (slots,) = op.views()
    (out,) = op.outs
    if not isinstance(out, View):
        return None
    box, to = binder.plan.box(slots), binder.plan.box(out)
    each = Box(0, box.sizes[1:], box.strides[1:], box.dtype)
    from interlace.kernels.launch import TYPES

    fits = DTYPES[box.dtype] in TYPES and box.dtype == to.dtype and box.numel > 0
    fits = fits and isinstance(box.sizes[0], int) and each.contiguous and to.contiguous
    return (slots, out) if fits else None
