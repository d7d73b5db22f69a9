"""What a Program needs of its teams on their devices: slots, words, and NCCL.

shared = share(plan, teams, device, backends, time_out_s=60)       # all ranks, together
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from interlace.comm import Registered, TeamComm
from interlace.comm.cuda.slots import CudaSlot, slot_keys
from interlace.comm.cuda.space import CudaSpace
from interlace.ir import Expect, Fused, Get, Notify, Op, Program, Put
from interlace.runtime.cuda.launches.exchanges import ensure_area
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.prepare.registered import Wanted, written
from interlace.runtime.values import nbytes

GRAPHS = ("even", "odd")


@dataclass(frozen=True, slots=True)
class CudaShared:
    """Slots by buffer and words by team; with graphs, words for each of the two as well."""

    slots: Mapping[str, CudaSlot]
    spaces: Mapping[str, CudaSpace]
    graph_spaces: tuple[Mapping[str, CudaSpace], ...]


def share(
    plan: Plan,
    teams: Mapping[str, TeamComm],
    device: torch.device,
    graph: bool,
    time_out_s: float,
    kept: ExitStack,
) -> CudaShared:
    """Sets up, for every team of the Program in an order that all ranks share; `kept` undoes it."""
    slots: dict[str, CudaSlot] = {}
    spaces: dict[str, CudaSpace] = {}
    graphs: tuple[dict[str, CudaSpace], ...] = tuple({} for _ in GRAPHS) if graph else ()
    keys = slot_keys(plan.takes, plan.buffers)
    signals, span = signals_of(plan.program)
    raises = reaches(plan, Notify)
    for name, team in sorted(teams.items(), key=lambda item: (item[1].topic, item[0])):
        side = team.cuda(device, time_out_s)
        topic = f"{team.num_prepared}/{name}"
        private = f"{topic}/" if graph else ""  # a graph has its slots' addresses in it
        wanted: dict[str, int] = {}
        mine = [buffer for buffer, of_team in plan.takes.items() if of_team == name]
        for buffer in mine:
            declared = plan.buffers[buffer]
            wanted[private + keys[buffer]] = declared.offset + nbytes(declared)
        found: Any = side.slots.ensure(topic, wanted, time_out_s)
        for slot in found.values():
            kept.callback(side.slots.let_go, slot)
        slots.update({buffer: found[private + keys[buffer]] for buffer in mine})
        known, uses = signals.get(name, ()), name in signals or bool(mine)
        gets = [
            keys[op.src.buffer]
            for op in plan.program.ops
            if isinstance(op, Get) and op.src.buffer in keys
        ]
        rest = (known, span, uses, gets, time_out_s)
        spaces[name] = CudaSpace(side, topic, *rest)
        kept.callback(spaces[name].close)
        mark_gotten({keys[buffer]: slots[buffer] for buffer in mine}, spaces[name].gotten)
        for kind, made in zip(GRAPHS, graphs, strict=False):
            words = (*known, "ended"), *rest[1:], raises.get(name)
            made[name] = CudaSpace(side, f"{topic}/{kind}", *words)
            kept.callback(made[name].close)
        areas = [
            plan.specs[index]
            for index, turn in plan.turns.items()
            if turn.team == name and turn.backend == "peer"
        ]
        ensure_area(side, topic, areas, time_out_s)
    return CudaShared(slots, spaces, graphs)


def mark_gotten(slots: Mapping[str, CudaSlot], gotten: Collection[str]) -> None:
    """Notes on slots, which other Executors have as well, that peers read them by Get."""
    for name in slots.keys() & set(gotten):
        slots[name].gotten = True


def register(
    plan: Plan,
    teams: Mapping[str, TeamComm],
    device: torch.device,
    callers: Wanted,
    time_out_s: float,
    kept: ExitStack,
) -> dict[str, Registered]:
    """The caller's tensors that peers reach, by name; `kept` lets go of the peers'."""
    found: dict[str, Registered] = {}
    inputs = [buffer.name for buffer in plan.program.params if buffer.kind == "input"]
    facts = inputs, written(plan.program), time_out_s
    for name, team in sorted(teams.items(), key=lambda item: (item[1].topic, item[0])):
        if name in callers:
            registry = team.cuda(device, time_out_s).registry
            made = registry.register(f"{team.num_prepared}/{name}", callers[name], *facts)
            found.update(made)
            for mine in made.values():
                kept.callback(registry.let_go, mine)
    return found


def signals_of(program: Program) -> tuple[dict[str, tuple[str, ...]], int]:
    """The signals that this rank awaits, for every team that it reaches into or that may reach
    into it, and more than the highest value."""
    found: dict[str, dict[str, None]] = {}
    span = 1
    for op in program.ops:
        members: tuple[Op, ...] = op.members if isinstance(op, Fused) else (op,)
        for member in members:
            if isinstance(member, Notify | Expect):
                span = max(span, member.value + 1)
                names = found.setdefault(member.team, {})
                if isinstance(member, Expect):
                    names[member.signal] = None
            elif isinstance(member, Put | Get):
                found.setdefault(member.team, {})
    return {team: tuple(names) for team, names in found.items()}, span


def reaches(plan: Plan, kind: type[Notify | Expect]) -> dict[str, dict[str, list[int]]]:
    """By team and signal: the highest value that each member is told by this rank (`Notify`), or
    is awaited of it (`Expect`)."""
    found: dict[str, dict[str, list[int]]] = {}
    for op in plan.program.ops:
        for item in op.members if isinstance(op, Fused) else (op,):
            if isinstance(item, kind):
                none = [0] * len(plan.where.member(item.team).ranks)
                values = found.setdefault(item.team, {}).setdefault(item.signal, none)
                for member in plan.members(item.team, item.peer):
                    values[member] = max(values[member], item.value)
    return found
