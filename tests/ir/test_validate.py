"""Each structural rule: a Program that breaks it, the message with its line, and how to mend it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from benchmarks.passes import reductions
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

OPS = {
    "unknown buffer": ("copy(x, z)", "no buffer is named 'z'", "buffers are: full"),
    "near buffer": ("copy(x, ful)", "no buffer is named 'ful'", "did you mean 'full'?"),
    "too early": ("copy(x, later)", "'later' is used before it is declared", "move its alloc"),
    "out of bounds": ("copy(x[0:5], t)", "x[0:5] does not exist on rank 0", "a view within 'x'"),
    "part": ("copy(part[0:3], x[0:3])", "part[0:3] does not exist on rank 1", "within 'part'"),
    "chunk": ("copy(x.chunk(2, 2), t)", "does not exist on rank 0", "a view within 'x'"),
    "parts": ("copy(x.chunk(0, 3), t)", "does not exist on rank 0", "a view within 'x'"),
    "no parts": ("copy(x.chunk(0, 0), t)", "does not exist on rank 0", "a view within 'x'"),
    "table parts": ("copy(x.chunk(-1, rows), t)", "does not exist", "a view within 'x'"),
    "view table": ("copy(x.chunk(0, row), t)", "no table is named 'row'", "did you mean 'rows'?"),
    "view team": ("copy(x.chunk(t.rank, 2), t)", "no team is named 't'", "did you mean 'tp'?"),
    "dimension": ("copy(x.select(2, 0), t)", "does not exist on rank 0", "a view within 'x'"),
    "strided": ("copy(x.as_strided((4, 4), (4, 1), 1), t)", "reaches byte 68 of 'x'", "below the"),
    "negative view": ("copy(x.view(-2, -8), t)", "does not exist on rank 0", "a view within 'x'"),
    "negative expand": ("copy(x.view(1, 16).expand(-3, 16), t)", "does not exist", "within 'x'"),
    "copy sizes": ("copy(x[0:2], t)", "copy from x[0:2] (f32[2, 4]) to t (f32[4, 4])", "equal"),
    "put sizes": ("put(x[0:2], full, peer=tp.rank)", "put from x[0:2] (f32[2, 4])", "equal sizes"),
    "put dtypes": ("put(n, full.view(16)[0:4], peer=tp.rank)", "(i64[4]) to", "element types"),
    "get dtypes": ("get(full.view(16)[0:4], n, peer=tp.rank)", "get from", "element types"),
    "put local": ("put(x, t, peer=tp.rank)", "'t' is local: peers of 'tp' cannot", "symmetric=tp"),
    "get input": ("get(x, t, peer=tp.rank)", "'x' is input: peers of 'tp'", "registered(tp)"),
    "other team": ("get(full, t, peer=dp.rank)", "'full' is symmetric on 'tp'", "symmetric=dp"),
    "peer": ("send(x, peer=2, team=tp)", "peer 2 of team 'tp' does not exist", "0 to 1"),
    "peer's team": ("send(x, peer=tpp.rank)", "no team is named 'tpp'", "did you mean 'tp'?"),
    "other peers": ("notify(s, to=dp.others, team=tp)", "dp.others are not of", "tp.others"),
    "wait": ("wait(e2)", "nothing before this records event 'e2'", "e1"),
    "site": ("copy(x, t, site=2)", "no site 2", "site(2, "),
    "free": ("free(x)", "'x' belongs to the caller", "free only what the program allocates"),
    "overlap": ("copy(x, t[0:1].expand(4, 4))", "elements overlap", "write the view that was"),
    "signal": ("notify(s, to=tp.rank, value=0)", "value 0 of signal 's'", "count from 1"),
    "expect": ("expect(s, tp.rank, value=0)", "value 0 of signal 's'", "count from 1"),
    "large": (
        "notify(s, to=tp.rank, value=16777216)",
        "value 16777216 of signal 's'",
        "to 16777215 at most",
    ),
    "awaited": ("expect(s, tp.rank, value=2147483648)", "value 2147483648", "16777215 at most"),
    "reduction": ("all_reduce(x, t, team=tp)", "all_reduce lacks its reduction", "one of sum"),
    "no reduction": ('all_reduce(x, t, reduce="xor", team=tp)', "no reduction 'xor'", "one of sum"),
    "reduces": ('all_gather(x, t, reduce="sum", team=tp)', "reduces nothing", "leave reduce="),
    "root": ("broadcast(x, t, team=tp)", "broadcast lacks its root", "root=0"),
    "no root": ("all_gather(x, t, root=0, team=tp)", "all_gather has no root", "leave root="),
    "root range": ("broadcast(x, t, root=2, team=tp)", "root 2 of team 'tp'", "0 to 1"),
    "own root": ("broadcast(x, t, root=tp.rank, team=tp)", "do not agree on the root", "number"),
    "lacks src": ("all_gather(None, t, team=tp)", "all_gather lacks src", "(src, dst, ...)"),
    "lacks dst": ("all_gather(x, team=tp)", "all_gather lacks dst", "(src, dst, ...)"),
    "barrier": ("barrier(x, team=tp)", "barrier takes no views", "barrier(team=tp)"),
    "contiguous": (
        'all_reduce(x.permute(1, 0), t, reduce="sum", team=tp)',
        "is not contiguous",
        "copy it to a contiguous buffer",
    ),
    "no table": ("all_gather(part, t, splits=row, team=tp)", "no table is named 'row'", "'rows'?"),
    "gather": (
        "all_gather(x, t, team=tp)",
        "the whole has 4 rows, and this rank's part 4",
        "splits",
    ),
    "splits": ("all_gather(x[0:2], t, splits=rows, team=tp)", "part 2: 3 of 4", "splits=rows"),
    "scatter": ('reduce_scatter(x, t, reduce="sum", team=tp)', "this rank's part 4: 4 of 8", ""),
    "equal": ('all_reduce(x, t[0:2], reduce="sum", team=tp)', "the sizes differ", "correct"),
    "dtype": ('all_reduce(x, n, reduce="sum", team=tp)', "the element types differ", "correct"),
    "to all": ("all_to_all(x[0:3], t[0:3], team=tp)", "does not divide into 2 parts", "correct"),
    "to all splits": ("all_to_all(x, t[0:3], splits=rows, team=tp)", "one has 4 rows", "correct"),
    "no splits": (
        'all_reduce(x, t, reduce="sum", splits=rows, team=tp)',
        "takes no splits",
        "correct",
    ),
    "after 0": ("all_gather(x[0:2], t.view(8, 2)[0:4], team=tp)", "after dimension 0 differ", ""),
    "empty group": ("group()", "an empty group", "put sends and receives in it"),
    "no fused parts": ("fused()", "an empty part", "or leave it out"),
    "empty part": ("fused(part())", "an empty part", "or leave it out"),
    "part fresh": (
        'fused(part(call("a.b", x, out=(z := f32[4]))))',
        "a fused a.b makes its outputs itself",
        "allocate them before",
    ),
    "part wait": ("fused(part(wait(e2)), part(record(e2)))", "records event 'e2'", "e1"),
    "region": ('call("scal", x, t, out=y)', "'scal' is no region", "did you mean 'scale'?"),
    "arity": ('call("scale", x, out=y)', "takes 2 and gives 1; here it has 1 arguments", "scale("),
    "region outs": ('call("scale", x, t)', "and 0 outputs", "call it as scale(a, b)"),
    "keywords": ('call("scale", x, t, c=1, out=y)', "arguments and keywords", "scale(a, b)"),
    "both": ('call("a.b", x, out=(t, z := f32[4]))', "fills views or makes its outputs", "before"),
    "in place": ('call("a.b_", x, out=t, mutates=True)', "'t' is written in place", "mutates=True"),
    "fresh twice": ('call("a.b", out=(t := f32[4]))', "'t' is declared already", "of its own"),
    "mm": (
        'call("aten.mm.out", x, t[0:3], out=y)',
        "sizes that do not fit: (4, 4) times",
        "(m, n)",
    ),
    "mm out": ('call("aten.mm.default", x, t, out=(z := f32[4, 5]))', "into (4, 5)", "(m, n)"),
    "mm dtype": ('call("aten.mm.default", x, t, out=(z := bf16[4, 4]))', "f32 and f32 into", ""),
    "mm dims": ('call("aten.mm.out", x.view(16), t, out=y)', "takes views of 2 dimensions", ""),
    "addmm": ('call("aten.addmm.out", n, x, t[0:3], out=y)', "sizes that do not fit", "(m, n)"),
    "bmm": (
        'call("aten.bmm.out", x.view(2, 2, 4), t.view(1, 4, 4), out=y.view(2, 2, 4))',
        "bmm",
        "",
    ),
}

DECLARATIONS = {
    "twice": ("t = alloc(f32[4])", "'t' is declared already", "a second alloc a second name"),
    "as a team": ("tp = alloc(f32[4])", "'tp' is declared already", "a name of its own"),
    "as a table": ("rows = alloc(f32[4])", "'rows' is declared already", "a name of its own"),
    "rng": ("rng = alloc(f32[4])", "the state of the random numbers", "another name"),
    "size": ("z = alloc(f32[-4])", "'z' has a size below 0", "give sizes >= 0"),
    "table": ("z = alloc(f32[row[0]])", "no table is named 'row'", "did you mean 'rows'?"),
    "entry": ("z = alloc(f32[rows[2]])", "table rows has 2 entries", "a rank of its team"),
    "entry team": ("z = alloc(f32[rows[t.rank]])", "no team is named 't'", "did you mean 'tp'?"),
    "strides": ("z = alloc(f32[4, 4].strides(1))", "2 sizes and strides [1]", "one stride >= 0"),
    "symmetric team": ("z = alloc(f32[4], symmetric=t)", "no team is named 't'", "'tp'?"),
    "uneven": (
        "z = alloc(f32[rows[tp.rank]], symmetric=tp)",
        "'z' is symmetric, but has [1, 3] elements",
        "the largest size on every rank",
    ),
    "offset": ('z = alloc(f32[4], storage="a", offset=-4)', "at offset -4", "bytes >= 0"),
    "fresh offset": ("z = empty(f32[4], offset=4)", "is fresh at offset 4", "of local buffers"),
    "aligned": ('z = alloc(f32[4], storage="a", offset=2)', "at byte 2, amid", "a multiple of 4"),
    "storage": ('z = empty(f32[4], storage="a")', "is fresh and names a storage", "share storage"),
}

CHANGES = {
    "team twice": ("dp: Team[2]", "tp: Team[2]", "team 'tp' is declared twice", "another name"),
    "team size": ("tp: Team[2]", "tp: Team[0]", "team 'tp' has 0 ranks", "1 or more"),
    "rank twice": ("dp: Team[2]", "dp: Team[[0, 1], [1, 2]]", "name a rank twice", "one group"),
    "not in": ("dp: Team[2]", "dp: Team[[5, 6]]", "full", "symmetric=dp"),
    "table team": ("table(tp, 3, 1)", "table(t, 3, 1)", "no team is named 't'", "'tp'?"),
    "table values": ("table(tp, 3, 1)", "table(tp, 3)", "holds [3] for 2 ranks", "one number"),
    "table below": ("table(tp, 3, 1)", "table(tp, 3, -1)", "holds [3, -1]", "one number >= 0"),
    "tables": (
        "rows = table(tp, 3, 1)",
        "rows = table(tp, 3, 1)\n    rows = table(tp, 3, 1)",
        "table 'rows' is declared twice",
        "another name",
    ),
    "ranks": ("site(1,", "ranks(0, 0)\n    site(1,", "ranks(0, 0) are no set of ranks", "once"),
    "no ranks": ("site(1,", "ranks()\n    site(1,", "are no set of ranks", "once"),
    "world": ("site(1,", "ranks(0, 1)\n    site(1,", "span 4 ranks, but the Program runs on 2", ""),
    "rank": ("site(1,", "rank(7)\n    site(1,", "rank 7 is not among", "fix ranks"),
    "site twice": (
        "site(1,",
        'site(1, "a")\n    site(1,',
        "site 1 is declared twice",
        "differently",
    ),
    "remark": ("site=1)", "site=3)", "no site 3", "sites are [1]"),
    "param twice": ("x: f32[4, 4]", "y: f32[4, 4]", "'y' is declared already", "of its own"),
    "region input": ("scale(a, b)", "scale(a, a)", "has an input twice", "differently"),
    "region value": (
        "Tensor(a, b)",
        "Tensor(a, bb)",
        "has no value 'bb' here",
        "did you mean 'b'?",
    ),
    "nested value": (
        "Tensor(a, b)",
        "Tensor(a, (c,))",
        "has no value 'c' here",
        "values are: a, b",
    ),
    "region result": ("return t0", "return t1", "has no value 't1' here", "values are: a, b, t0"),
    "region again": ("t0 = aten", "a = aten", "region 'scale' gives 'a' twice", "differently"),
    "region view": ("Tensor(a, b)", 'Tensor(buffer["x"], b)', "uses a buffer", "make it an input"),
    "regions": (
        "    @region\n",
        "    @region\n    def scale(a):\n        return a\n    @region\n",
        "region 'scale' is declared twice",
        "another name",
    ),
    "local result": (
        "return y",
        "return y, (t,)",
        "'t' is local: its memory is used again",
        "empty",
    ),
    "symmetric result": ("return y", "return full[0:1]", "'full' is symmetric", "copy it to"),
    "result": ("return y", "return z", "no buffer is named 'z'", "buffers are"),
    "result view": ("return y", "return y[0:9]", "y[0:9] does not exist", "a view within 'y'"),
    "result value": ("return y", 'return value["y"]', "no value of a region", "return views"),
}


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
    validate(parse(BASE))
    for rank in range(4):
        validate(parse(BASE).instantiate(rank))


@pytest.mark.parametrize("name", OPS)
def test_op(name: str) -> None:
    op, what, fix = OPS[name]
    later = "\n    later = alloc(f32[4, 4])" if "later" in op else ""
    message = refused(BASE.replace("copy(x, t)  # here", op + later))
    assert what in message.splitlines()[0]
    assert message.splitlines()[-1].startswith("fix: ")
    assert fix in message.splitlines()[-1]
    assert re.search(r"^> *\d+ \|     main: ", message, re.MULTILINE)
    assert "from made_up.ilc:14:" in message.splitlines()[0]


@pytest.mark.parametrize("name", DECLARATIONS)
def test_declaration(name: str) -> None:
    declaration, what, fix = DECLARATIONS[name]
    message = refused(BASE.replace("main: copy(x, t)  # here", declaration))
    assert what in message.splitlines()[0]
    assert message.splitlines()[-1].startswith("fix: ")
    assert fix in message.splitlines()[-1]
    assert re.search(r"^> *\d+ \|     \w+ = ", message, re.MULTILINE)


@pytest.mark.parametrize("name", CHANGES)
def test_what_stands_around_the_ops(name: str) -> None:
    old, new, what, fix = CHANGES[name]
    assert old in BASE
    text = BASE.replace(old, new, 1)
    if name == "not in":
        text = text.replace("symmetric=tp", "symmetric=dp").replace("tp: Team[2]", "tp: Team[2]")
        what, fix = "no group of team 'dp' has it", "add the rank to a group"
    message = refused(text)
    assert what in message.splitlines()[0]
    assert message.splitlines()[-1].startswith("fix: ")
    assert fix in message.splitlines()[-1]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("tp.rank + 1, value=2", "tp.rank + 1, value=2", "to rank 1 of 'tp' goes from 2 to 2"),
        ("tp.rank + 1, value=2", "tp.others, value=1", "goes from 2 to 1"),
        ("tp.others, value=2", "1, team=tp, value=1", "goes from 2 to 1"),
        ("tp.rank + 1, value=2", "tp.rank, value=1", None),
        ("tp.rank + 1, value=2", "dp.rank + 1, value=1", None),
        ("tp.rank + 1, value=2", "tp.rank - 1, value=3", None),
    ],
)
def test_signals_only_grow(first: str, second: str, told: str | None) -> None:
    ops = f"notify(s, to={first})\n    comm: notify(s, to={second})"
    text = BASE.replace("copy(x, t)  # here", ops)
    if told is None:
        validate(parse(text))
    else:
        assert told in refused(text)


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


def test_gives_the_program_back() -> None:
    program = parse(BASE)
    assert validate(program) is program


def test_a_long_program_takes_no_more_for_each_op() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = reductions(count)
        assert {type(op) for op in program.ops} == {Collective, Notify}
        return len(program.ops), lambda: validate(program)

    assert per_op(work, 300) < 600


def test_an_empty_program_is_well_formed() -> None:
    validate(Program())
