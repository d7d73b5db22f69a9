"""What a run that does not go on is waiting for, in words.

raise CommTimeoutError(stalled(engine, context, ended=12))      # run 13 is the one
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from interlace.comm.cuda.words import reached
from interlace.comm.rendezvous.board import named
from interlace.errors import BackendError
from interlace.ir import Collective, Expect, Fused, Group, Op, Recv, Send
from interlace.runtime.engine import Context

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


def stalled(engine: CudaEngine, context: Context, ended: int) -> str:
    """Which ranks the run after `ended` waits for, and where they are."""
    limit, teams, behind = context.time_out_s, context.crew.teams, engine.entered - ended - 1
    try:
        lines, place = _awaited(engine, context, behind), "in a collective or a computation"
    except BackendError as error:
        lines, place = [], f"{_first_wait(context, behind)}; its signals cannot be read ({error})"
    if not lines:
        lines.append(
            f"no progress in {limit:g} s: rank {context.plan.rank} in "
            f"{context.plan.program.name}, {place}"
        )
        others = [(t, [i for i in range(t.size) if i != t.me]) for t in teams.values()]
        lines += [team.control.where(members) for team, members in others if members]
    return "\n".join(lines)


def _awaited(engine: CudaEngine, context: Context, behind: int) -> list[str]:
    """The signals that are missing of a run with `behind` others behind it, and from whom."""
    limit, teams = context.time_out_s, context.crew.teams
    lines: list[str] = []
    missing: dict[str, set[int]] = {}
    for index, item in _single_ops(context):
        if not isinstance(item, Expect):
            continue
        space: Any = engine.spaces[item.team]
        base = space.base - behind * space.span
        late = [
            member
            for member in context.plan.members(item.team, item.peer)
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


def _first_wait(context: Context, behind: int) -> str:
    """The first op that waits for a rank that has not entered the run, or else for any rank."""
    plan, first = context.plan, -1
    absent = {name: team.control.absent(behind) for name, team in context.crew.teams.items()}
    for index, item in _single_ops(context):
        if isinstance(item, Expect | Collective | Send | Recv):
            late = absent[item.team]
            if not isinstance(item, Collective):
                late = late.intersection(plan.members(item.team, item.peer))
            first = index if first < 0 else first
            if late:
                return f"at {context.flight.text(index)} or after it"
    return f"at {context.flight.text(first)} or after it" if first >= 0 else "in a computation"


def _single_ops(context: Context) -> Iterator[tuple[int, Op]]:
    """The ops, and the parts of those that have some, with their place in the Program."""
    for index, op in enumerate(context.plan.program.ops):
        parts = op.members if isinstance(op, Fused) else op.ops if isinstance(op, Group) else (op,)
        for part in parts:
            yield index, part
