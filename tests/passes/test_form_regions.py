"""form_regions: which calls become one, and that nothing else changes."""

from __future__ import annotations

import random

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


def add(one: str, other: str, name: str) -> str:
    return f'    main: call("aten.add.Tensor", {one}, {other}, out=({name} := f32[4, 4]))\n'


def mm(source: str, name: str) -> str:
    return f'    main: call("aten.mm.default", {source}, y, out=({name} := f32[4, 4]))\n'


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
    "a matmul between a call and its reader": (
        neg("x", "a")
        + '    main: call("aten.mm.default", x, y, out=(b := f32[4, 4]))\n'
        + add("a", "b", "c")
        + "    return c",
        ["aten.mm.default", "region_0"],
    ),
    "a reader, and another one before it": (
        neg("x", "a")
        + '    main: call("aten.mm.default", a, y, out=(b := f32[4, 4]))\n'
        + add("a", "b", "c")
        + "    return c",
        ["aten.neg.default", "aten.mm.default", "aten.add.Tensor"],
    ),
    "a write between": (
        neg("x", "a")
        + '    main: call("aten.mm.out", y, y, out=x)\n'
        + add("a", "x", "c")
        + "    return c",
        ["aten.neg.default", "aten.mm.out", "aten.add.Tensor"],
    ),
    "a reader of what arrives": (
        neg("x", "a")
        + '    r = empty(f32[2, 4])\n    main: reduce_scatter(y, r, reduce="sum", team=tp)\n'
        + "    g = empty(f32[4, 4])\n    main: all_gather(r, g, team=tp)\n"
        + add("a", "g", "c")
        + "    return c",
        ["aten.neg.default", "aten.add.Tensor"],
    ),
    "two buffers that would be kept": (
        mm("x", "m")
        + mm("y", "n")
        + add("m", "n", "a")
        + mm("x", "b")
        + add("a", "b", "c")
        + "    return c",
        ["aten.mm.default"] * 2 + ["aten.add.Tensor", "aten.mm.default", "aten.add.Tensor"],
    ),
    "two buffers that would be kept longer than their other reader": (
        mm("x", "m")
        + mm("y", "n")
        + add("m", "n", "a")
        + '    main: call("aten.mm.default", m, n, out=(o := f32[4, 4]))\n'
        + mm("o", "b")
        + add("a", "b", "c")
        + "    return c",
        ["aten.mm.default"] * 2
        + ["aten.add.Tensor"]
        + ["aten.mm.default"] * 2
        + ["aten.add.Tensor"],
    ),
    "one buffer that is kept instead of another": (
        mm("x", "m") + neg("m", "a") + mm("x", "b") + add("a", "b", "c") + "    return c",
        ["aten.mm.default", "aten.mm.default", "region_0"],
    ),
    "what is read was freed between": (
        mm("x", "m")
        + neg("m", "a")
        + "    main: free(m)\n"
        + mm("x", "b")
        + add("a", "b", "c")
        + "    return c",
        ["aten.mm.default", "aten.neg.default", "aten.mm.default", "aten.add.Tensor"],
    ),
    "a matmul between a call and what it alone reads": (
        mm("x", "m")
        + mm("y", "n")
        + add("m", "n", "a")
        + mm("x", "b")
        + neg("a", "c")
        + mm("c", "d")
        + "    return b, d",
        ["aten.mm.default", "aten.mm.default", "region_0", "aten.mm.default", "aten.mm.default"],
    ),
    "and what others read, too": (
        neg("x", "a")
        + mm("a", "m")
        + neg("a", "b")
        + mm("b", "n")
        + mm("a", "o")
        + "    return m, n, o",
        ["aten.neg.default", "aten.mm.default", "aten.neg.default"] + ["aten.mm.default"] * 2,
    ),
    "a chain that moves": (
        mm("x", "m")
        + neg("m", "a")
        + mm("x", "n")
        + neg("a", "b")
        + mm("n", "o")
        + add("b", "o", "c")
        + "    return c",
        ["aten.mm.default"] * 3 + ["region_0"],
    ),
    "a norm that leaves out a result": (
        '    main: call("aten.native_layer_norm_backward.default", x, y, (4,), x, y, None, None, '
        "(True, False, False), out=(a := f32[4, 4], b := f32[4], c := f32[4]))\n"
        + neg("a", "d")
        + "    return d",
        ["aten.native_layer_norm_backward.default", "aten.neg.default"],
    ),
    "what a peer may write between": (
        '    s = alloc(f32[4, 4], symmetric=tp)\n    main: call("aten.mm.out", x, y, out=s)\n'
        + mm("x", "m")
        + mm("y", "n")
        + add("m", "n", "a")
        + mm("x", "b")
        + add("a", "s", "c")
        + "    main: free(s)\n"
        + mm("c", "d")
        + "    return b, d",
        [
            "aten.mm.out",
            "aten.mm.default",
            *(["aten.mm.default", "aten.add.Tensor"] * 2),
            "aten.mm.default",
        ],
    ),
    "a norm of what is added": (
        add("x", "y", "a")
        + '    main: call("aten._fused_rms_norm.default", a, (4,), None, 1e-5, '
        + "out=(n := f32[4, 4], r := f32[4, 1]))\n"
        + neg("n", "b")
        + "    return a, b, r",
        ["region_0"],
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


def test_a_norm_inside_has_all_its_results() -> None:
    body = add("x", "y", "a") + (
        '    main: call("aten.native_layer_norm.default", a, (4,), None, None, 1e-5, '
        "out=(n := f32[4, 4], mean := f32[4, 1], rstd := f32[4, 1]))\n" + neg("n", "b")
    )
    before = parse(
        f"def p(tp: Team[2], x: f32[4, 4], y: f32[4, 4]):\n{body}    return b, mean, rstd\n"
    )
    after = FormRegions().run(before)
    assert calls(after) == ["region_0"]
    inputs = [[torch.arange(16.0).view(4, 4) - 7, torch.eye(4)] for _ in range(2)]
    for mine, theirs in zip(run_ranks(before, inputs), run_ranks(after, inputs), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def drawn(rng: random.Random) -> str:
    """Small calls, matmuls and writes in place, in any order, of which any three are returned."""
    names, lines, ended = ["x", "y"], list[str](), set[str]()
    for number in range(rng.randint(4, 14)):
        one, other = rng.choices(sorted({*names} - ended), k=2)
        kind = rng.choice(["neg", "add", "add", "mm", "mm", "write", "free"])
        if kind == "write":
            lines.append(f'    main: call("aten.mm.out", {one}, y, out={other})\n' * (one != other))
        elif kind == "free" and one not in "xy":
            lines.append(f"    main: free({one})\n")
            ended.add(one)
        elif kind != "free":
            made = neg(one, f"v{number}") if kind == "neg" else mm(one, f"v{number}")
            lines.append(add(one, other, f"v{number}") if kind == "add" else made)
            names.append(f"v{number}")
    left = sorted({*names} - ended)
    returned = ", ".join(dict.fromkeys(rng.choices(left, k=3)))
    lines = [line for line in lines if "out=y)" not in line]
    return f"def p(x: f32[4, 4], y: f32[4, 4]):\n{''.join(lines)}    return {returned}\n"


def test_drawn_programs_give_the_same_with_regions(seed: int) -> None:
    rng = random.Random(seed)
    moved = 0
    for _ in range(200):
        before = parse(drawn(rng))
        validate(before)
        after = FormRegions().run(before)
        validate(after)
        moved += after != before
        inputs = [[torch.eye(4) * 0.5 + 0.1, torch.eye(4).flip(0) * 0.5]]
        clones = [[value.clone() for value in each] for each in inputs]
        (mine,), (theirs,) = run_ranks(before, inputs), run_ranks(after, clones)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), str(before)
    assert moved > 20
