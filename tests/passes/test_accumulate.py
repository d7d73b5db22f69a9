"""accumulate: which sums matmuls do themselves, and that the results stay."""

from __future__ import annotations

import re

import pytest
from tests.passes.spellings import as_sample
from tests.passes.test_decompose import assert_overlaps

from interlace.cost import default_machine
from interlace.ir import Call, Program, parse, validate
from interlace.options import Options
from interlace.passes import lower, run_pipeline
from interlace.passes.accumulate import Accumulate
from interlace.verify import check

HEAD = """
def p(
    tp: Team[{ranks}], x: f32[8, 4], y: f32[8, 4], w: f32[4, 6], v: f32[4, 6], r: f32[8, 6]
):"""
MM = """
    s = alloc(f32[8, 6])
    t = alloc(f32[8, 6])
    main: call("aten.mm.out", x, v, out=s)
    main: call("aten.mm.out", y, w, out=t)
"""


def summed(body: str, ranks: int = 1) -> Program:
    """The Program of these statements after the pass."""
    program = parse(HEAD.format(ranks=ranks) + body)
    validate(program)
    made = Accumulate().run(program)
    validate(made)
    check(made).raise_if_unsound()
    return made


def calls(program: Program) -> list[str]:
    return [op.fn.split(".")[1] for op in program.ops if isinstance(op, Call)]


SUM = '    main: call("aten.add.Tensor", s, t, out=(z := f32[8, 6]))\n'
OWN = '    main: call("aten.neg.default", z, out=(n := f32[8, 6]))\n    return n\n'
CASES = {
    "two matmuls": (MM + SUM + OWN, ["mm", "addmm_", "neg"]),
    "into memory that is there": (
        """
    z = alloc(f32[2, 8, 6])"""
        + MM
        + """    main: call("aten.add.out", s, t, out=z.select(0, 1))
    main: call("aten.add.out", r, r, out=z.select(0, 0))
    main: call("aten.neg.default", z, out=(n := f32[2, 8, 6]))
    return n
""",
        ["mm", "addmm_", "add", "neg"],
    ),
    "what is no matmul's": (
        MM.replace('call("aten.mm.out", x, v, out=s)', 'call("aten.neg.out", r, out=s)')
        + SUM
        + OWN,
        ["neg", "mm", "add", "neg"],
    ),
    "what may be the caller's memory": (
        """
    t = alloc(f32[8, 6])
    main: call("aten._unsafe_view.default", r, (8, 6), out=(s := f32[8, 6]))
    main: call("aten.mm.out", y, w, out=t)
"""
        + SUM
        + OWN,
        ["_unsafe_view", "mm", "add", "neg"],
    ),
    "memory that is used again while the sum is needed": (
        MM
        + SUM
        + """
    main: call("aten.mm.out", y, v, out=s)
    main: call("aten.mul.Tensor", s, z, out=(n := f32[8, 6]))
    return n
""",
        ["mm", "mm", "add", "mm", "mul"],
    ),
    "a result that is written again": (
        """
    main: call("aten.mm.default", x, v, out=(s := f32[8, 6]))
    main: call("aten.mm.default", y, w, out=(t := f32[8, 6]))
"""
        + SUM
        + """    main: call("aten.neg.out", z, out=t)
    return t
""",
        ["mm", "mm", "add", "neg"],
    ),
    "memory that is given back": (
        MM + SUM + OWN.replace("    return", "    main: free(z)\n    return"),
        ["mm", "mm", "add", "neg"],
    ),
    "shared storage": (
        MM.replace("s = alloc(f32[8, 6])", 's = alloc(f32[8, 6], storage="a")') + SUM + OWN,
        ["mm", "mm", "add", "neg"],
    ),
    "a result of the Program": (MM + SUM + "    return z\n", ["mm", "mm", "add"]),
    "a part is needed later": (
        MM
        + SUM
        + OWN.replace("n\n", "n, t2\n").replace(
            "    return", '    main: call("aten.neg.default", t, out=(t2 := f32[8, 6]))\n    return'
        ),
        ["mm", "mm", "add", "neg", "neg"],
    ),
    "a factor of the matmul": (
        """
    s = alloc(f32[8, 8])
    t = alloc(f32[8, 8])
    main: call("aten.mm.out", r, r.permute(1, 0), out=s)
    main: call("aten.mm.out", s, s, out=t)
    main: call("aten.add.Tensor", s, t, out=(z := f32[8, 8]))
    main: call("aten.neg.default", z, out=(n := f32[8, 8]))
    return n
""",
        ["mm", "mm", "add", "neg"],
    ),
}


@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_which_sums_matmuls_do(body: str, expected: list[str], seed: int) -> None:
    made = summed(body)
    assert calls(made) == expected
    assert_overlaps(made, as_sample(parse(HEAD.format(ranks=1) + body), seed), seed)


