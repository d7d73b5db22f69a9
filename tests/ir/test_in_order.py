"""One op after another: every op once, each stream in its order, waits after their records."""

from __future__ import annotations

import random

from tests.fuzzing.draw import well_formed

from interlace.ir import Fused, bindings, in_order, parse, spots

SCATTER = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    slots = alloc(f32[2, 4], symmetric=tp)
    t = alloc(f32[4])
    main: fused(
        part(call("aten.neg.out", x, out=t), record(e)),
        part(
            call("aten.neg.out", x, out=slots[tp.rank].view(4)), expect(told, tp.rank + 1),
            call("interlace.sum_slots", slots, out=y),
        ),
    )
    comm: wait(e)
    comm: put(t, slots[tp.rank].view(4), peer=tp.rank + 1)
    comm: notify(told, to=tp.rank + 1)
    comm: expect(later, tp.rank + 1)
    comm: copy(y, t)
    main: notify(later, to=tp.rank + 1)
    main: free(slots)
"""


def test_what_peers_await_comes_before_what_waits_for_them() -> None:
    found = in_order(parse(SCATTER).ops)
    # up to the first expect; the put, as far as it waits for nobody; the rest
    assert found[:5] == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert found[5:10] == [(3, 0), (4, 0), (5, 0), (2, 3), (2, 4)]
    assert found[10:] == [(6, 0), (7, 0), (8, 0), (9, 0)]


def test_without_fused_ops_it_is_the_list() -> None:
    text = SCATTER[: SCATTER.index("    main: fused(")] + "    main: free(slots)\n"
    assert in_order(parse(text).ops) == [(0, 0), (1, 0), (2, 0)]


def test_any_program(seed: int) -> None:
    rng = random.Random(seed)
    met = 0
    for _ in range(300):
        program = well_formed(rng, 12)
        met += any(isinstance(op, Fused) for op in program.ops)
        order = in_order(program.ops)
        assert sorted(order) == [spot for spot, _ in spots(program.ops)]
        turn = {spot: i for i, spot in enumerate(order)}
        assert all(turn[record] < turn[wait] for wait, record in bindings(program.ops).items())
        for stream in program.streams():
            mine = [spot for spot in order if program.ops[spot[0]].stream == stream]
            assert mine == sorted(mine)
    assert met > 50
