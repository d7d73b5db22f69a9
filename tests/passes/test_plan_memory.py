"""plan_memory: lifetimes become storage, and nothing waits for it."""

from __future__ import annotations

import random

import pytest
from tests.support.serial_programs import serial_program

from interlace.cost.memory import ALIGNMENT
from interlace.errors import PassError
from interlace.ir import Alloc, Buffer, Free, Notify, Program, Record, Wait, parse
from interlace.ir.sizes import number
from interlace.passes.insert_sync import InsertSync
from interlace.passes.plan_memory import PlanMemory
from interlace.passes.schedule import Schedule
from interlace.verify import check
from interlace.verify.reuse import shared_places

CHAIN = """
def chain(x: f32[64, 64], w: f32[64, 64]):
    main: call("aten.mm.default", x, w, out=(a := f32[64, 64]))
    main: call("aten.mm.default", a, w, out=(b := f32[64, 64]))
    main: call("aten.mm.default", b, w, out=(c := f32[64, 64]))
    main: call("aten.mm.default", c, w, out=(d := f32[64, 64]))
    main: call("aten.mm.default", d, w, out=(e := f32[64, 64]))
    return e
"""
SIZE = 64 * 64 * 4


def planned(text: str, **options: bool) -> Program:
    """The text after plan_memory."""
    return PlanMemory(**options).run(parse(text))


def offsets(program: Program) -> dict[str, int]:
    """Where each buffer of the arena begins."""
    return {n: number(b.offset) for n, b in program.buffers().items() if b.storage == "arena"}


def kinds(program: Program) -> dict[str, str]:
    """The kind of every buffer."""
    return {name: buffer.kind for name, buffer in program.buffers().items()}


def test_a_chain_takes_two_buffers_in_turn() -> None:
    assert offsets(planned(CHAIN)) == {"a": 0, "b": SIZE, "c": 0, "d": SIZE}
    assert offsets(planned(CHAIN, reuse=False)) == {n: i * SIZE for i, n in enumerate("abcd")}
    program = parse(
        "def p(x: f32[4]):\n    a = alloc(f32[4])\n    main: copy(x, a)\n    return ()\n"
    )
    with pytest.raises(PassError, match="'a' is allocated twice"):
        PlanMemory().run(program.replace(ops=(*program.ops, program.ops[0])))


def test_a_view_that_leaves_keeps_its_buffer_fresh() -> None:
    program = planned(CHAIN.replace("return e", "return e, b.view(4096), (c[0:2], None)"))
    assert [n for n, kind in kinds(program).items() if kind == "fresh"] == ["b", "c", "e"]


def test_fresh_results_are_freed_at_their_last_use() -> None:
    program = planned("""
def p(x: f32[4]):
    main: call("aten.neg.default", x, out=(a := f32[4]))
    main: call("aten.neg.default", a, out=(b := f32[4]))
    main: call("aten.neg.default", x, out=(c := f32[4]))
    return b, c
""")
    assert [type(op).__name__ for op in program.ops] == ["Call", "Call", "Free", "Call"]
    assert program.ops[2] == Free(buffer="a")


def test_an_input_that_is_given_up_goes_after_its_last_use() -> None:
    """Wherever it stood, as soon as a stream knows of all uses; what nobody gives up stays."""
    program = InsertSync().run(
        planned("""
def p(x: f32[4], w: f32[4], u: f32[4], y: out[f32[4]], z: out[f32[4]]):
    side: call("aten.mul.Tensor", x, w, out=(a := f32[4]))
    main: call("aten.mul.Tensor", u, w, out=(b := f32[4]))
    main: copy(a, y)
    main: copy(b, z)
    main: free(x)
    main: free(u)
""")
    )
    assert str(program).split("predicted")[0].count("free(") == 4
    ops = [op for op in program.ops if not isinstance(op, Record | Wait)]
    assert [getattr(op, "buffer", "") for op in ops] == ["", "x", "", "u", "", "a", "", "b"]
    assert check(program).sound


def test_an_output_that_is_freed_is_refused() -> None:
    text = "def p(x: f32[4], y: out[f32[4]]):\n    main: copy(x, y)\n    main: free(y)\n"
    with pytest.raises(PassError, match="'y' is an output and stays the caller's"):
        planned(text)


def test_no_reuse_where_streams_are_not_ordered() -> None:
    text = """
def p(tp: Team[2], x: f32[64, 64], y: f32[64, 64]):
    a = alloc(f32[64, 64])
    main: copy(x, a)
    main: copy(a, x)
    b = alloc(f32[64, 64], stream="comm")
    comm: copy(y, b)
    comm: copy(b, y)
    c = alloc(f32[64, 64])
    main: copy(x, c)
    main: copy(c, x)
    return ()
"""
    program = planned(text)
    assert offsets(program) == {"a": 0, "b": SIZE, "c": 0}
    synced = InsertSync().run(program)
    assert not any(isinstance(op, Record | Wait) for op in synced.ops)
    assert check(synced).sound


