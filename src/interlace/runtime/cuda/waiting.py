"""When a kernel that waits for peers may begin.

    put_of(plan)[index]       # the first put that the peers' kernels like that Fused wait for

Note [Kernels that wait]
    A gather's kernel holds all processors while it waits for what the peers put. Whatever a rank
    has to do before its own puts must not need a processor then: each rank would wait for a put
    that stands behind a sum or a collective that no processor is left for. So the computing stream
    waits, before such a kernel, for all that stands before the rank's own puts on their stream;
    these are copies, and need none. What makes chunks for a reduction waits for nobody.
"""

from __future__ import annotations

from interlace.ir import Alloc, Call, Expect, Free, Fused, Put, Record, Wait
from interlace.runtime.plan import Plan


def put_of(plan: Plan) -> dict[int, int]:
    """By Fused that awaits signals: the first put into the slots that it reads, unless nothing but
    waits stands before it on its stream."""
    found: dict[int, int] = {}
    puts: dict[str, int] = {}
    busy = set[str]()
    for index, op in enumerate(plan.program.ops):
        if isinstance(op, Put) and op.stream in busy:
            puts.setdefault(op.dst.buffer, index)
        elif isinstance(op, Put):
            puts.setdefault(op.dst.buffer, -1)
        if isinstance(op, Fused) and any(isinstance(member, Expect) for member in op.members):
            read = [v.buffer for m in op.members if isinstance(m, Call) for v in m.views()]
            first = [puts[name] for name in read if puts.get(name, -1) >= 0]
            if first:
                found[index] = min(first)
        if not isinstance(op, Alloc | Free | Record | Wait):
            busy.add(op.stream)
    return found
