"""Blocks: one is accepted exactly if there is an order in which all run without a break."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from interlace.passes.find_sites import Blocks, in_blocks


@pytest.mark.parametrize("wide", [False, True], ids=["near", "wide"])
def test_accepted_exactly_where_there_is_an_order(wide: bool, seed: int) -> None:
    rng = random.Random(seed)
    answers = {True: 0, False: 0}
    for _ in range(300):
        count = rng.randint(4, 40)
        reach = count if wide else 6
        before = [
            tuple(j for j in range(max(0, i - reach), i) if rng.random() < 1.5 / reach)
            for i in range(count)
        ]
        blocks, taken, free = Blocks(before), [], set(range(count))
        while len(free) > 3:
            first = rng.choice(sorted(free))
            near = sorted(i for i in free if abs(i - first) <= reach)
            block = {first, *rng.sample(near, min(len(near), rng.randint(1, 3)))}
            possible = in_blocks(before, [*taken, block]) is not None
            assert blocks.accepts(block) == possible, (before, taken, block)
            answers[possible] += 1
            if possible:
                blocks.add(block)
                taken.append(block)
                free -= block
            elif rng.random() < 0.5:
                free.discard(first)
    assert min(answers.values()) > 100


def test_ops_without_need_lead_into_no_block() -> None:
    before = [(), (0,), (1,)]  # 2 needs 1 needs 0
    blocks = Blocks(before)
    assert not blocks.accepts({0, 2})
    assert blocks.accepts({0, 2}, unneeded={1})
    blocks.add({0, 2}, unneeded={1})
    assert blocks.accepts({1})


def test_what_is_listed_later_is_not_looked_at() -> None:
    """So that taking a long Program apart takes as long for each of its sites."""
    looked: list[int] = []

    count = 10_000
    blocks = Blocks([(i - 1,) if i else () for i in range(count)])

    class Members(list[Collection[int]]):
        def __getitem__(self, index: object) -> Collection[int]:
            assert isinstance(index, int)
            looked.append(index)
            return super().__getitem__(index)

    blocks.members = Members(blocks.members)
    for first in range(0, count - 1, 2):
        assert blocks.accepts({first, first + 1})
        blocks.add({first, first + 1})
    assert len(looked) < count