def test_memory_that_is_used_meanwhile_or_is_a_slot_taken_later_is_left() -> None:
    body, _ = CASES["into memory that is there"]
    alloc, add = "    z = alloc(f32[2, 8, 6])\n", '    main: call("aten.add.out", s'
    late = body.replace(alloc, "").replace(add, alloc + add)
    assert calls(summed(late)) == ["mm", "addmm_", "add", "neg"], "it is declared sooner"
    slot = late.replace("z = alloc(f32[2, 8, 6]", "z = alloc(f32[2, 8, 6], symmetric=tp")
    slot = slot.replace("    return", "    main: free(z)\n    return")
    left = ["mm", "mm", "add", "add", "neg"]
    assert calls(summed(slot)) == left
    second = '    main: call("aten.mm.out", y'
    used = body.replace(second, "    main: copy(r, z.select(0, 1))\n" + second)
    assert calls(summed(used)) == left


WAYS = ["serial", "ring", "peer", "copies"]
UNEVEN = """
def p(tp: Team[2], y: f32[rows[tp.rank], 4], w: f32[4, 6], v: f32[4, 6]):
    rows = table(tp, 2, 5)
    main: call("aten.mm.default", y, v, out=(s := f32[rows[tp.rank], 6]))
    main: call("aten.mm.default", y, w, out=(t := f32[rows[tp.rank], 6]))
    main: call("aten.add.Tensor", s, t, out=(z := f32[rows[tp.rank], 6]))
    main: call("aten.neg.default", z, out=(n := f32[rows[tp.rank], 6]))
    return n
"""
BY_HAND = """
def p(tp: Team[2], x: f32[8, 4], v: f32[4, 6], w: f32[4, 6]):
    o = alloc(f32[8, 6], symmetric=tp)
    g = empty(f32[8, 6])
    s = alloc(f32[8, 6])
    t = alloc(f32[8, 6])
    main: call("aten.zeros.out", (8, 6), out=o)
    main: notify(a, to=tp.rank + 1)
    main: expect(a, tp.rank + 1)
    main: get(o, g, peer=tp.rank + 1)
    main: notify(b, to=tp.rank + 1)
    main: call("aten.mm.out", x, v, out=s)
    main: call("aten.mm.out", x, w, out=t)
    main: expect(b, tp.rank + 1)
    main: call("aten.add.out", s, t, out=o)
    main: call("aten.neg.default", o, out=(n := f32[8, 6]))
    main: free(o)
    return g, n
"""


@pytest.mark.parametrize("text", [UNEVEN, BY_HAND])
def test_sizes_of_ranks_and_signals_between_are_left(text: str) -> None:
    program = parse(text)
    check(program).raise_if_unsound()
    assert Accumulate().run(program) == program


def test_other_streams_are_left() -> None:
    text = HEAD.format(ranks=1) + MM.replace(
        'main: call("aten.mm.out", y', 'side: call("aten.mm.out", y'
    )
    text = text.replace("    side:", "    main: record(e)\n    side: wait(e)\n    side:")
    program = parse(text + "    side: record(f)\n    main: wait(f)\n" + SUM + OWN)
    check(program).raise_if_unsound()
    assert Accumulate().run(program) == program


GRADIENTS = """
def backward(
    tp: Team[{ranks}], a: f32[{rows}, 4], b: f32[{rows}, 4], c: f32[{rows}, 4],
    v: f32[4, 6], w: f32[4, 6], x: f32[4, 6]
):
    s = alloc(f32[{rows}, 6])
    t = alloc(f32[{rows}, 6])
    u = alloc(f32[{rows}, 6])
    out = empty(f32[2, 6])
    main: call("aten.mm.out", a, v, out=s)
    main: call("aten.mm.out", b, w, out=t)
    main: call("aten.add.Tensor", s, t, out=(st := f32[{rows}, 6]))
    main: call("aten.mm.out", c, x, out=u)
    main: call("aten.add.Tensor", st, u, out=(stu := f32[{rows}, 6]))
    main: reduce_scatter(stu, out, reduce="sum", team=tp)
    return out
"""


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("declared", [False, True])
def test_gradients_of_shared_inputs(declared: bool, strategy: str, ranks: int, seed: int) -> None:
    """What q, k and v give their input, reduced: chunk by chunk or as a whole."""
    gradients = GRADIENTS.format(ranks=ranks, rows=2 * ranks)
    if not declared:
        gradients = re.sub(r"    [stu] = alloc.*\n", "", gradients)
        made = rf"mm.default\1out=(\2 := f32[{2 * ranks}, 6]))"
        gradients = re.sub(r"mm.out(.*)out=([stu])\)", made, gradients)
    sample = as_sample(parse(gradients), seed)
    options = Options.from_dict({"strategy": strategy, "regions": "inductor"})
    made = lower(sample.program, options, default_machine("cpu"))
    assert made.sites[0].strategy == strategy
    found = calls(made)
    assert found.count("addmm_") == 2 * found.count("mm") > 0
    assert found.count("add") == (ranks if strategy == "ring" else 1) - 1
    check(made).raise_if_unsound()
    assert_overlaps(made, sample, seed)
    plain = run_pipeline(sample.program, "find_sites,decompose{strategy=serial}")
    assert "addmm_" not in calls(plain), "regions=inductor asks for it"
