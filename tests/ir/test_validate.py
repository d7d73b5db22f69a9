"""Each structural rule: a Program that breaks it, the message with its line, and how to mend it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from benchmarks.passes import reductions
from tests.ir.refusals import assert_told, rows
from tests.support.line_count import per_op

from interlace.errors import ProgramError
from interlace.ir import Collective, Loc, Notify, Program, parse, validate

BASE = """
def f(dp: Team[2], tp: Team[2], x: f32[4, 4], y: out[f32[4, 4]], part: f32[rows[tp.rank], 4]):
    rows = table(tp, 3, 1)
    site(1, "all_gather_matmul")
    remark("decompose", "declined", site=1)
    @region
    def scale(a, b):
        t0 = aten.mul.Tensor(a, b)
        return t0
    full = alloc(f32[4, 4], symmetric=tp)
    t = alloc(f32[4, 4], storage="arena", offset=4)
    n = empty(i64[4])
    main: record(e1)
    main: copy(x, t)  # here
    main: free(full)
    return y
"""


def refused(text: str) -> str:
    program = parse(text, file="made_up.ilc")
    with pytest.raises(ProgramError) as raised:
        validate(program)
    message = str(raised.value)
    shown = re.findall(r"^> *(\d+) \| (.*)$", message, re.MULTILINE)
    assert len(shown) == 1, message
    printed = str(program).splitlines()
    line = int(shown[0][0])
    assert printed[line - 1].rstrip() == shown[0][1], "the excerpt is of the printed Program"
    neighbours = [n for n in (line - 2, line - 1, line + 1, line + 2) if 0 < n <= len(printed)]
    for n in neighbours:
        assert f" {n} | {printed[n - 1]}".rstrip() in message
    return message


def test_base_is_well_formed() -> None:
    program = parse(BASE)
    assert validate(program) is program
    validate(Program())
    for rank in range(4):
        validate(parse(BASE).instantiate(rank))


@pytest.mark.parametrize(("op", "what", "fix"), rows("op", 3))
def test_op(op: str, what: str, fix: str) -> None:
    later = "\n    later = alloc(f32[4, 4])" if "later" in op else ""
    message = refused(BASE.replace("copy(x, t)  # here", op + later))
    assert_told(message, what, fix)
    assert re.search(r"^> *\d+ \|     main: ", message, re.MULTILINE)
    assert "from made_up.ilc:14:" in message.splitlines()[0]


@pytest.mark.parametrize(("declaration", "what", "fix"), rows("declaration", 3))
def test_declaration(declaration: str, what: str, fix: str) -> None:
    message = refused(BASE.replace("main: copy(x, t)  # here", declaration))
    assert_told(message, what, fix)
    assert re.search(r"^> *\d+ \|     \w+ = ", message, re.MULTILINE)


@pytest.mark.parametrize(("old", "new", "what", "fix"), rows("change", 4))
def test_what_stands_around_the_ops(old: str, new: str, what: str, fix: str) -> None:
    assert old in BASE
    assert_told(refused(BASE.replace(old, new, 1)), what, fix)


def test_a_rank_that_is_in_no_group_of_a_buffers_team() -> None:
    text = BASE.replace("dp: Team[2]", "dp: Team[[5, 6]]").replace("symmetric=tp", "symmetric=dp")
    assert_told(refused(text), "no group of team 'dp' has it", "add the rank to a group")


def test_rank_without_a_group() -> None:
    """Ops of a team that only some of the ranks are in."""
    text = """
def f(pp: Team[[0, 1]], tp: Team[[0], [1], [2]], x: f32[4]):
    main: send(x, peer=pp.rank)
"""
    message = refused(text)
    assert "rank 2 runs this, but no group of team 'pp' has it" in message
    validate(parse(text.replace("main:", "ranks(0, 1)\n    main:")))


def test_concrete_programs_need_a_view_only_at_the_root() -> None:
    text = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    main: scatter(x, y[0:2], root=0, team=tp)
"""
    concrete = parse(text).instantiate(1)
    without = dataclasses.replace(concrete.ops[0], src=None)  # pyright: ignore[reportCallIssue]
    validate(concrete.replace(ops=(without,)))
    root = parse(text).instantiate(0)
    with pytest.raises(ProgramError, match="scatter lacks src"):
        validate(root.replace(ops=(without,)))


@pytest.mark.parametrize("call", ["scatter(None, y{0}", "gather(x{0}, None"])
def test_an_uneven_part_of_a_rank_that_is_no_root(call: str) -> None:
    head = "def f(tp: Team[[0, 1]], x: f32[4], y: out[f32[4]]):\n    ranks(1)\n"
    text = f"{head}    rows = table(tp, 1, 3)\n    main: {call}, root=0, team=tp, splits=rows)\n"
    validate(parse(text.format("[0:3]")))
    with pytest.raises(ProgramError, match=r"of f32\[2\] on rank 1, whose part is 3 rows"):
        validate(parse(text.format("[0:2]")))


def test_shows_the_source_where_it_is_given() -> None:
    text = BASE.replace("# here", "# a comment").replace("copy(x, t)", "copy(x, tt)")
    program = parse(text, file="made_up.ilc")
    with pytest.raises(ProgramError) as raised:
        validate(program, text)
    message = str(raised.value)
    assert message.startswith("made_up.ilc:14: no buffer is named 'tt'")
    assert "> 14 |     main: copy(x, tt)  # a comment" in message
    assert "  12 |     n = empty(i64[4])" in message


def test_shows_the_line_of_the_file_of_an_op_that_names_its_module() -> None:
    text = "# one\n" + BASE.replace("copy(x, t)  # here", 'copy(x, tt, loc="layers.0")')
    with pytest.raises(ProgramError) as raised:
        validate(parse(text, file="made_up.ilc"), text)
    message = str(raised.value)
    assert message.startswith("made_up.ilc:15: no buffer is named 'tt' (from layers.0)")
    assert '> 15 |     main: copy(x, tt, loc="layers.0")' in message


def test_names_the_module() -> None:
    op = dataclasses.replace(parse(BASE).ops[4], loc=Loc("layers.0.mlp", "model.py", 12), site=9)
    with pytest.raises(ProgramError, match=r"from layers\.0\.mlp \(model\.py:12\): no site 9"):
        validate(parse(BASE).replace(ops=(op,)))


def test_a_long_program_takes_no_more_for_each_op() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = reductions(count)
        assert {type(op) for op in program.ops} == {Collective, Notify}
        return len(program.ops), lambda: validate(program)

    assert per_op(work, 300) < 600
