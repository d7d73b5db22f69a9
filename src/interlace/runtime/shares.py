"""What an Executor shares with other ranks: slots, words and backends, set up once by all together.

shared = share(plan, teams, device, options)
shared.slots["full"], shared.spaces["tp"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.comm import Registered, SlotPool, TeamComm, Workspace, share_on_host
from interlace.comm.backends import BACKENDS
from interlace.options import Options
from interlace.runtime.plan import Plan
from interlace.runtime.registered import Wanted, written


@dataclass(frozen=True, slots=True)
class Shared:
    """By buffer, by team, and the backends by team and name."""

    slots: Mapping[str, Any]
    spaces: Mapping[str, Any]
    wanted: tuple[tuple[str, str], ...]
    """Team and name of each backend of torch that the Program uses."""
    graph_spaces: tuple[Mapping[str, Any], ...] = ()
    held: tuple[tuple[Any, Any], ...] = ()
    """Slots, and registered parameters on CUDA, with the pools that they are of."""
    registered: Mapping[str, Registered] = field(default_factory=dict[str, Registered])

    def close(self) -> None:
        """Gives back slots and words; nothing that used them is under way."""
        for pool, slot in self.held:
            pool.let_go(slot)
        for spaces in (self.spaces, *self.graph_spaces):
            for space in spaces.values():
                close = getattr(space, "close", None)
                if close is not None:
                    close()

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
    options: Options,
    callers: Wanted,
) -> Shared:
    """Sets all of it up; every rank of the teams calls this, in one order.

    `callers` has the tensors of registered parameters.
    """
    wanted = {(turn.team, turn.backend) for turn in plan.turns.values()}
    wanted |= {(team, letter.backend) for team, letter in plan.lettered()}
    named = sorted(wanted, key=lambda key: (BACKENDS.index(key[1]), key[0]))
    backends = tuple(key for key in named if key[1] != "peer")
    limit = options.time_out_s
    if device.type == "cuda":
        from interlace.runtime.cuda import sharing  # which needs the CUDA driver

        with torch.cuda.device(device):
            found = sharing.share(plan, teams, device, options.graph, limit)
            registered, kept = sharing.register(plan, teams, device, callers, limit)
            shared = Shared(
                *(found.slots, found.spaces, backends, found.graph_spaces),
                *((*found.held, *kept), registered),
            )
            shared.backends(teams, device, limit)
        return shared
    slots: dict[str, Any] = {}
    held: list[tuple[SlotPool, Any]] = []
    spaces: dict[str, Any] = {}
    registered: dict[str, Registered] = {}
    inputs = [buffer.name for buffer in plan.program.params if buffer.kind == "input"]
    ordered = sorted(dict.fromkeys(teams.values()), key=lambda team: team.topic)
    for team in ordered:
        for name in (name for name, other in teams.items() if other is team):
            topic = f"{team.num_prepared}/{name}"
            found_slots = team.slots.ensure(topic, plan.slots.get(name, {}), limit)
            held += [(team.slots, slot) for slot in found_slots.values()]
            for buffer, of_team in plan.takes.items():
                if of_team == name:
                    slots[buffer] = found_slots[plan.slot_of(buffer)]
            spaces[name] = Workspace(team, topic, plan.demands[name], limit)
            for _, backend in (key for key in backends if key[0] == name):
                team.backend(backend, device.type, limit)
            if name in callers:
                facts = inputs, written(plan.program), limit
                registered.update(share_on_host(team, topic, callers[name], *facts))
    return Shared(slots, spaces, backends, held=tuple(held), registered=registered)


def end(engine: Any, shared: Shared) -> None:
    """Ends what an Executor has: first its runs, then what they used, and the callers' tensors."""

    def rest() -> None:
        engine.close()
        shared.close()
        engine.context.values.close()

    later = getattr(engine, "later", None)  # of the CPU's engine no run is under way
    if later is None or not later(rest):
        rest()
