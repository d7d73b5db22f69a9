"""Ranks decide alike on what each would decide by its own sizes.

With uneven shards the ranks' matmuls take different times, so near a threshold one rank would
gather again in backward and another not. They tell each other through the store, in bounded time,
and do what all want:

    consent = consent_of_ranks(["layers.0.mlp", "layers.1.mlp"], time_out_s=None)
    wanted = consent([(group, True), (group, False)])

A rank that compiles alone waits for the others and then says who did not come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from interlace.comm import Board, attending, known_lives, known_teams, limit_s
from interlace.comm.rendezvous.greeting import Party, greet
from interlace.errors import AgreementError

Wish = tuple[Any, bool]
"""A process group (or its name), and whether this rank wants something that it all must do."""
Consent = Callable[[Sequence[Wish]], list[bool]]


def consent_of_ranks(
    places: Sequence[str], time_out_s: float | None, what: str = "what backward gathers again"
) -> Consent | None:
    """How the ranks of this process' groups agree about a graph; None where there are none.

    `places` tells the graph from others: what is the same on all ranks, unlike sizes and padding.
    `what` is what they agree about, for those who read that a rank did not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = dist.distributed_c10d._get_default_store()
    digest = hashlib.sha256(" ".join(places).encode()).hexdigest()[:16]

    def consent(wishes: Sequence[Wish]) -> list[bool]:
        groups = [_group(group) for group, _ in wishes]
        limit = limit_s(time_out_s, groups)
        board = Board(store, "interlace/consent", limit)
        board.lives.update(known_lives())
        ranks = [tuple(dist.get_process_group_ranks(group)) for group in groups]
        agreed = [wish for _, wish in wishes]
        for members in sorted(set(ranks)):  # in an order that all ranks share
            mine = [i for i, own in enumerate(ranks) if own == members]
            told = [agreed[i] for i in mine]
            found = _exchange(board, f"{members}/{digest}", what, members, told, limit)
            for place, i in enumerate(mine):
                agreed[i] = all(wish[place] for wish in found)
        return agreed

    return consent


def _exchange(
    board: Board,
    topic: str,
    what: str,
    members: tuple[int, ...],
    told: list[bool],
    time_out_s: float,
) -> list[list[bool]]:
    me = dist.get_rank()
    party = Party(f"{topic}/{what}", members, me)
    with attending((team, party.topic) for team in known_teams([members])) as look:
        greet(board, [party], repr(what), time_out_s, look)
        place, note = f"{party.topic}/{party.name}", {"wishes": told}
        notes = board.exchange(place, members, me, note, time_out_s, look)
    found = [note["wishes"] for note in notes]
    for rank, wishes in zip(members, found, strict=True):
        if len(wishes) != len(told):
            raise AgreementError(
                f"rank {rank} compiles a graph with {len(wishes)} gathers and rank {me} one with "
                f"{len(told)}: compile the same model on every rank of a process group"
            )
    return found


def _group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore
    return group
