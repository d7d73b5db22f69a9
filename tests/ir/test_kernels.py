"""Kernels of Fused ops: parts that are not what the kernel does are refused, with the reason."""

from __future__ import annotations

import pytest

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
OTHERS = {
    "rows elsewhere": (
        GATHER,
        "out=y[tp.rank + 1]",
        "out=y[tp.rank]",
        "not the rows of one matrix",
    ),
    "in two buffers": (
        GATHER,
        "out=y[tp.rank]",
        "out=other[tp.rank]",
        "not the rows of one matrix",
    ),
    "two weights": (
        GATHER,
        "slots[tp.rank + 1], w,",
        "slots[tp.rank + 1], v,",
        "different matrices",
    ),
    "awaits itself": (GATHER, "expect(came, tp.rank + 1)", "expect(came, tp.rank)", "another rank"),
    "no wait": (GATHER, "expect(came, tp.rank + 1),\n", "", "part 2 waits or tells"),
    "another call": (GATHER, "aten.mm.out", "aten.mul.out", "part 1 is no mm, addmm or"),
    "not symmetric": (GATHER, "slots[tp.rank + 1], w", "other[tp.rank + 1], w", "is not symmetric"),
    "one part": (
        GATHER,
        GATHER[GATHER.index("        part(\n") : GATHER.index("        kernel=")],
        "",
        "one part computes nothing for",
    ),
    "no result": (
        GATHER,
        '"aten.mm.out", x, w, out=y[tp.rank])',
        '"aten.mm.default", x, w)',
        "part 1 is no mm, addmm or",
    ),
    "one factor": (GATHER, "x, w, out=y[tp.rank])", "x, out=y[tp.rank])", "part 1 is no mm"),
    "element type": (GATHER, "bf16", "f32", "the kernel takes bf16 or f16"),
    "another kernel": (GATHER, "gather_matmul()", "scatter_matmul()", "'y' is not symmetric"),
    "a scale a row": (PACKED, "1, v, True", "0, v, True", "have their own scales"),
    "several scales": (PACKED, "1, v, True", "2, v, True", "have 2 scales"),
    "sums in fp32": (PACKED, "1, v, True", "1, v, False", "it asks for sums in fp32"),
    "half a tile": (
        PACKED.replace("[128", "[64").replace("[256", "[128"),
        "[64",
        "[64",
        "whole tiles of 128 rows, and a rank has 64",
    ),
    "only e5m2": (PACKED, "w: f8e4m3", "w: f8e5m2", "f8e5m2 and f8e5m2, not f8e4m3 or one"),
    "FP8 by bf16": (PACKED, "w: f8e4m3", "w: bf16", "f8e5m2 and bf16, not f8e4m3 or one"),
    "a wide result": (PACKED, "y: out[bf16", "y: out[f32", "its result is f32"),
    "a wide bias": (PACKED, "v: bf16", "v: f32", "its bias is f32, and its result bf16"),
    "no numbers": (PACKED, "144]", "128]", "no numbers before their scale"),
    "row-major": (
        PACKED.replace("w: f8e4m3[32, 144]", "w: f8e4m3[144, 32]"),
        "w.permute(1, 0)",
        "w",
        "neither row-major nor its transpose",
    ),
    "other pieces": (SCATTER, "pieces=2", "pieces=1", "it has 4 parts, and its kernel 3"),
    "another order": (SCATTER, "own=2", "own=0", "not the rows of one matrix"),
    "half as one": (HALVES, "own=2", "own=1", "it has 3 parts, and its kernel 2"),
    "halves in turn": (
        HALVES.replace("slots[tp.rank][0:128]", "slots[tp.rank][128:256]"),
        "slots[tp.rank][128:256]",
        "slots[tp.rank][0:128]",
        "not the rows of one matrix",
    ),
    "no half tiles": (
        HALVES.replace("128", "64"),
        "256",
        "128",
        "half ranges of whole tiles of 128 rows, and not 2 of 128",
    ),
    "not one piece": (PIECES, "pieces=2", "pieces=1", "it has 3 parts, and its kernel 2"),
    "values that jump": (PIECES, "value=3", "value=2", "values that do not rise by 1"),
    "values that fall": (PIECES, "value=3", "value=5", "values that do not rise by 1"),
    "own pieces": (PIECES, "pieces=2", "pieces=2, own=2", "2 pieces and 2 of the rank's own rows"),
    "many own": (SCATTER, "own=2", "own=4", "2 pieces and 4 of the rank's own rows"),
    "no tiles": (
        SCATTER.replace("128", "64"),
        "256",
        "128",
        "whole tiles of 128 rows, and not 2 of",
    ),
}


@pytest.mark.parametrize(
    "text",
    [GATHER, PIECES, SCATTER, HALVES, PACKED],
    ids=["gather", "pieces", "scatter", "halves", "packed"],
)
def test_parts_as_the_kernel_does_them(text: str) -> None:
    validate(parse(text))


def test_packed_rows_are_those_of_float8() -> None:
    assert kernels.TAIL == support.TAIL == data.TAIL


@pytest.mark.parametrize("name", OTHERS)
def test_parts_that_it_does_not_do(name: str) -> None:
    text, old, new, told = OTHERS[name]
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
