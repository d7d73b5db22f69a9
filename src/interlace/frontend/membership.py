"""Ranks tell each other, through the store, which process groups they use in a graph.

Each rank writes the groups that it is in, and reads those of the ranks that they connect it to,
until the circle closes. Nothing but the store is used, so a rank that does not come costs a
bounded wait and an error that names it, not a hang.

    groups = learn_groups([(2, ((0, 1),), False), (2, ((0, 2),), False)], rank=0, time_out_s=60)
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from interlace.errors import AgreementError

Groups = tuple[tuple[int, ...], ...]
Mine = tuple[tuple[int, ...], ...]
"""One rank's own group in each team, in the order in which the graph uses them."""

POLL_S = 0.01


class Store(Protocol):
    """What is needed of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def learn_groups(
    teams: Sequence[tuple[int, Groups, bool]],
    rank: int,
    time_out_s: float,
    store: Store | None = None,
) -> list[Groups]:
    """Every group of each team (size, groups, complete) that is connected to `rank`."""
    if store is None:
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore
    assert store is not None
    sizes = "-".join(str(size) for size, _, _ in teams)
    mine: Mine = tuple(next(g for g in groups if rank in g) for _, groups, _ in teams)
    _publish(store, f"interlace/teams/{sizes}/{rank}", mine)
    deadline = time.monotonic() + time_out_s
    known: dict[int, Mine] = {rank: mine}
    while missing := {r for groups in known.values() for g in groups for r in g} - set(known):
        for other in sorted(missing):
            key = f"interlace/teams/{sizes}/{other}"
            known[other] = _read(store, key, other, known, deadline, time_out_s)
    return [tuple(sorted({groups[i] for groups in known.values()})) for i in range(len(teams))]


def _publish(store: Store, key: str, mine: Mine) -> None:
    """Adds to what this rank has published: it may use several sets of groups of these sizes."""
    published = _parse(store.get(key)) if store.check([key]) else []
    if mine not in published:
        store.set(key, json.dumps([*published, mine]))


def _parse(text: bytes) -> list[Mine]:
    return [tuple(tuple(group) for group in mine) for mine in json.loads(text)]


def _read(
    store: Store, key: str, other: int, known: dict[int, Mine], deadline: float, time_out_s: float
) -> Mine:
    """What `other` published that agrees with what is known; waits for it."""
    while True:
        if store.check([key]):
            for theirs in reversed(_parse(store.get(key))):
                if all(
                    groups[i] == theirs[i]
                    for groups in known.values()
                    for i in range(len(theirs))
                    if other in groups[i] or not set(groups[i]).isdisjoint(theirs[i])
                ):
                    return theirs
        if time.monotonic() > deadline:
            raise AgreementError(
                f"rank {other} did not say within {time_out_s:g} s in which process groups it "
                f"runs this graph, which connects ranks {sorted(known)} with it: compile and run "
                "the same model on every rank of its process groups"
            )
        time.sleep(POLL_S)
