"""What an Executor shares with other ranks: slots, words and backends, set up once by all together.

shared = share(plan, teams, device, options)
shared.slots["full"], shared.spaces["tp"]
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.comm import Registered, TeamComm, Workspace, share_on_host
from interlace.comm.backends import BACKENDS
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.prepare.registered import Wanted, written


@dataclass(frozen=True, slots=True)
class Shared:
    """By buffer, by team, and the backends by team and name."""

    slots: Mapping[str, Any]
    spaces: Mapping[str, Any]
    wanted: tuple[tuple[str, str], ...]
    """Team and name of each backend of torch that a rank of the team uses."""
    graph_spaces: tuple[Mapping[str, Any], ...] = ()
    registered: Mapping[str, Registered] = field(default_factory=dict[str, Registered])

    def backends(
        self, teams: Mapping[str, TeamComm], device: torch.device, time_out_s: float
    ) -> dict[tuple[str, str], Any]:
        """The backends, after a reset new ones."""
        return {
            (name, backend): teams[name].backend(backend, device.type, time_out_s)
            for name, backend in self.wanted
        }


def share(
    plan: Plan,
    teams: Mapping[str, TeamComm],
    device: torch.device,
    graph: bool,
    time_out_s: float,
    callers: Wanted,
    backends: Sequence[Sequence[str]],
    kept: contextlib.ExitStack,
) -> Shared:
    """Sets all of it up; every rank of the teams calls this, in one order.

    `callers` has the tensors of registered parameters, `backends` those that any rank needs, for
    each of the teams. Closing `kept` gives back what there is, also after an error: slots, words
    and mappings; nothing that used them may be under way.
    """
    needed = [(team, name) for team, each in zip(teams, backends, strict=True) for name in each]
    wanted = tuple(sorted(needed, key=lambda key: (BACKENDS.index(key[1]), key[0])))
    limit = time_out_s
    if device.type == "cuda":
        from interlace.runtime.cuda import sharing  # which needs the CUDA driver

        with torch.cuda.device(device):
            found = sharing.share(plan, teams, device, graph, limit, kept)
            registered = sharing.register(plan, teams, device, callers, limit, kept)
            shared = Shared(found.slots, found.spaces, wanted, found.graph_spaces, registered)
            shared.backends(teams, device, limit)
        return shared
    slots: dict[str, Any] = {}
    spaces: dict[str, Any] = {}
    registered: dict[str, Registered] = {}
    inputs = [buffer.name for buffer in plan.program.params if buffer.kind == "input"]
    ordered = sorted(dict.fromkeys(teams.values()), key=lambda team: team.topic)
    for team in ordered:
        for name in (name for name, other in teams.items() if other is team):
            topic = f"{team.num_prepared}/{name}"
            found_slots = team.slots.ensure(topic, plan.slots.get(name, {}), limit)
            for slot in found_slots.values():
                kept.callback(team.slots.let_go, slot)
            for buffer, of_team in plan.takes.items():
                if of_team == name:
                    slots[buffer] = found_slots[plan.slot_of(buffer)]
            spaces[name] = Workspace(team, topic, plan.demands[name], limit)
            for _, backend in (key for key in wanted if key[0] == name):
                team.backend(backend, device.type, limit)
            if name in callers:
                facts = inputs, written(plan.program), limit
                registered.update(share_on_host(team, topic, callers[name], *facts))
    return Shared(slots, spaces, wanted, registered=registered)


class Kept:
    """What an Executor must give back. It outlives the Executor, which a finalizer may not hold."""

    def __init__(self) -> None:
        self.shared = contextlib.ExitStack()
        self.engine: Any = None

    def end_engine(self) -> None:
        """Ends the engine, once, and lets go of the callers' tensors."""
        engine, self.engine = self.engine, None
        _end(engine)

    def close(self) -> None:
        """Ends all: first the runs, then what they used. What is gone is not ended again."""
        engine, self.engine = self.engine, None
        shared = self.shared.pop_all()

        def end() -> None:
            try:
                _end(engine)
            finally:
                shared.close()

        later = getattr(engine, "later", None)  # runs on the CPU have ended when they return
        if later is None or not later(end):
            end()


def _end(engine: Any) -> None:
    if engine is not None:
        try:
            engine.close()
        finally:
            engine.context.values.registered = {}
