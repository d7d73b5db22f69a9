"""A Fused op as one persistent kernel, where one of ours does just what its parts say.

`bind_kernel` gives None for whatever else, and its members then run one after another: slower, and
the same result.

Note [The same bits in order]
    With the option `in_order` members run one by one. A matmul's bits may depend on what kernel
    does it, so those of a Fused that has a kernel are then done by the same code, part by part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlace.ir import Call, Fused
from interlace.kernels.gemm import support
from interlace.runtime.cuda.lanes import CounterPoint, Lane, Thunk
from interlace.runtime.cuda.launches.parts import (
    GatherParts,
    Matmul,
    ScatterParts,
    Shape,
    gather_of,
    scatter_of,
)
from interlace.runtime.values import DTYPES

if TYPE_CHECKING:
    from interlace.runtime.cuda.binder import Binder


def bind_kernel(binder: Binder, lane: Lane, index: int, op: Fused) -> Thunk | None:
    """The launch of the kernel that does these parts, or None."""
    gather = gather_of(binder.plan, op)
    if gather is not None and _serves(binder, gather.shape):
        return _gather(binder, lane, gather)
    scatter = scatter_of(binder.plan, op, index)
    if scatter is not None and _serves(binder, scatter.shape):
        return _scatter(binder, lane, scatter)
    return None


def bind_member(binder: Binder, lane: Lane, index: int, op: Fused, call: Call) -> Thunk | None:
    """One matmul of a Fused by the code of its kernel: Note [The same bits in order]."""
    parts = gather_of(binder.plan, op) or scatter_of(binder.plan, op, index)
    product = Matmul.of(call)
    if parts is None or product is None or not _serves(binder, parts.shape):
        return None
    from interlace.kernels.gemm.gather_matmul import GatherMatmul

    (rows, _), shape, whole = binder.plan.box(product.a).sizes, parts.shape, _kernel(binder, parts)
    if isinstance(parts, ScatterParts) and not _in_ranges(whole, parts):
        return None
    config = whole.config
    facts = {**_facts(shape, parts.bias is not None), "rows": rows, "size": 1, "rank": 0}
    kernel = GatherMatmul(**facts, device=binder.context.device, config=config)
    values, bias = binder.values, product.bias
    a, b, out = values.own(product.a), values.own(product.b), values.own(product.out)
    c = None if bias is None else values.own(bias)
    items, launch = values.items, kernel.launch

    def run() -> None:
        added = None if c is None else items[c]
        launch(lane.handle, items[a], items[b], None, items[out], added, 0, 0)

    return _aligned(lane, items, run, (a, b) if c is None else (a, b, c), out)


def _serves(binder: Binder, shape: Shape) -> bool:
    """Whether a kernel takes these sizes and this element type on this GPU."""
    facts = _facts(shape, bias=False)
    asked = {name: facts[name] for name in ("rows", "inner", "columns", "dtype", "size")}
    return support.refuse(**asked, device=binder.context.device) is None


def _facts(shape: Shape, bias: bool) -> dict[str, Any]:
    return {
        "rows": shape.rows,
        "inner": shape.inner,
        "columns": shape.columns,
        "size": shape.size,
        "rank": shape.rank,
        "dtype": DTYPES[shape.dtype],
        "transposed": shape.transposed,
        "bias": bias,
    }


def _kernel(binder: Binder, parts: GatherParts | ScatterParts) -> Any:
    """The kernel for these parts, compiled."""
    facts = _facts(parts.shape, parts.bias is not None)
    if isinstance(parts, GatherParts):
        from interlace.kernels.gemm.gather_matmul import GatherMatmul

        return GatherMatmul(**facts, device=binder.context.device)
    from interlace.kernels.gemm.scatter_matmul import ScatterMatmul

    return ScatterMatmul(**facts, subs=parts.subs, lead=parts.lead, device=binder.context.device)


def _in_ranges(kernel: Any, parts: ScatterParts) -> bool:
    """Whether a kernel tells of the same ranges of rows as the parts."""
    length = parts.shape.rows // parts.subs
    ranges = [range(sub * length, (sub + 1) * length) for sub in range(parts.subs)]
    return kernel.subs == parts.subs and ranges == [kernel.sub_rows(s) for s in range(parts.subs)]


def _gather(binder: Binder, lane: Lane, parts: GatherParts) -> Thunk:
    values, items = binder.values, binder.values.items
    launch = _kernel(binder, parts).launch
    space = binder.links.spaces[parts.team]
    gates, value = space.own(parts.signal, 0), parts.value
    x, slots, y = values.at(*parts.x), values.at(*parts.slots), values.at(*parts.y)
    w = values.own(parts.weight)
    bias = None if parts.bias is None else values.own(parts.bias)

    def run() -> None:
        launch(
            *(lane.handle, items[x], items[w], items[slots], items[y]),
            *(None if bias is None else items[bias], gates, space.base + value),
        )

    return _aligned(lane, items, run, (x, w) if bias is None else (x, w, bias), y)


def _scatter(binder: Binder, lane: Lane, parts: ScatterParts) -> Thunk | None:
    shape, values, items = parts.shape, binder.values, binder.values.items
    kernel: Any = _kernel(binder, parts)
    if not _in_ranges(kernel, parts):
        return None
    runs, counters = binder.links.runs, binder.links.words(parts.team, shape.size * parts.subs)
    tiles = kernel.raised

    def due() -> int:
        return runs() * tiles

    for spot, chunk, sub in parts.records:
        address = counters + 4 * (chunk * parts.subs + sub)
        binder.points[spot] = CounterPoint(binder.driver, address, due)
    x, stage, own = values.at(*parts.x), values.at(*parts.stage), values.at(*parts.own)
    w = values.own(parts.weight)
    bias = None if parts.bias is None else values.own(parts.bias)
    launch = kernel.launch

    def run() -> None:
        added = None if bias is None else items[bias]
        launch(lane.handle, items[x], items[w], items[stage], items[own], added, counters)

    return _aligned(lane, items, run, (x, w) if bias is None else (x, w, bias), own)


def _aligned(
    lane: Lane, items: list[Any], run: Thunk, reads: tuple[int, ...], written: int
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
