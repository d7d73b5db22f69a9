"""What a run that does not go on is waiting for, in words.

raise CommTimeoutError(stalled(engine, context, ended=12))      # run 13 is the one
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlace.comm.board import named
from interlace.comm.cuda.words import reached
from interlace.errors import BackendError
from interlace.ir import Expect, Fused
from interlace.runtime.engine import Context

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


def stalled(engine: CudaEngine, context: Context, ended: int) -> str:
    """Which ranks the run after `ended` waits for, and where they are."""
    limit, teams = context.time_out_s, context.crew.teams
    try:
        lines = _awaited(engine, context, engine.entered - ended - 1)
        unread = ""
    except BackendError as error:
        lines, unread = [], f"; its signals cannot be read ({error})"
    if not lines:
        lines.append(
            f"no progress in {limit:g} s: rank {context.plan.rank} in "
            f"{context.plan.program.name}, in a collective or a computation{unread}"
        )
        others = [(t, [i for i in range(t.size) if i != t.me]) for t in teams.values()]
        lines += [team.control.where(members) for team, members in others if members]
    return "\n".join(lines)


def _awaited(engine: CudaEngine, context: Context, behind: int) -> list[str]:
    """The signals that are missing of a run with `behind` others behind it, and from whom."""
    limit, teams = context.time_out_s, context.crew.teams
    lines: list[str] = []
    missing: dict[str, set[int]] = {}
    for index, op in enumerate(context.plan.program.ops):
        for item in op.members if isinstance(op, Fused) else (op,):
            if not isinstance(item, Expect):
                continue
            space: Any = engine.spaces[item.team]
            base = space.base - behind * space.span
            members = context.plan.members(item.team, item.peer)
            late = [
                member
                for member in members
                if not reached(space.value(item.signal, member), base + item.value)
            ]
            if late:
                missing.setdefault(item.team, set()).update(late)
                if not lines:
                    lines.append(f"no progress in {limit:g} s: {context.flight.describe(index)}")
    for name, late in missing.items():
        lines.append(teams[name].control.where(sorted(late)))
    for side in engine.sides:
        late = side.late(behind)
        if late:
            ranks = side.team.ranks
            lines.append(f"{named([ranks[i] for i in late])} did not end the run before last")
    return lines
