"""The memory of a run, counted from its Program."""

from __future__ import annotations

from interlace.cost.memory import IDLE, run_memory
from interlace.ir import parse
from interlace.passes.plan_memory import PlanMemory

CHAIN = """
def chain(x: f32[64, 64], w: f32[64, 64]):
    main: call("aten.mm.default", x, w, out=(a := f32[64, 64]))
    main: free(x)
    main: call("aten.mm.default", a, w, out=(b := f32[64, 64]))
    main: call("aten.mm.default", b, w, out=(c := f32[64, 64]))
    main: call("aten.mm.default", c, w, out=(d := f32[64, 64]))
    main: call("aten.mm.default", d, w, out=(e := f32[64, 64]))
    return e, b
"""
SIZE = 64 * 64 * 4


def test_fresh_buffers_and_inputs_that_are_given_up() -> None:
    memory = run_memory(parse(CHAIN))
    assert [each // SIZE for each in memory.totals] == [2, 1, 2, 2, 3, 3]
    assert memory.levels["inputs"] == [SIZE, 0, 0, 0, 0, 0]
    assert memory.levels["outputs"][-1] == 2 * SIZE
    assert (memory.peak, memory.peak_op) == (3 * SIZE, 4)
    assert memory.line() == "peak 49,152 bytes at op 4: 16,384 of outputs, 32,768 of temporaries"


def test_an_arena_is_there_from_the_first_op_to_the_last() -> None:
    memory = run_memory(PlanMemory().run(parse(CHAIN)))
    assert memory.peak == 2 * SIZE + 2 * SIZE
    assert f"(arena {2 * SIZE:,} for 3 buffers, {3 * SIZE:,} without reuse)" in memory.line()
    assert sum(map(sum, (kinds.values() for kinds in memory.by_module().values()))) == memory.peak


SLOTS = """
def slots(tp: Team[2], x: f32[rows[tp.rank], 4], y: out[f32[8, 4]]):
    rows = table(tp, 3, 5)
    x2 = alloc(f32[rows[tp.rank], 4], stream="main")
    main: copy(x, x2)
    s = alloc(f32[8, 4], symmetric=tp, storage="s0")
    main: copy(x2, s[rows[tp.rank]])
    main: free(s)
    t = alloc(f32[2, 4], symmetric=tp, storage="s0")
    main: free(t)
"""


def test_slots_and_ranks_that_differ() -> None:
    memory = run_memory(parse(SLOTS.replace("s[rows[tp.rank]]", "s.chunk(tp.rank, rows)")))
    assert memory.nbytes("slots") == 2 * 8 * 16
    assert (memory.nbytes("outputs"), memory.nbytes("temporaries")) == (8 * 16, 256)
    assert not memory.uneven, "both ranks' rows take one alignment"
    assert memory.by_module()[IDLE]["slots"] == 8 * 16


SIZED = """
def sized(S: Size[6], x: f32[S, 4], w: f32[4, 4]):
    assume(S >= 2, S <= 8)
    main: call("aten.mm.default", x, w, out=(a := f32[S, 4]))
    return a
"""


def test_named_sizes() -> None:
    unbounded = parse(SIZED.replace(", S <= 8", ""))
    assert run_memory(unbounded).peak == 6 * 16, "there is no largest: the values at hand"
    program = parse(SIZED)
    assert run_memory(program).peak == 8 * 16
    assert run_memory(program, values={"S": 5}).line() == (
        "peak 80 bytes at op 0 where S = 5: 80 of outputs"
    )
