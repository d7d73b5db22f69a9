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

from interlace.comm import limit_s, team_of
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
    digest = hashlib.sha256(" ".join(places).encode()).hexdigest()[:16]

    def consent(wishes: Sequence[Wish]) -> list[bool]:
        groups = [_group(group) for group, _ in wishes]
        limit = limit_s(time_out_s, groups)
        teams = [team_of(group, "", limit) for group in groups]
        agreed = [wish for _, wish in wishes]
        for team in sorted({*teams}, key=lambda team: team.key):  # in an order that all ranks share
            mine = [i for i, own in enumerate(teams) if own is team]
            told = {"graph": digest, "wishes": [agreed[i] for i in mine]}
            for rank, note in zip(team.ranks, team.consult(what, told, limit), strict=True):
                if (note["graph"], len(note["wishes"])) != (digest, len(mine)):
                    raise AgreementError(
                        f"rank {rank} compiles another graph than rank {team.rank}, where ranks "
                        f"decide {what}: compile the same model on every rank of a process group"
                    )
                for i, wish in zip(mine, note["wishes"], strict=True):
                    agreed[i] = agreed[i] and wish
        return agreed

    return consent


def _group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore
    return group
