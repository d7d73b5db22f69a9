"""Facts about operators: torch's own schemas and tags, which a text can add to and not deny."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.commands.check import look_up
from interlace.errors import ProgramError
from interlace.ir import Call, parse, validate
from interlace.ir.operators import TABLE, Facts, facts_of, table
from interlace.runtime import Executor
from interlace.verify import check as verify

SCRIPT = Path(__file__).parents[2] / "scripts" / "operator_table.py"
_script = runpy.run_path(str(SCRIPT))
installed, spelt = _script["installed"], _script["spelt"]

X = torch.tensor([[0.5, -2.0], [3.0, -4.0]])


def run(text: str, *inputs: torch.Tensor, **options: Any) -> tuple[Any, ...]:
    with Executor(parse(text), **options).prepare() as executor:
        return tuple(executor.run(list(inputs)))


# -- the table ------------------------------------------------------------------------------------


def covers(row: Facts, seen: Facts) -> bool:
    """Whether a row says at least what a torch says of the operator."""
    return (
        {*seen.writes} <= {*row.writes}
        and seen.outs == row.outs
        and seen.draws <= row.draws
        and seen.unwritten <= row.unwritten
        and seen.remakes <= row.remakes
        and row.shape_only <= seen.shape_only
    )


def test_the_table_says_what_the_installed_torch_says() -> None:
    rows, here = table(), installed()
    wrong = {fn: (rows[fn], facts) for fn, facts in here.items() if fn in rows}
    assert not {fn: pair for fn, pair in wrong.items() if not covers(*pair)}
    made_with = TABLE.read_text().partition(" torch ")[2].split(",")[0]
    if torch.__version__.partition("+")[0] == made_with:
        missing = here.keys() - rows.keys()
        assert not missing, "run scripts/operator_table.py"


def test_a_row_is_read_as_it_was_written() -> None:
    for fn, facts in installed().items():
        name, _, overload = fn.rpartition(".")
        assert facts_of(fn) == facts, spelt(name.partition(".")[2], overload, facts)


def test_what_every_schema_says_is_in_the_facts() -> None:
    """By a question of its own: what torch would not let a functional graph do."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        if space not in ("aten", "prims"):
            continue
        schema = torch._C._get_schema(full.partition(".")[0], rest.partition(".")[2])
        facts = facts_of(f"{space}.{rest if '.' in rest else rest + '.default'}")
        assert facts is not None
        assert schema.is_mutable <= bool(facts.writes or facts.outs), full


# -- writes in place ------------------------------------------------------------------------------

WRITES = {
    "one": ('call("aten.mul_.Scalar", b, 3.0)', "b"),
    "by keyword": ('call("aten.mul_.Scalar", self=b, other=3.0)', "b"),
    "a list": ('call("aten._foreach_add_.Scalar", (b,), 1.0)', "b"),
    "with a result as well": ('call("aten.neg_.default", b, out=(r := f32[2, 2]))', "b"),
    "not the first": (
        'call("aten.rrelu_with_noise.default", x, b, 0.1, 0.3, True, out=(r := f32[2, 2]))',
        "b",
    ),
    "beside the rest": (
        'call("aten._amp_foreach_non_finite_check_and_unscale_.default", (b,), i, j)',
        "b",
    ),
    "where the schema is silent": (
        'call("aten.native_batch_norm.default", x, None, None, b.select(0, 0), b.select(0, 1), '
        "True, 0.1, 0.00001, out=((r := f32[2, 2]), (m := f32[2]), (v := f32[2])))",
        "b",
    ),
}
HEAD = """\
def f(x: f32[2, 2], i: f32[1], j: f32[1], y: out[f32[2, 2]]):
    b = alloc(f32[2, 2])
    main: copy(x, b)
    main: record(e)
    s: wait(e)
"""


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_races_though_nothing_declares_it(name: str) -> None:
    line, buffer = WRITES[name]
    report = verify(parse(f"{HEAD}    s: copy(b, y)\n    main: {line}\n"))
    assert {finding.kind for finding in report.findings} == {"race"}
    assert f"bytes of {buffer}" in report.findings[0].message
    after = f"    main: {line}\n    main: record(g)\n    s: wait(g)\n    s: copy(b, y)\n"
    assert verify(parse(HEAD + after)).sound


def test_the_argument_is_eagers_afterwards() -> None:
    text = 'def f(x: f32[2, 2], z: f32[2, 2]):\n    main: call("aten.add_.Tensor", x, z, alpha=2)\n'
    x = X.clone()
    assert run(text, x, X) == ()
    assert torch.equal(x, X * 3)


