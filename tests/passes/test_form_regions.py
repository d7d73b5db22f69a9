"""form_regions: which calls become one, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from tests.support.interpreter import run_ranks

from interlace.ir import Call, Program, parse, validate
from interlace.passes.form_regions import FormRegions


def formed(body: str) -> Program:
    """The Program of these statements after the pass."""
    program = parse(f"def p(tp: Team[2], x: f32[4, 4], y: f32[4, 4]):\n{body}")
    result = FormRegions().run(program)
    validate(result)
    assert FormRegions().run(result) == result, "once is enough"
    assert parse(str(result)) == result
    return result


def calls(program: Program) -> list[str]:
    """What is called, in order."""
    return [op.fn for op in program.ops if isinstance(op, Call)]


def neg(source: str, name: str, more: str = "") -> str:
    """A small call."""
    return f'    main: call("aten.neg.default", {source}, out=({name} := f32[4, 4]){more})\n'


CASES = {
    "a chain": (neg("x", "a") + neg("a", "b") + "    return b", ["region_0"]),
    "calls that share a small input alone": (
        '    main: call("aten.sum.dim_IntList", x, (0,), True, out=(s := f32[1, 4]))\n'
        '    main: call("aten.mm.default", y, y, out=(m := f32[4, 4]))\n'
        '    main: call("aten.add.Tensor", m, s, out=(a := f32[4, 4]))\n'
        '    main: call("aten.add.Tensor", x, s, out=(b := f32[4, 4]))\n    return a, b',
        ["aten.sum.dim_IntList", "aten.mm.default", "aten.add.Tensor", "aten.add.Tensor"],
    ),
    "two chains in turns": (
        neg("x", "a") + neg("y", "b") + neg("a", "c") + neg("b", "d") + "    return c, d",
        ["region_0", "region_0"],
    ),
    "numbers that are equal and of another kind": (
        neg("x", "a")
        + '    main: call("aten.mul.Tensor", a, 2, out=(b := f32[4, 4]))\n'
        + neg("y", "c")
        + '    main: call("aten.mul.Tensor", c, 2.0, out=(d := f32[4, 4]))\n'
        + "    return b, d",
        ["region_0", "region_1"],
    ),
    "a matmul between": (
        neg("x", "a")
        + '    main: call("aten.mm.default", a, y, out=(b := f32[4, 4]))\n'
        + neg("b", "c")
        + "    return c",
        ["aten.neg.default", "aten.mm.default", "aten.neg.default"],
    ),
    "a call of a site": (
        '    site(1, "all_gather")\n' + neg("x", "a", ", site=1") + neg("a", "b") + "    return b",
        ["aten.neg.default"] * 2,
    ),
    "a write in place": (
        neg("x", "a")
        + '    main: call("aten.neg_.default", a, out=a, mutates=True)\n'
        + neg("a", "b")
        + "    return b",
        ["aten.neg.default", "aten.neg_.default", "aten.neg.default"],
    ),
    "random numbers": (
        neg("x", "a")
        + '    main: call("aten.rand_like.default", a, out=(b := f32[4, 4]), rng=True)\n'
        + neg("b", "c")
        + "    return c",
        ["aten.neg.default", "aten.rand_like.default", "aten.neg.default"],
    ),
    "a rank's rows of a value inside": (
        neg("x", "a")
        + '    main: call("aten.neg.default", a[tp.rank], out=(b := f32[2, 4]))\n'
        + "    return b",
        ["aten.neg.default"] * 2,
    ),
    "what nobody reads": (neg("x", "a") + neg("a", "b") + "    return x", ["aten.neg.default"] * 2),
}


@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_what_becomes_a_region(body: str, expected: list[str]) -> None:
    assert calls(formed(body)) == expected


def test_a_region_begins_where_communication_arrives() -> None:
    program = formed(
        "    g = empty(f32[4, 4])\n    main: all_reduce(y, g, reduce='sum', team=tp)\n"
        + neg("x", "a")
        + neg("a", "b")
        + '    main: call("aten.add.Tensor", b, g, out=(c := f32[4, 4]))\n'
        + neg("c", "d")
        + "    return d"
    )
    assert calls(program) == ["region_0", "region_1"]
    reads = [
        access.view.buffer for op in program.ops if isinstance(op, Call) for access in op.reads()
    ]
    assert reads == ["x", "b", "g"], "the first does not wait for what arrives"


def test_what_waits_holds_up_nothing_that_only_reads_the_same() -> None:
    program = formed(
        "    g = empty(f32[4, 4])\n    main: all_reduce(y, g, reduce='sum', team=tp)\n"
        + '    main: call("aten.mul.Tensor", x, g, out=(a := f32[4, 4]))\n'
        + '    main: call("aten.sub.Tensor", a, x, out=(c := f32[4, 4]))\n'
        + neg("x", "b")
        + "    return c, b"
    )
    assert calls(program) == ["region_0", "aten.neg.default"]


def test_views_of_inputs_outside_and_of_values_inside() -> None:
    program = formed(
        neg("x.permute(1, 0)", "a")
        + '    main: call("aten.add.Tensor", a.permute(1, 0), x.permute(1, 0), '
        "out=(b := f32[4, 4]))\n    return b"
    )
    (region,) = program.regions
    assert [node.fn for node in region.body] == [
        "aten.neg.default",
        "aten.permute.default",
        "aten.add.Tensor",
    ]
    assert region.inputs == ("i0",), "one view, however often it is read"


VIEWS = {
    "slice": ("a[0:2]", "f32[2, 4]"),
    "select": ("a.select(1, 2)", "f32[4]"),
    "permute": ("a.permute(1, 0)", "f32[4, 4]"),
    "view": ("a.view(2, 8)", "f32[2, 8]"),
    "expand": ("a.view(1, 16).expand(3, 16)", "f32[3, 16]"),
    "cast": ("a.cast(i32)", "i32[4, 4]"),
    "as_strided": ("a.as_strided((2, 2), (4, 1), 5)", "f32[2, 2]"),
}


@pytest.mark.parametrize(("view", "shape"), VIEWS.values(), ids=VIEWS)
def test_every_view_of_a_value_inside(view: str, shape: str) -> None:
    body = neg("x", "a") + f'    main: call("aten.neg.default", {view}, out=(b := {shape}))\n'
    before = parse(f"def p(tp: Team[2], x: f32[4, 4], y: f32[4, 4]):\n{body}    return b\n")
    after = FormRegions().run(before)
    assert calls(after) == ["region_0"]
    inputs = [[torch.arange(16.0).view(4, 4) - 7, torch.zeros(4, 4)] for _ in range(2)]
    for mine, theirs in zip(run_ranks(before, inputs), run_ranks(after, inputs), strict=True):
        assert torch.equal(torch.as_tensor(mine[0]), torch.as_tensor(theirs[0]))
