"""The checker's walk in other orders than its own: what it finds must not depend on it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from interlace.verify.graph import HappensBefore


def another_order(graph: HappensBefore, rng: random.Random) -> list[int]:
    """The nodes that can finish, in a legal order drawn by chance: often stream after stream."""
    by_chain = rng.random() < 0.5
    weights = {chain: rng.random() for chain in sorted(set(graph.chain))}
    rank = {n: weights[graph.chain[n]] if by_chain else rng.random() for n in graph.order}
    followers: dict[int, list[int]] = {node: [] for node in graph.order}
    waiting = dict.fromkeys(graph.order, 0)
    for node in graph.order:
        for other in graph.awaited(node):
            followers[other].append(node)
            waiting[node] += 1
    ready = [(rank[node], node) for node in graph.order if not waiting[node]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for other in followers[node]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (rank[other], other))
    assert sorted(order) == sorted(graph.order)
    return order


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Within it, `check` walks in an order drawn by chance."""
    solve, rng = HappensBefore.solve, random.Random(seed)

    def solve_and_shuffle(graph: HappensBefore) -> None:
        solve(graph)
        graph.order = another_order(graph, rng)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HappensBefore, "solve", solve_and_shuffle)
        yield