REFUSED = {
    "nothing is written": (
        'call("aten.add.Tensor", x, x, out=x, mutates=True)',
        "does not write 'x' in place",
    ),
    "filled by keyword": (
        'call("aten.max.dim_max", x, 0, max=x, out=x)',
        "fills 'max', which is given as an argument",
    ),
    "nothing to fill": ('call("aten.neg.out", x)', "fills memory that it is given"),
    "fresh is not given": ('call("aten.neg.out", x, out=(r := f32[2, 2]))', "and has none"),
    "strides change": ('call("aten.t_.default", x)', "changes an argument's shape"),
    "memory changes": ('call("aten.set_data.default", x, x)', "changes an argument's shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_declaration_that_cannot_be_is_refused(name: str) -> None:
    line, told = REFUSED[name]
    with pytest.raises(ProgramError) as error:
        validate(parse(f"def f(x: f32[2, 2]):\n    main: {line}\n"))
    assert told in str(error.value)
    assert "fix:" in str(error.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("aten.add_.Tensor(a, b)", "writes an argument in place"),
        ("aten.rand_like.default(a)", "draws random numbers"),
        ("aten.empty_like.default(a)", "leaves its result unwritten"),
    ],
)
def test_a_region_computes_values_alone(line: str, told: str) -> None:
    program = parse(
        "def f(x: f32[2, 2]):\n    @region\n    def r(a, b):\n"
        f"        t = {line}\n        return t\n"
        "    main: call('r', x, x, out=(y := f32[2, 2]))\n    return y\n"
    )
    with pytest.raises(ProgramError, match=told):
        validate(program)


# -- random numbers -------------------------------------------------------------------------------

DRAWS = {
    'call("aten.native_dropout.default", x, 0.5, True, '
    "out=((a{n} := f32[2, 2]), (m{n} := bool[2, 2])))": True,
    'call("aten.randperm.default", 5, out=(a{n} := i64[5]))': True,
    'call("aten.multinomial.default", x, 1, out=(a{n} := i64[2, 1]))': True,
    'call("aten.bernoulli.out", x, out=y{n})': True,
    'call("aten.scaled_dot_product_attention.default", x, x, x, dropout_p=0.5, '
    "out=(a{n} := f32[2, 2]))": True,
    'call("aten.scaled_dot_product_attention.default", x, x, x, None, 0.0, '
    "out=(a{n} := f32[2, 2]))": False,
    'call("aten.softmax.int", x, 1, out=(a{n} := f32[2, 2]))': False,
}


@pytest.mark.parametrize("line", DRAWS)
def test_what_draws_is_ordered_though_nothing_declares_it(line: str) -> None:
    head = "def f(x: f32[2, 2]):\n    y1 = empty(f32[2, 2])\n    y2 = empty(f32[2, 2])\n"
    text = f"{head}    main: {line.format(n=1)}\n    s: {line.format(n=2)}\n"
    report = verify(parse(text))
    assert report.sound != DRAWS[line]
    if DRAWS[line]:
        assert "bytes of rng" in report.findings[0].message


# -- memory that is not written -------------------------------------------------------------------

EMPTY = {
    'call("aten.empty_like.default", x, out=(a := f32[2, 2]))': "f32[2, 2]",
    'call("aten.new_empty.default", x, (2, 2), out=(a := f32[2, 2]))': "f32[2, 2]",
    'call("aten.empty_strided.default", (2, 2), (1, 2), out=(a := f32[2, 2].strides(1, 2)))': "",
    'call("prims.empty.default", (2, 2), dtype=f32, device="@device", requires_grad=False, '
    "out=(a := f32[2, 2]))": "",
}
FILLS = {
    "": False,
    'call("aten.add_.Scalar", a, 1.0)': False,
    'call("aten.fill_.Scalar", a, 2.0)': True,
    'call("aten.copy_.default", a, x)': True,
    'call("aten.normal_.default", a)': True,
    "copy(x, a)": True,
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("line", EMPTY)
def test_memory_that_is_only_allocated_is_unwritten(line: str, fill: str) -> None:
    lines = [line, *([fill] if fill else []), "copy(a, y)"]
    body = "".join(f"    main: {each}\n" for each in lines)
    report = verify(parse(f"def f(x: f32[2, 2], y: out[f32[2, 2]]):\n{body}"))
    assert report.sound == FILLS[fill]
    if not report.sound:
        assert {finding.kind for finding in report.findings} == {"uninitialized"}


def test_the_shape_of_what_is_unwritten_may_be_taken() -> None:
    text = """\
def f(x: f32[2, 2]):
    main: call("aten.empty_like.default", x, out=(a := f32[2, 2]))
    main: call("aten.ones_like.default", a, out=(y := f32[2, 2]))
    return y
"""
    assert torch.equal(run(text, X)[0], torch.ones(2, 2))


def test_empty_into_given_memory_writes_nothing() -> None:
    text = """\
def f(x: f32[2, 2], y: out[f32[2, 2]]):
    main: call("aten.empty.out", (2, 2), out=y)
"""
    report = verify(parse(text))
    assert {finding.kind for finding in report.findings} == {"uninitialized"}


# -- results that lie in an argument's memory -----------------------------------------------------

SHARED = [
    '"aten.type_as.default", b, x, out=(a := f32[2, 2])',
    '"aten.atleast_2d.default", b, out=(a := f32[2, 2])',
    '"aten.data.default", b, out=(a := f32[2, 2])',
    '"aten.contiguous.default", b, out=(a := f32[2, 2])',
    '"aten.reshape.default", b, (2, 2), out=(a := f32[2, 2])',
    '"aten.to.dtype", b, f32, out=(a := f32[2, 2])',
    '"aten.expand_as.default", b, x, out=(a := f32[2, 2])',
    '"aten.real.default", b, out=(a := f32[2, 2])',
    '"aten.alpha_dropout.default", b, 0.5, False, out=(a := f32[2, 2])',
    '"aten._unsafe_view.default", b, (2, 2), out=(a := f32[2, 2])',
    '"aten.lift.default", b, out=(a := f32[2, 2])',
    '"aten.resolve_conj.default", b, out=(a := f32[2, 2])',
    '"aten.relu_.default", b, out=(a := f32[2, 2])',
    '"aten.broadcast_tensors.default", (b, x), out=((a := f32[2, 2]), (c := f32[2, 2]))',
]


@pytest.mark.parametrize("call", SHARED)
@pytest.mark.parametrize("order", [False, True], ids=["streams", "in order"])
def test_a_result_is_a_value_of_its_own(call: str, order: bool) -> None:
    from interlace.options import Options

    text = f"""\
def f(x: f32[2, 2], z: f32[2, 2], y: out[f32[2, 2]]):
    b = alloc(f32[2, 2])
    main: copy(x, b)
    main: call({call})
    main: copy(z, b)
    main: copy(a, y)
"""
    assert verify(parse(text)).sound
    (y,) = run(text, X, X + 100, options=Options(in_order=order))
    assert torch.equal(y, X.relu() if "relu" in call else X)


def test_results_of_one_call_do_not_share_memory() -> None:
    text = """\
def f(x: f32[4]):
    main: call("aten.unsafe_split.Tensor", x, 2, out=((a := f32[2]), (b := f32[2])))
    return a, b
"""
    x = torch.arange(4.0)
    a, b = run(text, x)
    assert (a.tolist(), b.tolist()) == ([0, 1], [2, 3])
    assert len({t.untyped_storage()._cdata for t in (x, a, b)}) == 3


def test_the_result_of_a_region_is_a_value_of_its_own() -> None:
    text = """\
def f(x: f32[2, 2], z: f32[2, 2], y: out[f32[2, 2]]):
    @region
    def r(p):
        q = aten.type_as.default(p, p)
        return q
    b = alloc(f32[2, 2])
    main: copy(x, b)
    main: call("r", b, out=(a := f32[2, 2]))
    main: copy(z, b)
    main: copy(a, y)
"""
    assert torch.equal(run(text, X, X + 1)[0], X)


# -- operators that the table does not know -------------------------------------------------------


@torch.library.custom_op("operator_facts::scale", mutates_args=("x",))
def scale(x: torch.Tensor, by: float) -> None:
    """Writes what it is given."""
    x.mul_(by)


@torch.library.custom_op(
    "operator_facts::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise(x: torch.Tensor) -> torch.Tensor:
    """Draws."""
    return torch.rand_like(x)


SCALE = 'call("operator_facts.scale.default", b, 2.0{more})'
NOISE = 'call("operator_facts.noise.default", b, out=(a := f32[2, 2]){more})'


@pytest.mark.parametrize(
    ("line", "declared", "told"),
    [
        (SCALE, ", out=b, mutates=True", "writes its argument 'x' in place"),
        (NOISE, ", rng=True", "draws random numbers"),
    ],
)
def test_an_operator_that_the_table_lacks_is_asked_of_torch(
    line: str, declared: str, told: str
) -> None:
    text = "def f(b: f32[2, 2]):\n    main: {}\n"
    with pytest.raises(ProgramError, match=told):
        run(text.format(line.format(more="")), X.clone(), operators=["operator_facts"])
    run(text.format(line.format(more=declared)), X.clone(), operators=["operator_facts"])


def test_check_asks_torch_or_says_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.ir.operators._lines", dict)
    facts_of.cache_clear()
    from interlace.ir import operators as table_of_operators

    table_of_operators._overloads.cache_clear()
    try:
        program = parse('def f(b: f32[2, 2]):\n    main: call("aten.neg_.default", b)\n')
        with pytest.raises(ProgramError, match="writes its argument 'self' in place"):
            look_up([program])
        monkeypatch.setitem(sys.modules, "interlace.runtime.calling.effects", None)
        with pytest.raises(ProgramError, match="is not in the table of operators"):
            look_up([program])
    finally:
        facts_of.cache_clear()
        table_of_operators._overloads.cache_clear()


def test_facts_of_a_call_are_the_builders_too() -> None:
    import interlace

    with interlace.program("f") as p:
        x = p.input("x", "f32", (4,))
        p.call("aten.bernoulli_.float", x, 0.5)
    (op,) = p.program.ops
    assert isinstance(op, Call)
    assert (op.draws, [view.buffer for view in op.written]) == (True, ["x"])
    assert {access.view.buffer for access in op.writes()} == {"x", "rng"}
