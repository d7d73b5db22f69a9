"""The calls that one kernel is to do: what `schedule` and `plan_memory` keep together for `fuse`.

A group is a matmul of a site whose strategy is `fused`, chunk by chunk. The sum of a reduction is
no part of it; what it adds is awaited on a stream of its own, as waiting keeps a stream. If the own
rows are made piece by piece, all of them but the last are summed there, beside the kernel.

    >>> groups(program)
    [(4, 6, 8, 10)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from interlace.ir import Call, Copy, Expect, Get, Op, Program
from interlace.ir.operators import matmul_of

SUM = "interlace.sum_slots"
FUSED = "fused"
ALL_REDUCE = "matmul_all_reduce"


def groups(program: Program) -> list[tuple[int, ...]]:
    """The calls of each group as list indices, in order."""
    kinds = {site.id: site.kind for site in program.sites if site.strategy == FUSED}
    found: dict[object, list[int]] = {}
    for index, op in enumerate(program.ops if kinds else ()):
        if isinstance(op, Call) and op.site in kinds and _fills_fusable(op):
            gathers = kinds[op.site] == "all_gather_matmul"
            found.setdefault((op.site, op.outs[0].buffer if gathers else ""), []).append(index)
    return [tuple(members) for members in found.values() if len(members) > 1]


def arrivals(program: Program) -> list[int]:
    """What sites that put await before they sum, with the sums beside a kernel, as list indices, in
    order; of a fused all-reduce also what is fetched of these sums."""
    sites = {s.id for s in program.sites if s.strategy == FUSED or s.protocol == "put"}
    back = {s.id for s in program.sites if s.strategy == FUSED and s.kind == ALL_REDUCE}
    found, awaited = list[int](), dict[int | None, list[int]]()
    made, sums = Counter[str](), dict[str, list[int]]()  # by buffer: matmuls that fill it, its sums
    for index, op in enumerate(program.ops if sites else ()):
        if isinstance(op, Expect):
            awaited.setdefault(op.site, []).append(index)
        elif isinstance(op, Call) and op.fn == SUM and op.site in sites:
            found += awaited.pop(op.site, [])
            (slots,) = op.views()
            sums.setdefault(slots.buffer, []).append(index)
        elif isinstance(op, Call) and op.site in sites and _fills_fusable(op):
            made[op.outs[0].buffer] += 1
        elif isinstance(op, Get | Copy) and op.site in back:
            found += [*awaited.pop(op.site, []), index]
    for slots, mine in sums.items():
        if made[slots] == len(mine):
            found += mine[:-1]
    return sorted(found)


def used_by(ops: Iterable[Op]) -> set[str]:
    """The buffers that ops read or write, a peer's copies included."""
    return {access.view.buffer for op in ops for access in (*op.reads(), *op.writes())}


def _fills_fusable(op: Call) -> bool:
    """Whether a call is a matmul that the kernels compute, into given memory."""
    matmul = matmul_of(op.fn)
    return matmul is not None and matmul.fusable and op.fn == matmul.into
