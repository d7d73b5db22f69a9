"""Kernels of Fused ops: parts that are not what the kernel does are refused, with the reason."""

from __future__ import annotations

import pytest
from tests.ir.refusals import rows

from interlace.errors import ParseError, ProgramError
from interlace.float8 import data
from interlace.ir import kernels, parse, validate
from interlace.kernels.gemm import support

GATHER = """
def f(tp: Team[2], dp: Team[2], x: bf16[4, 8], w: bf16[8, 8], v: bf16[8, 8], y: out[bf16[8, 8]]):
    slots = alloc(bf16[8, 8], symmetric=tp)
    other = alloc(bf16[8, 8])
    main: notify(came, to=tp.others)
    main: fused(
        part(call("aten.mm.out", x, w, out=y[tp.rank])),
        part(
            expect(came, tp.rank + 1),
            call("aten.mm.out", slots[tp.rank + 1], w, out=y[tp.rank + 1]),
        ),
        kernel=gather_matmul(),
    )
"""
PIECES = """
def f(tp: Team[2], x: bf16[256, 8], w: bf16[8, 8], y: out[bf16[512, 8]]):
    slots = alloc(bf16[512, 8], symmetric=tp)
    main: notify(came, to=tp.others, value=4)
    main: fused(
        part(call("aten.mm.out", x, w, out=y[tp.rank])),
        part(
            expect(came, tp.rank + 1, value=3),
            call("aten.mm.out", slots[tp.rank + 1][0:128], w, out=y[tp.rank + 1][0:128]),
        ),
        part(
            expect(came, tp.rank + 1, value=4),
            call("aten.mm.out", slots[tp.rank + 1][128:256], w, out=y[tp.rank + 1][128:256]),
        ),
        kernel=gather_matmul(pieces=2),
    )
"""
SCATTER = """
def f(tp: Team[2], x: bf16[512, 8], w: bf16[8, 8]):
    stage = alloc(bf16[512, 8])
    slots = alloc(bf16[512, 8], symmetric=tp)
    main: fused(
        part(
            call("aten.mm.out", x[tp.rank + 1][0:128], w, out=stage[tp.rank + 1][0:128]),
            record(e1),
        ),
        part(
            call("aten.mm.out", x[tp.rank + 1][128:256], w, out=stage[tp.rank + 1][128:256]),
            record(e2),
        ),
        part(call("aten.mm.out", x[tp.rank][0:128], w, out=slots[tp.rank][0:128]), record(e3)),
        part(call("aten.mm.out", x[tp.rank][128:256], w, out=slots[tp.rank][128:256])),
        kernel=scatter_matmul(pieces=2, own=2),
    )
"""
HALVES = """
def f(tp: Team[2], x: bf16[512, 8], w: bf16[8, 8]):
    stage = alloc(bf16[512, 8])
    slots = alloc(bf16[512, 8], symmetric=tp)
    main: fused(
        part(call("aten.mm.out", x[tp.rank + 1], w, out=stage[tp.rank + 1]), record(e1)),
        part(call("aten.mm.out", x[tp.rank][0:128], w, out=slots[tp.rank][0:128]), record(e2)),
        part(call("aten.mm.out", x[tp.rank][128:256], w, out=slots[tp.rank][128:256])),
        kernel=scatter_matmul(own=2),
    )
"""
PACKED = """
def f(tp: Team[2], x: f8e5m2[128, 144], w: f8e4m3[32, 144], v: bf16[32], y: out[bf16[256, 32]]):
    slots = alloc(f8e5m2[256, 144], symmetric=tp)
    main: notify(came, to=tp.others)
    main: fused(
        part(call("interlace.float8_mm.out", x, w.permute(1, 0), 1, v, True, out=y[tp.rank])),
        part(
            expect(came, tp.rank + 1),
            call("interlace.float8_mm.out", slots[tp.rank + 1], w.permute(1, 0), 1, v, True,
                out=y[tp.rank + 1]),
        ),
        kernel=gather_matmul(),
    )
"""
TEXTS = {
    "gather": GATHER,
    "pieces": PIECES,
    "scatter": SCATTER,
    "halves": HALVES,
    "packed": PACKED,
    "half a tile": PACKED.replace("[128", "[64").replace("[256", "[128"),
    "row-major": PACKED.replace("w: f8e4m3[32, 144]", "w: f8e4m3[144, 32]"),
    "in turn": HALVES.replace("slots[tp.rank][0:128]", "slots[tp.rank][128:256]"),
    "half tiles": HALVES.replace("128", "64"),
    "no tiles": SCATTER.replace("128", "64"),
}
HALF, WHOLE = "slots[tp.rank][128:256]", "slots[tp.rank][0:128]"
OTHERS = [
    *rows("kernel", 4),
    ("half a tile", "[64", "[64", "whole tiles of 128 rows, and a rank has 64"),
    ("row-major", "w.permute(1, 0)", "w", "neither row-major nor its transpose"),
    ("in turn", HALF, WHOLE, "not the rows of one matrix"),
    ("half tiles", "256", "128", "half ranges of whole tiles of 128 rows, and not 2 of 128"),
    ("no tiles", "256", "128", "whole tiles of 128 rows, and not 2 of"),
]


@pytest.mark.parametrize("name", ["gather", "pieces", "scatter", "halves", "packed"])
def test_parts_as_the_kernel_does_them(name: str) -> None:
    validate(parse(TEXTS[name]))


def test_packed_rows_are_those_of_float8() -> None:
    assert kernels.TAIL == support.TAIL == data.TAIL


@pytest.mark.parametrize(("name", "old", "new", "told"), OTHERS)
def test_parts_that_it_does_not_do(name: str, old: str, new: str, told: str) -> None:
    text = TEXTS[name]
    assert old in text
    with pytest.raises(ProgramError, match="the parts are not what") as error:
        validate(parse(text.replace(old, new)))
    assert told in str(error.value)
    assert "leave kernel= out" in str(error.value)


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        ("gather_matmull()", "did you mean 'gather_matmul'"),
        ("gather_matmul", "gather_matmul"),
        ("scatter_matmul(piece=2)", "pieces"),
        ('"gather"', "scatter_matmul"),
    ],
)
def test_a_kernel_is_the_call_of_one(kernel: str, told: str) -> None:
    with pytest.raises(ParseError) as error:
        parse(GATHER.replace("gather_matmul()", kernel))
    assert told in str(error.value)
