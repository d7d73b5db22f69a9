"""Which rank of a Program this process is, from the process groups that stand for its teams.

A Program counts its ranks from 0, whatever the global ranks of its groups: one tensor-parallel
Program of two ranks serves every replica of a data-parallel job.

    >>> program_rank(program, {"tp": mesh.get_group("tp")})
    1
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from interlace.errors import TeamError
from interlace.ir import Program


def program_rank(program: Program, groups: Mapping[str, dist.ProcessGroup]) -> int:
    """The rank at which every team of the Program has this process where its group has it."""
    known = {team.name for team in program.teams}
    stray = [name for name in groups if name not in known]
    if stray:
        raise TeamError(
            f"{program.name} has no team named {stray[0]!r}: its teams are {sorted(known)}"
        )
    mine = {name: group for name, group in groups.items() if _member(group)}
    ranks = program.world if program.rank is None else (program.rank,)
    fits = [rank for rank in ranks if _fits(program, rank, mine)]
    if len(fits) == 1:
        return fits[0]
    me = dist.get_rank() if dist.is_initialized() else 0
    if me in fits:
        return me
    have = ", ".join(f"{n} (rank {g.rank()} of {g.size()})" for n, g in mine.items()) or "none"
    wants = ", ".join(f"{team.name}[{team.size}]" for team in program.teams) or "none"
    if not fits:
        raise TeamError(
            f"no rank of {program.name} fits this process: the Program's teams are {wants}, the "
            f"process groups given are {have}. Give one group for each team, as in "
            "groups={'tp': mesh.get_group('tp')}, with as many ranks as the team has"
        )
    raise TeamError(
        f"ranks {fits} of {program.name} would all fit this process (teams {wants}, groups "
        f"{have}): instantiate the Program for the rank that this process is"
    )


def _member(group: dist.ProcessGroup) -> bool:
    return isinstance(group, dist.ProcessGroup)  # new_group gives other ranks a placeholder


def _fits(program: Program, rank: int, groups: Mapping[str, dist.ProcessGroup]) -> bool:
    members = program.where(rank).members
    return set(members) == set(groups) and all(
        (groups[name].rank(), groups[name].size()) == (member.index, len(member.ranks))
        for name, member in members.items()
    )
