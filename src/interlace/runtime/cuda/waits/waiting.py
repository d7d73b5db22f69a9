"""When a kernel that waits for peers may begin.

    holds(plan, near)[index]  # what must be at hand, or done, before the Fused at `index` begins

Note [Kernels that wait]
    A gather's kernel holds all processors while it waits for what the peers put. Whatever a rank
    has to do before its own puts must not need a processor then: each rank would wait for a put
    behind a collective or a sum that no processor is left for. So the computing stream waits,
    before such a kernel, until no such op stands before any put that the peers' kernels wait for.
    Puts of bytes in a row are copies, and need none. Within a GPU that ranks share copies are
    kernels: there it waits until all puts are done that the peers' kernels wait for.

    Streams may share a queue of the device, which goes by the order of issue: a sum that runs
    beside a kernel stands before all puts that are issued after it. And on a peer whose streams
    share otherwise, puts may stand behind what it fetches of such sums: where peers are told of a
    sum, it is done before the kernel begins.

    What awaits a signal that its own stream raised before adds nothing, where all ranks have one
    list: the peers raise it on that stream too, behind what stands before it, which counts by
    itself.
"""

from __future__ import annotations

from collections.abc import Collection

from interlace.ir import Access, Call, Copy, Op
from interlace.ir.lifetimes import callers
from interlace.runtime.prepare.plan import Plan

Hold = tuple[int, bool]
"""An op, and whether it must be done; else all that stands before it."""


def holds(plan: Plan, near: Collection[str] = ()) -> dict[int, list[Hold]]:
    """Holds of each Fused that awaits signals: on each stream, the first put behind the last op
    that may need a processor, of the puts into the slots that it reads; and the last sum that
    peers are told of. `near` are the teams of which other ranks use this GPU."""
    found: dict[int, list[Hold]] = {}
    main, ops = callers(plan.program), plan.program.ops
    last: dict[str, int] = {}  # by stream: the last op that may need a processor
    beside: dict[
        str, int
    ] = {}  # by stream but main: the last Call or Copy that main has not awaited,
    told: dict[str, int] = {}  # and the last such Call that a Notify follows
    tells = {op.stream: index for index, op in enumerate(ops) if op.ordering().raises}
    puts: dict[str, dict[str, int]] = {}  # by buffer and stream: the put that waits for it
    raised: dict[tuple[str, str, str], int] = {}  # by team, signal and stream: how far
    for index, op in enumerate(ops):
        order = op.ordering()
        if (told_by := order.raises) is not None and plan.alike:
            raised[told_by.team, told_by.signal, op.stream] = told_by.value
        if (level := order.expects) is not None:
            if raised.get((level.team, level.signal, op.stream), 0) >= level.value:
                continue
        if (put := _put(op)) is not None:
            mine = puts.setdefault(put.view.buffer, {})
            before = max(last.get(op.stream, -1), -1, *beside.values())
            if put.team in near or before > mine.get(op.stream, -1):
                mine[op.stream] = index
        if op.steps != (op,) and any(step.ordering().expects for step in op.steps):
            read = {access.view.buffer for access in op.reads()}
            needed = {
                (at, (there := _put(ops[at])) is not None and there.team in near)
                for name in read
                for at in puts.get(name, {}).values()
            }
            found[index] = sorted(needed | {(call, True) for call in told.values()})
        if _may_need_processor(plan, index, op, main, near):
            last[op.stream] = index
        if isinstance(op, Call | Copy) and op.stream != main:
            beside[op.stream] = index
            if isinstance(op, Call) and index < tells.get(op.stream, -1):
                told[op.stream] = index
        if order.waits is not None and op.stream == main:
            record = plan.waits[index, 0][0]
            for awaited in (beside, told):
                if record > awaited.get(ops[record].stream, record):
                    del awaited[ops[record].stream]
    return {index: needed for index, needed in found.items() if needed}


def _may_need_processor(plan: Plan, index: int, op: Op, main: str, near: Collection[str]) -> bool:
    """True if an op, or what it waits for, may need a processor; earlier ops of `main` are over."""
    order = op.ordering()
    if (put := _put(op)) is not None:
        whole = all(plan.box(access.view).contiguous for access in (*op.reads(), put))
        return put.team in near or not whole
    if order.waits is not None:
        return plan.program.ops[plan.waits[index, 0][0]].stream != main
    return not (order.takes or order.frees or order.records or order.raises)


def _put(op: Op) -> Access | None:
    """Access by which an op writes memory of a peer; None if it is no Put."""
    return next((access for access in op.writes() if access.peer is not None), None)
