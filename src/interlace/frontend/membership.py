"""Ranks tell each other, through the store, which process groups they use in a graph.

Each rank writes the groups that it is in, and reads those of the ranks that they connect it to,
until the circle closes. Nothing but the store is used, so a rank that does not come costs a
bounded wait and an error that names it, not a hang.

    groups = learn_groups([(2, ((0, 1),), False), (2, ((0, 2),), False)], rank=0, time_out_s=None)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist

from interlace.comm import Board, attending, known_lives, known_teams, limit_s
from interlace.comm.rendezvous.patience import LONGER, Patience
from interlace.errors import AgreementError

Groups = tuple[tuple[int, ...], ...]
Mine = tuple[tuple[int, ...], ...]
"""One rank's own group in each team, in the order in which the graph uses them."""

POLL_S = 0.01


def learn_groups(
    teams: Sequence[tuple[int, Groups, bool]],
    rank: int,
    time_out_s: float | None,
    store: Any = None,
) -> list[Groups]:
    """Every group of each team (size, groups, complete) that is connected to `rank`."""
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    board = Board(store, "interlace/teams", limit_s(time_out_s))
    board.lives.update(known_lives())
    board.announce(rank)
    sizes = "-".join(str(size) for size, _, _ in teams)
    mine: Mine = tuple(next(g for g in groups if rank in g) for _, groups, _ in teams)
    _publish(board, f"{sizes}/{rank}", mine)
    known: dict[int, Mine] = {rank: mine}
    patience = Patience(board.limit_s)
    meetings = ((team, f"interlace/teams/{sizes}") for team in known_teams(mine))
    with attending(meetings) as look:
        while missing := {r for groups in known.values() for g in groups for r in g} - set(known):
            for other in sorted(missing):
                known[other] = _read(board, f"{sizes}/{other}", other, known, patience, look)
    return [tuple(sorted({groups[i] for groups in known.values()})) for i in range(len(teams))]


def _publish(board: Board, topic: str, mine: Mine) -> None:
    """Adds to what this rank has published: it may use several sets of groups of these sizes."""
    published = _published(board, topic)
    if mine not in published:
        board.post(topic, {"groups": [*published, mine]})


def _published(board: Board, topic: str) -> list[Mine]:
    note = board.read(topic) or {"groups": []}
    return [tuple(tuple(group) for group in mine) for mine in note["groups"]]


def _read(
    board: Board,
    topic: str,
    other: int,
    known: dict[int, Mine],
    patience: Patience,
    look: Callable[[], object],
) -> Mine:
    """What `other` published that agrees with what is known; waits for it, until `look` raises."""
    while True:
        gone = other in board.ended([other])
        for theirs in reversed(_published(board, topic)):
            if all(
                groups[i] == theirs[i]
                for groups in known.values()
                for i in range(len(theirs))
                if other in groups[i] or not set(groups[i]).isdisjoint(theirs[i])
            ):
                return theirs
        if gone:
            raise AgreementError(board.farewell([other], "say in which process groups it runs"))
        if patience.is_over(lambda: _late(other, known)):
            raise AgreementError(
                f"rank {other} did not say within {patience.time_out_s:g} s in which process "
                f"groups it runs this graph, which connects ranks {sorted(known)} with it: compile "
                f"and run the same model on every rank of its process groups; {LONGER}"
            )
        look()
        time.sleep(POLL_S)


def _late(other: int, known: Collection[int]) -> str:
    return (
        f"rank {other} has not said in which process groups it runs a graph that connects ranks "
        f"{sorted(known)} with it"
    )
