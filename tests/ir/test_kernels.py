"""Kernels of Fused ops: parts that are not what the kernel does are refused, with the reason."""

from __future__ import annotations

import pytest

from interlace.errors import ParseError, ProgramError
from interlace.ir import parse, validate

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
SCATTER = """
def f(tp: Team[2], x: bf16[512, 8], w: bf16[8, 8]):
    stage = alloc(bf16[512, 8])
    slots = alloc(bf16[512, 8], symmetric=tp)
    main: fused(
        part(
            call("aten.mm.out", x[tp.rank + 1][0:128], w, out=stage[tp.rank + 1][0:128]),
            record(e1),
        ),
        part(call("aten.mm.out", x[tp.rank][0:128], w, out=slots[tp.rank][0:128]), record(e2)),
        part(
            call("aten.mm.out", x[tp.rank + 1][128:256], w, out=stage[tp.rank + 1][128:256]),
            record(e3),
        ),
        part(call("aten.mm.out", x[tp.rank][128:256], w, out=slots[tp.rank][128:256])),
        kernel=scatter_matmul(pieces=2, lead=1),
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
    "another call": (GATHER, "aten.mm.out", "aten.mul.out", "part 1 is not one mm or addmm"),
    "not symmetric": (GATHER, "slots[tp.rank + 1], w", "other[tp.rank + 1], w", "is not symmetric"),
    "one part": (
        GATHER,
        GATHER[GATHER.index("        part(\n") : GATHER.index("        kernel=")],
        "",
        "one part computes nothing for",
    ),
    "no result": (GATHER, ", out=y[tp.rank])", ")", "part 1 is not one mm or addmm"),
    "one factor": (GATHER, "x, w, out=y[tp.rank])", "x, out=y[tp.rank])", "part 1 is not one mm"),
    "element type": (GATHER, "bf16", "f32", "the kernel takes bf16 or f16"),
    "another kernel": (GATHER, "gather_matmul()", "scatter_matmul()", "'y' is not symmetric"),
    "other pieces": (SCATTER, "pieces=2", "pieces=1", "it has 4 parts, and its kernel 2"),
    "another order": (SCATTER, "lead=1", "lead=0", "not the rows of one matrix"),
    "no order": (SCATTER, "lead=1", "lead=3", "2 pieces with lead 3 have no order"),
    "no tiles": (
        SCATTER.replace("128", "64"),
        "256",
        "128",
        "whole tiles of 128 rows, and not 2 of",
    ),
}


@pytest.mark.parametrize("text", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_parts_as_the_kernel_does_them(text: str) -> None:
    validate(parse(text))


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
