"""Resets: what every rank calls after a failure, so that runs may go on.

    reset_teams()                # as `interlace.reset()`: every team of this process

See Note [Resets before a set-up] in teams.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.distributed as dist

from interlace.comm.backends import apart, limit_s
from interlace.comm.rendezvous.board import Board
from interlace.comm.rendezvous.liveness import moment
from interlace.comm.teams import TeamComm, counts, key_of, live_teams, reset_topic
from interlace.torch_private import default_store, process_groups

unfinished: set[str] = set()
"""Groups whose reset was told by a call that then failed: the next call is the same reset."""


def reset_teams(timeout_s: float | None = None) -> None:
    """Forgets a failure, or an error of a rank's own code, so that runs may go on.

    Every rank calls it, once for each failure. It is collective for teams that are set up; ranks of
    others are told, and not waited for. Where nothing failed, connections stay.

    Args:
        timeout_s: seconds that a rank is waited for; by default the process group's own.
    """
    limit, teams = limit_s(timeout_s), live_teams()
    set_up = [team for team in teams if team.is_set_up]
    whole = {team.key for team in set_up}
    early = [key for key in map(key_of, _groups()) if key not in whole | unfinished]
    forget_unset(early)
    if early:
        # Of no others: the reset of a team that is set up is collective, and may be tried again.
        board = Board(apart(default_store(), limit), (), dist.get_rank(), limit_s=limit)
        heard = [team.control.resetting() for team in set_up]
        first = next((rank for rank in heard if rank is not None), board.rank)
        for key in early:
            board.first(reset_topic(key), {"first": first, **moment()})
            counts[key] += 1
            unfinished.add(key)
    reset_in_turn(set_up, limit, renew=False)
    unfinished.clear()


def forget_unset(keys: Collection[str]) -> None:
    """Forgets the teams of these groups that are not set up."""
    for team in live_teams():
        if team.key in keys and not team.is_set_up:
            team.forget()


def _groups() -> list[dist.ProcessGroup]:
    """The process groups of several ranks, of which this is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return [group for group in process_groups() if group.size() > 1]


def reset_in_turn(teams: Sequence[TeamComm], timeout_s: float, renew: bool = True) -> None:
    """Resets these teams, in an order that all ranks share; peers hear of it in all at once."""
    for team in teams:
        team.check_alive()
    try:
        for team in teams:
            team.begin_reset(timeout_s)
        for team in teams:
            team.reset(timeout_s, renew)
        forget_unset({team.key for team in teams})
    except BaseException as error:
        for team in teams:
            if team.is_set_up:
                team.control.give_up_reset(error)
        raise
