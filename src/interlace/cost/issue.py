"""What an op costs the host: a run takes at least as long as it takes to issue.

    >>> issue_seconds(op, default_machine("cuda"), {"tp": 4})
    8e-06

A machine that has no figure for a kind of call takes `issue_s`, or for events what a stream takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from interlace.cost.machine import Machine
from interlace.cost.op_times import op_kind, unknown
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
    HostSync,
    Notify,
    Op,
    Others,
    Program,
    Put,
    Record,
    Recv,
    Send,
    Wait,
)


def issue_seconds(op: Op, machine: Machine, sizes: Mapping[str, int]) -> float:
    """How long the host takes to issue an op; `sizes` has the number of ranks of each team."""
    cheap = op_kind(op) in ("sync", "memory")
    other = min(machine.event_s, machine.issue_s) if cheap else machine.issue_s
    if not machine.issue:
        return other
    what, count = _calls(op, sizes)
    return count * dict(machine.issue).get(what, other)


def _calls(op: Op, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Which call issues an op, and how many of them."""
    match op:
        case Call(fn=fn):
            return ("call" if fn.startswith("aten.") else "kernel"), 1
        case Fused():
            return "kernel", 1
        case Copy():
            return "copy", 1
        case Put() | Get():
            return "peer", 1
        case Collective(backend=backend):
            return ("kernel" if backend == "peer" else "collective"), 1
        case Send() | Recv():
            return "collective", 1
        case Record() | Wait():
            return "event", 1
        case Notify(peer=peer, team=team) | Expect(peer=peer, team=team):
            return "signal", sizes[team] - 1 if isinstance(peer, Others) else 1
        case Alloc(buffer=buffer) if buffer.kind == "symmetric" and buffer.team:
            # Taking a slot awaits that every peer released it, freeing it tells them so.
            return "signal", 2 * (sizes[buffer.team] - 1)
        case Alloc() | Free():
            return "event", 0
        case Group() | HostSync():
            return "", 1
        case _:
            raise unknown(op)


def run_issue_seconds(program: Program, machine: Machine) -> float:
    """How long the host of one rank takes to issue a run, joining all streams included."""
    sizes = {team.name: team.size for team in program.teams}
    sides = max(0, len(program.streams()) - 1)
    joins = 4 * sides * dict(machine.issue).get("event", 0.0)
    return joins + sum(issue_seconds(op, machine, sizes) for op in program.ops)
