"""Groups of ops taken as one: is there an order in which each group runs without a break?

A site's ops become one block, which is then replaced as a whole. A block that would have to run
both before and after some op outside it (or another block) cannot be; `order` then gives None.

    >>> order(before, [{0, 3}, {5, 6}])         # before: dependencies(program)
    [(0, 3), (1,), (2,), (4,), (5, 6)]
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

Edges = Sequence[Iterable[int]]


class Blocks:
    """Blocks that can all run without a break, grown one by one.

    `before[i]` names ops that are listed before i alone, and a block has an op at least.

    blocks = Blocks(dependencies(program))
    if blocks.accepts({0, 3}):
        blocks.add({0, 3})
    """

    def __init__(self, before: Edges) -> None:
        self.members: list[frozenset[int]] = [frozenset((i,)) for i in range(len(before))]
        self.after: list[set[int]] = [set() for _ in before]
        self.least = list(range(len(before)))
        """By op, the first op of the stretch of overlapping blocks that it stands in (itself, where
        it stands in none): nothing that follows the op is listed before that."""
        for i, earlier in enumerate(before):
            for j in earlier:
                self.after[j].add(i)

    def accepts(self, block: Iterable[int], unneeded: Iterable[int] = ()) -> bool:
        """Whether no path leaves the block and comes back; `unneeded` ops do not lead into it."""
        mine, ignored = frozenset(block), frozenset(unneeded)
        seen: set[int] = set()
        last = max(mine)
        stack = [i for j in mine for i in self.after[j] if i not in mine]
        while stack:
            op = stack.pop()
            if op in seen or self.least[op] > last:  # from there no way leads back
                continue
            seen |= self.members[op]
            for i in self.members[op]:
                if not mine.isdisjoint(self.after[i]) and i not in ignored:
                    return False
                stack += [k for k in self.after[i] if k not in seen and k not in mine]
        return True

    def add(self, block: Iterable[int], unneeded: Iterable[int] = ()) -> None:
        """Takes these ops as one from now on."""
        mine = frozenset(block)
        for i in mine:
            self.members[i] = mine
        first, last = self.least[min(mine)], max(mine)
        for i in range(min(mine), len(self.least)):
            if i > last and self.least[i] > last:
                break
            self.least[i] = first
        for i in unneeded:
            self.after[i] -= mine


def order(
    before: Edges, blocks: Sequence[Iterable[int]], anchors: Mapping[int, int] | None = None
) -> list[tuple[int, ...]] | None:
    """All ops, each block together, in an order that keeps `before` and else the list's; or None.

    A block stands where its op `anchors[number of the block]` would (default: its last op).
    """
    node = list(range(len(before)))
    members: dict[int, list[int]] = {i: [i] for i in node}
    for number, block in enumerate(blocks):
        listed = sorted(block)
        if not listed:
            continue
        anchor = (anchors or {}).get(number, listed[-1])
        assert all(node[i] == i for i in listed), "blocks share an op"
        for i in listed:
            del members[i]
        for i in listed:
            node[i] = anchor
        members[anchor] = listed
    missing = dict.fromkeys(members, 0)
    after: dict[int, set[int]] = {i: set() for i in members}
    for i, earlier in enumerate(before):
        for j in earlier:
            if node[i] != node[j] and node[i] not in after[node[j]]:
                after[node[j]].add(node[i])
                missing[node[i]] += 1
    ready = [i for i, count in missing.items() if count == 0]
    heapq.heapify(ready)
    found: list[tuple[int, ...]] = []
    while ready:
        i = heapq.heappop(ready)
        found.append(tuple(members[i]))
        for j in after[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, j)
    return found if len(found) == len(members) else None
