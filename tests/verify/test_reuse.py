"""Takes of a slot that share memory within a run: sound by the race checker's word, and few."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest

from interlace.ir import Alloc, Free, Op, Program, parse
from interlace.ir.program import map_views
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime.machine import default_machine
from interlace.verify import check
from interlace.verify.reuse import shared_places

LAYERS = """
def layers(tp: Team[{n}], x: bf16[512, 1024], up: bf16[1024, 1024], down: bf16[1024, 1024]):
    full0 = alloc(bf16[{m}, 1024])
    h0 = alloc(bf16[{m}, 1024])
    y0 = alloc(bf16[{m}, 1024])
    z0 = alloc(bf16[512, 1024])
    full1 = alloc(bf16[{m}, 1024])
    h1 = alloc(bf16[{m}, 1024])
    y1 = alloc(bf16[{m}, 1024])
    z1 = empty(bf16[512, 1024])
    main: all_gather(x, full0, team=tp)
    main: call("aten.mm.out", full0, up, out=h0)
    main: call("aten.mm.out", h0, down, out=y0)
    main: reduce_scatter(y0, z0, reduce="sum", team=tp)
    main: all_gather(z0, full1, team=tp)
    main: call("aten.mm.out", full1, up, out=h1)
    main: call("aten.mm.out", h1, down, out=y1)
    main: reduce_scatter(y1, z1, reduce="sum", team=tp)
    return z1
"""

TWO_PUTS = """
def puts(tp: Team[2], x: f32[8]):
    a = alloc(f32[8], symmetric=tp, storage="s")
    main: put(x, a, peer=tp.rank + 1)
    main: notify(a_there, to=tp.rank + 1)
    main: expect(a_there, tp.rank + 1)
    y = empty(f32[8])
    main: copy(a, y)
    main: free(a)
{between}
    b = alloc(f32[8], symmetric=tp, storage="s")
    main: put(y, b, peer=tp.rank + 1)
    main: notify(b_there, to=tp.rank + 1)
    main: expect(b_there, tp.rank + 1)
    z = empty(f32[8])
    main: copy(b, z)
    main: free(b)
    return z
"""
ANSWER = "    main: notify(read, to=tp.rank + 1)\n    main: expect(read, tp.rank + 1)\n"


def merged(program: Program, one: str, other: str) -> Program:
    """The Program in which one buffer stands for both takes: taken with the first, freed with the
    second."""
    named = partial(map_views, change=lambda v: replace(v, buffer=one) if v.buffer == other else v)
    ops = [
        replace(op, buffer=one) if isinstance(op, Free) and op.buffer == other else named(op)
        for op in program.ops
        if not (isinstance(op, Free) and op.buffer == one)
        and not (isinstance(op, Alloc) and op.buffer.name == other)
    ]
    return program.replace(ops=tuple(ops))


def in_a_slot_of_its_own(op: Op) -> Op:
    """The op; if it takes a slot, then one that nothing else takes."""
    buffer = op.ordering().takes
    if not isinstance(op, Alloc) or buffer is None or buffer.kind != "symmetric":
        return op
    return replace(op, buffer=replace(buffer, storage=None))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["peer", "fused"])
def test_what_shares_is_sound_as_one_buffer(strategy: str, ranks: int) -> None:
    serial = parse(LAYERS.format(n=ranks, m=512 * ranks))
    options = Options(strategy=strategy, regions="eager")  # type: ignore[arg-type]
    program = lower(serial, options, default_machine("h200"))
    assert check(program).sound
    takes = [op.buffer for op in program.ops if isinstance(op, Alloc) if op.buffer.team]
    places, counts, by_place = shared_places([program]), dict[str, int](), dict[Any, list[Any]]()
    for buffer in takes:
        slot = str(buffer.storage)
        number = counts[slot] = counts.get(slot, -1) + 1
        by_place.setdefault((slot, places[slot, number]), []).append(buffer)
    assert len(by_place) == len({slot for slot, _ in by_place}) <= 2 < len(takes)
    apart = program.replace(ops=tuple(map(in_a_slot_of_its_own, program.ops)))
    for one, other in (pair for held in by_place.values() for pair in combinations(held, 2)):
        if one.shape == other.shape:
            assert check(merged(apart, one.name, other.name)).sound


def test_a_take_that_nobody_uses_orders_nothing() -> None:
    """Nor does it free what the take before it has."""
    unused = '    c = alloc(f32[8], symmetric=tp, storage="s")\n    main: free(c)\n'
    program = parse(TWO_PUTS.format(between=unused))
    assert check(program).sound
    assert shared_places([program]) == {("s", 0): 0, ("s", 1): 0, ("s", 2): 1}


@pytest.mark.parametrize("answered", [False, True])
def test_a_peer_that_may_still_read_keeps_its_memory(answered: bool) -> None:
    """The second Put may come while the peer still copies what the first one brought."""
    program = parse(TWO_PUTS.format(between=ANSWER if answered else ""))
    assert check(program).sound
    assert shared_places([program]) == {("s", 0): 0, ("s", 1): 0 if answered else 1}
    assert check(merged(program, "a", "b")).sound is answered
