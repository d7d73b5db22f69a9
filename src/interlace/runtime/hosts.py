"""Which ranks of a Program's teams are on which host.

program = on_hosts(parse(text), groups={"tp": dist.group.WORLD})
program.teams                   # tp: Team[4].on([0, 1], [2, 3])
lower(program, Options())       # `auto` and the strategies go by it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch.distributed import ProcessGroup

from interlace.comm import limit_s, team_of
from interlace.comm.rendezvous.board import meet
from interlace.ir import Program


def on_hosts(
    program: Program, groups: Mapping[str, ProcessGroup], timeout_s: float | None = None
) -> Program:
    """The Program, whose teams that span hosts say so. Collective: the ranks of each meet.

    `groups` has the process group of each team; `timeout_s` is as in `Options`.
    """
    limit = limit_s(timeout_s, groups.values())
    known = {team.name for team in program.teams}
    found = {name: team_of(group, name, limit) for name, group in groups.items() if name in known}
    if found:
        order = sorted(found.values(), key=lambda team: team.key)
        meet(order, f"prepare Program {program.name!r}", limit)
    hosts = {name: team.by_host for name, team in found.items() if team.apart}
    teams = [dataclasses.replace(t, hosts=hosts.get(t.name, t.hosts)) for t in program.teams]
    return program.replace(teams=tuple(teams))
