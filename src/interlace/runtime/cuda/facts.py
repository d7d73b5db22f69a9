"""What an engine has to know of a Program before it runs.

hears_all(plan, "tp")        # whether a run awaits a signal of every other rank
keeps_memory(context)        # whether runs share memory
waits_in_exchanges(context)  # whether a run waits for peers in exchange kernels alone
"""

from __future__ import annotations

from collections.abc import Iterator

from interlace.ir import (
    Alloc,
    Call,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    Get,
    Group,
    Notify,
    Op,
    Put,
    Recv,
    Send,
)
from interlace.runtime.engine import Context
from interlace.runtime.plan import Plan


def items(plan: Plan) -> Iterator[Op]:
    """The ops, and in place of a Fused its members."""
    for op in plan.program.ops:
        yield from op.members if isinstance(op, Fused) else (op,)


def hears_all(plan: Plan, team: str) -> bool:
    """Whether a run awaits a signal of every other rank of a team."""
    member = plan.where.member(team)
    heard = {
        source
        for item in items(plan)
        if isinstance(item, Expect) and item.team == team
        for source in plan.members(team, item.peer)
    }
    return len(heard - {member.index}) == len(member.ranks) - 1 > 0


def waits_in_exchanges(context: Context) -> bool:
    """Whether all that a run waits for its peers in are exchange kernels."""
    found = list(items(context.plan))
    others = Expect | Get | Group | Notify | Put | Recv | Send
    return (
        not context.crew.backends
        and any(isinstance(item, Collective) for item in found)
        and not any(isinstance(item, others) for item in found)
    )


def keeps_memory(context: Context) -> bool:
    """Whether runs share memory that only one of them may use at a time, as far as is known."""
    program = context.plan.program
    regions = {region.name for region in program.regions}
    return context.values.arena_nbytes > 0 or not all(
        isinstance(op, Alloc | Copy | Free)
        or (isinstance(op, Call) and op.fn.startswith("aten.") and op.fn not in regions)
        for op in program.ops
    )