def test_memory_adds_no_event(seed: int) -> None:
    """Sharing storage costs no Wait: planned or not, as many order the streams. A slot that is
    handed over costs at most one where it is freed and one where it is taken."""
    for drawn in range(seed, seed + 20):
        serial, _ = serial_program(random.Random(drawn), 2, 8)
        lists = [
            InsertSync().run(PlanMemory(reuse=reuse).run(Schedule().run(serial)))
            for reuse in (False, True)
        ]
        counts = [sum(isinstance(op, Wait) for op in program.ops) for program in lists]
        signals = [op for op in lists[1].ops if isinstance(op, Notify) and "freed" in op.signal]
        assert counts[1] - counts[0] <= 2 * len(signals), f"seed {drawn}"
        assert signals or counts[0] == counts[1], f"seed {drawn}"


def test_planned_buffers_never_overlap_in_time(seed: int) -> None:
    """In list order, two buffers that live at once share no byte."""
    for drawn in range(seed, seed + 20):
        serial, _ = serial_program(random.Random(drawn), 2, 10)
        program = PlanMemory().run(Schedule().run(serial))
        uses: dict[str, list[int]] = {}
        for index, op in enumerate(program.ops):
            for access in (*op.reads(), *op.writes()):
                uses.setdefault(access.view.buffer, []).append(index)
        placed = {n: b for n, b in program.buffers().items() if b.storage == "arena"}
        for name, buffer in placed.items():
            assert buffer.offset % ALIGNMENT == 0
            for other, second in placed.items():
                apart = uses[name][-1] < uses[other][0] or uses[other][-1] < uses[name][0]
                assert name == other or apart or disjoint(program, buffer, second), f"seed {drawn}"


def disjoint(program: Program, one: Buffer, other: Buffer) -> bool:
    """Whether two buffers of the arena share no byte, on any rank."""
    sizes = []
    for buffer in (one, other):
        rows = [program.where(rank).dim(buffer.shape[0]) for rank in program.world]
        sizes.append(max(rows) * 3 * 4)
    return one.offset + sizes[0] <= other.offset or other.offset + sizes[1] <= one.offset


SITES = """
def p(tp: Team[2], x: f32[2, 4], y: f32[2, 8]):
{lines}
    return ()
"""


def gathers(*shapes: str) -> Program:
    """Gathers one after another, by one-sided copies."""
    lines: list[str] = []
    for i, (shape, source) in enumerate(zip(shapes[::2], shapes[1::2], strict=True)):
        lines += [
            f"    full{i} = alloc({shape}, symmetric=tp)",
            f"    main: copy({source}, full{i}[tp.rank])",
            f"    main: notify(ready{i}, to=tp.others)",
            f"    main: expect(ready{i}, tp.rank + 1)",
            f"    main: get(full{i}[tp.rank + 1], peer=tp.rank + 1)",
            f"    main: copy(full{i}[tp.rank + 1], {source})",
        ]
    return PlanMemory().run(parse(SITES.format(lines="\n".join(lines))))


def slots(program: Program) -> list[str | None]:
    """The slots that the symmetric buffers take."""
    allocs = [op.buffer for op in program.ops if isinstance(op, Alloc)]
    return [buffer.storage for buffer in allocs if buffer.kind == "symmetric"]


def test_one_slot_serves_buffers_one_after_another() -> None:
    program = gathers("f32[4, 4]", "x", "f32[4, 8]", "y", "f32[4, 4]", "x")
    assert slots(program) == ["s0", "s1", "s0"]
    freed = [op.buffer for op in program.ops if isinstance(op, Free)]
    assert freed == ["full0", "full1", "full2"]
    program = InsertSync().run(program)
    assert check(program).sound
    assert shared_places([program]) == {("s0", 0): 0, ("s1", 0): 0, ("s0", 1): 0}


def test_buffers_that_live_at_once_take_slots_of_their_own() -> None:
    lines = """
    a = alloc(f32[4, 4], symmetric=tp)
    b = alloc(f32[4, 8], symmetric=tp)
    main: copy(x, a[0:2])
    main: copy(y, b[0:2])
    main: copy(a[0:2], x)
    c = alloc(f32[4, 4], symmetric=tp)
    main: copy(x, c[0:2])
    main: copy(b[0:2], y)
    main: copy(c[0:2], x)
"""
    program = PlanMemory().run(parse(SITES.format(lines=lines)))
    assert slots(program) == ["s0", "s1", "s0"]
    assert slots(PlanMemory(reuse=False).run(parse(SITES.format(lines=lines)))) == [
        "s0",
        "s1",
        "s2",
    ]


def test_uneven_ranks_share_offsets() -> None:
    program = planned("""
def p(tp: Team[2], x: f32[rows[tp.rank], 64], w: f32[64, 64]):
    rows = table(tp, 64, 1)
    main: call("aten.mm.default", x, w, out=(a := f32[rows[tp.rank], 64]))
    b = alloc(f32[64, 64])
    main: call("aten.mm.out", w, w, out=b)
    main: copy(a, x)
    main: copy(b, w)
    return ()
""")
    assert offsets(program) == {"a": 0, "b": SIZE}
    assert check(InsertSync().run(program)).sound
