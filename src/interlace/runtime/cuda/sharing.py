"""Resources that a Program needs of its teams on their devices: slots, words, and NCCL.

resources = share(request)       # all ranks, together
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch

from interlace.comm.cuda.memory import CudaSlot, slot_keys
from interlace.comm.cuda.words import CudaSpace
from interlace.ir import Program
from interlace.runtime.cuda.launches.transfers import ensure_area
from interlace.runtime.engine import ShareRequest, TeamResources
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.values import nbytes
from interlace.verify.reuse import shared_places

GRAPHS = ("even", "odd")


def share(request: ShareRequest) -> TeamResources:
    """Sets up, for every team of the Program in an order that all ranks share."""
    with torch.cuda.device(request.device):
        torch.cuda.current_stream().query()  # gives this thread the context that the driver wants
        shared = _share(request)
        for team, backend in request.backends:
            request.teams[team].backend(backend, request.device.type, request.timeout_s)
    return shared


def _share(request: ShareRequest) -> TeamResources:
    plan, device, limit = request.plan, request.device, request.timeout_s
    graph, kept = request.graph, request.kept
    slots: dict[str, Any] = {}
    spaces: dict[str, Any] = {}
    graphs: tuple[dict[str, CudaSpace], ...] = tuple({} for _ in GRAPHS) if graph else ()
    keys = slot_keys(plan.takes, plan.buffers, lambda: shared_places(request.programs()))
    signals, span = signals_of(plan.program)
    raises = reaches(plan, "raises")
    request.refuse_memory()
    for name, team in request.ordered():
        side = team.cuda(device, limit)
        topic = f"{team.num_prepared}/{name}"
        private = f"{topic}/" if graph else ""  # a graph has its slots' addresses in it
        mine = [plan.buffers[taken] for taken, of_team in plan.takes.items() if of_team == name]
        named = {b.name: private + keys[b.name] for b in mine}
        wanted: dict[str, int] = {}
        for b in mine:
            size, key = b.offset + nbytes(b), named[b.name]
            wanted[key] = max(wanted.get(key, 0), size)
        found: Any = side.slots.ensure(topic, wanted, limit)
        for slot in found.values():
            kept.callback(side.slots.let_go, slot)
        slots.update({name: found[key] for name, key in named.items()})
        known, uses = signals.get(name, ()), name in signals or bool(mine)
        copies = [op for op in plan.program.ops if op.one_sided]
        got = [a.view.buffer for op in copies for a in op.reads() if a.peer is not None]
        rest = known, span, uses, [named[buffer] for buffer in got if buffer in named], limit
        spaces[name] = CudaSpace(side, topic, *rest)
        kept.callback(spaces[name].close)
        mark_gotten(found, spaces[name].gotten)
        for kind, made in zip(GRAPHS, graphs, strict=False):
            words = (*known, "ended"), *rest[1:], raises.get(name)
            made[name] = CudaSpace(side, f"{topic}/{kind}", *words)
            kept.callback(made[name].close)
        areas = [
            plan.specs[index]
            for index, turn in plan.turns.items()
            if turn.team == name and turn.backend == "peer"
        ]
        ensure_area(side, topic, areas, limit)
    return TeamResources(request.teams, slots, spaces, {}, {}, graphs)


def mark_gotten(slots: Mapping[str, CudaSlot], gotten: Collection[str]) -> None:
    """Notes on slots, which other Executors have as well, that peers read them by Get."""
    for name in slots.keys() & set(gotten):
        slots[name].gotten = True


def signals_of(program: Program) -> tuple[dict[str, tuple[str, ...]], int]:
    """The signals that this rank awaits, by team, and more than the highest value."""
    found: dict[str, dict[str, None]] = {}
    span = 1
    for op in program.ops:
        for access in (*op.reads(), *op.writes()) if op.one_sided else ():
            if access.team is not None:
                found.setdefault(access.team, {})
        for order in (member.ordering() for member in op.steps):
            for level in filter(None, (order.raises, order.expects)):
                span = max(span, level.value + 1)
                names = found.setdefault(level.team, {})
                if level is order.expects:
                    names[level.signal] = None
    return {team: tuple(names) for team, names in found.items()}, span


def reaches(plan: Plan, kind: Literal["raises", "expects"]) -> dict[str, dict[str, list[int]]]:
    """Highest value by team and signal that each member is told, or that is awaited of it."""
    found: dict[str, dict[str, list[int]]] = {}
    for order in (item.ordering() for op in plan.program.ops for item in op.steps):
        level = order.raises if kind == "raises" else order.expects
        if level is not None:
            none = [0] * len(plan.where.member(level.team).ranks)
            values = found.setdefault(level.team, {}).setdefault(level.signal, none)
            for member in plan.members(level.team, level.peer):
                values[member] = max(values[member], level.value)
    return found


def hears_all(plan: Plan, team: str) -> bool:
    """True if a run awaits a signal of every other rank of a team."""
    member, signals = plan.where.member(team), reaches(plan, "expects").get(team, {})
    heard = {source for told in signals.values() for source, value in enumerate(told) if value}
    return len(heard - {member.index}) == len(member.ranks) - 1 > 0
