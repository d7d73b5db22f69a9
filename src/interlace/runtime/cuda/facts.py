"""What an engine has to know of a Program before it runs.

hears_all(plan, "tp")        # whether a run awaits a signal of every other rank
keeps_memory(context)        # whether runs share memory
"""

from __future__ import annotations

from interlace.ir import Alloc, Call, Copy, Expect, Free, Fused
from interlace.runtime.engine import Context
from interlace.runtime.prepare.plan import Plan


def hears_all(plan: Plan, team: str) -> bool:
    """Whether a run awaits a signal of every other rank of a team."""
    member = plan.where.member(team)
    heard = {
        source
        for op in plan.program.ops
        for item in (op.members if isinstance(op, Fused) else (op,))
        if isinstance(item, Expect) and item.team == team
        for source in plan.members(team, item.peer)
    }
    return len(heard - {member.index}) == len(member.ranks) - 1 > 0


def keeps_memory(context: Context) -> bool:
    """Whether runs share memory that only one of them may use at a time, as far as is known."""
    program = context.plan.program
    regions = {region.name for region in program.regions}
    return context.values.arena_nbytes > 0 or not all(
        isinstance(op, Alloc | Copy | Free)
        or (isinstance(op, Call) and op.fn.startswith("aten.") and op.fn not in regions)
        for op in program.ops
    )
