"""Slots that no rank holds any more go when the next Programs are prepared."""

from __future__ import annotations

import torch.distributed as dist
from tests.support.pool import Pool

from interlace.comm import team_of
from interlace.ir import parse
from interlace.runtime import Executor

LIMIT_S = 20.0


def _let_go_in_turn(times: int) -> list[list[tuple[str, int]]]:
    """The pool's slots after each rank's word that it needs one no more, rank after rank."""
    group = dist.group.WORLD
    assert group is not None
    team = team_of(group, "tp")
    team.setup(LIMIT_S)
    pool, seen = team.slots, list[list[tuple[str, int]]]()
    (kept,) = pool.ensure("a/kept", {"kept": 4096}, LIMIT_S).values()
    (slot,) = pool.ensure("a/lent", {"lent": 8192}, LIMIT_S).values()
    (same,) = pool.ensure("a/again", {"lent": 8192}, LIMIT_S).values()
    assert same is slot
    (larger,) = pool.ensure("a/smaller", {"lent": 100}, LIMIT_S).values()
    assert larger is slot, "a slot that is held serves smaller buffers too"
    pool.let_go(larger)
    assert kept in pool.slots.values()
    for turn in range(times):
        if turn == dist.get_rank():
            pool.let_go(slot)
            pool.let_go(slot)
        pool.ensure(f"a/look{turn}", {}, LIMIT_S)
        seen.append(sorted(key for key in pool.slots if key[0] in ("kept", "lent")))
    return seen


def test_a_slot_goes_when_every_rank_has_let_it_go(pool: Pool) -> None:
    both, one = [("kept", 4096), ("lent", 8192)], [("kept", 4096)]
    assert pool(3).run(_let_go_in_turn, 3, timeout_s=60) == [[both, both, one]] * 3


TEXT = """
def shown(tp: Team[2], x: f32[{rows}, 8]):
    slot = alloc(f32[{rows}, 8], symmetric=tp)
    y = empty(f32[{rows}, 8])
    main: copy(x, slot)
    main: notify(ready, to=tp.others)
    main: expect(ready, tp.rank + 1)
    main: get(slot, y, peer=tp.rank + 1)
    main: notify(taken, to=tp.others)
    main: expect(taken, tp.rank + 1)
    main: free(slot)
    return y
"""


def _many_sizes(count: int) -> list[int]:
    """Bytes of the pool after Executors of ever other sizes, each closed before the next."""
    import torch

    group, seen = dist.group.WORLD, list[int]()
    assert group is not None
    for rows in range(1, count + 1):
        with Executor(parse(TEXT.format(rows=rows)), groups={"tp": group}).prepare() as executor:
            (y,) = executor.run([torch.full((rows, 8), float(dist.get_rank()))])
            assert torch.equal(y, torch.full((rows, 8), 1.0 - dist.get_rank()))
            seen.append(team_of(group, "tp").slots.nbytes)
    return seen


def test_sizes_that_are_not_used_any_more_take_no_memory(pool: Pool) -> None:
    for seen in pool(2).run(_many_sizes, 6, timeout_s=60):
        assert seen[-1] <= 2 * max(seen[0], 4096), seen
