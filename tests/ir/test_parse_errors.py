"""Each message of the parser, with its place; and that broken texts raise nothing else."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from tests.fuzzing.draw import well_formed

from interlace.errors import ParseError, ProgramError
from interlace.ir import parse, parse_set, validate

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.ilc"))

HEADER = "def f(tp: Team[4], dp: Team[2], x: f32[8, 4], y: out[f32[8, 4]]):\n"
REGION = "    @region\n    def scale(x):\n"

STATEMENTS = {
    "unknown op": ("main: coppy(x, y)", "no op is named 'coppy'", "did you mean 'copy'?"),
    "alloc on a stream": (
        "main: alloc(f32[8])",
        "no op is named 'alloc'",
        "write NAME = alloc(...)",
    ),
    "no op": ("main: x", "expected an op", "write a call such as copy(x, y)"),
    "unknown keyword": (
        "main: copy(x, y, sight=1)",
        "copy(...) has no argument 'sight'",
        "did you mean 'site'?",
    ),
    "twice": ("main: copy(x, y, dst=y)", "copy(...) has 'dst' twice", "remove one"),
    "lacks": ("main: copy(x)", "copy(...) lacks 'dst'", "write copy(src, dst)"),
    "too many": ("main: copy(x, y, x)", "takes 2 positional arguments", "write copy(src, dst)"),
    "star": ("main: copy(*x)", "'*' has no meaning", "write the arguments out"),
    "two stars": ("main: copy(**x)", "'**' has no meaning", "write the arguments out"),
    "no stream": ("copy(x, y)", "'copy' cannot stand alone", "such as main: copy(...)"),
    "no name": ("alloc(f32[8])", "'alloc' cannot stand alone", "NAME = alloc(...)"),
    "alone": ("sight(1, 'a')", "'sight' cannot stand alone", "did you mean 'site'?"),
    "declares nothing": ("z = aloc(f32[8])", "'aloc' declares nothing", "did you mean 'alloc'?"),
    "op with a name": ("z = copy(x, y)", "'copy' declares nothing", "such as main: copy(x, y)"),
    "no target": ("x.y = alloc(f32[8])", "expected a name before `=`", 'buffer["any name"]'),
    "odd stream": ("x.y: copy(x, y)", "expected a stream before the colon", 'stream["any name"]'),
    "statement": ("import os", "this statement has no meaning", "write an op as STREAM: op(...)"),
    "loop": ("while True: pass", "this statement has no meaning", "write an op as STREAM: op"),
    "after return": ("return x\n    main: copy(x, y)", "statements after `return`", "last"),
    "slice end": ("main: copy(x[2:], y)", "a slice without end", "write start:stop"),
    "slice step": ("main: copy(x[0:4:2], y)", "expected slices start:stop", "x[:, 0:4]"),
    "mixed": ("main: copy(x[0, 0:4], y)", "expected slices start:stop", "x[:, 0:4]"),
    "unclear [i]": ("main: copy(x[0], y)", "it is unclear which team", "write .chunk(0, parts)"),
    "team of [i]": ("main: copy(x[tpp.rank], y)", "no team is named 'tpp'", "did you mean 'tp'?"),
    "no index": ("main: copy(x[y], y)", "expected a rank or a chunk", "tp.rank + 1"),
    "no view": ("main: copy(1, y)", "expected a view of a buffer", "write one such as x"),
    "type as view": ("main: copy(f32, y)", "expected a view, not f32", 'write buffer["f32"]'),
    "step": ("main: copy(x.permut(1, 0), y)", "no step 'permut'", "did you mean 'permute'?"),
    "dtype": ("main: copy(x.cast(fp32), y)", "no element type is named 'fp32'", "'f32'"),
    "no dtype": ("main: copy(x.cast(1), y)", "expected an element type", "bf16 or f32"),
    "integer": ("main: copy(x.select(0, 1.5), y)", "expected an integer", "whole number"),
    "true": ("main: copy(x.select(0, True), y)", "expected an integer", "whole number"),
    "integers": ("main: copy(x.as_strided(1, 2), y)", "expected integers", "such as (8, 4)"),
    "type": ("z = alloc(8)", "expected a buffer type", "such as bf16[8, 4]"),
    "modifier": ("z = alloc(f32[8].stride(1))", "no modifier 'stride'", "did you mean 'strides'"),
    "table": ("z = alloc(f32[(1)[0]])", "expected a table", "the name of a table"),
    "string": ("main: call(mm, x)", "expected a string", "write it in quotes"),
    "call arg": ("main: call('aten.mm.out', f(x))", "a call cannot be an argument", "statement"),
    "complex": ("main: call('a.b', complex('a', 1))", "expected two numbers", "complex(1.0, 2.0)"),
    "literal": ("main: call('a.b', b'1')", "expected a literal", "write a number"),
    "minus": ("main: call('a.b', -'1')", "expected a literal", "write a number"),
    "flag": ("main: call('a.b', x, rng=1)", "rng is a flag", "write rng=True"),
    "pair": ("main: call('a.b', x, kwargs=(1,))", "expected a pair", "kwargs=("),
    "which team": ("main: all_gather(x, y)", "unclear which team", "add team=NAME"),
    "peer's team": ("main: send(x, peer=1)", "unclear which team", "add team=NAME"),
    "name": ("main: wait(1)", "expected a name", "any name in quotes"),
    "group": ("main: group(copy(x, y))", "sends and receives only", "a statement of its own"),
    "real": ("site(1, 'a', predicted_ms='1')", "expected a number", "such as 2.41"),
    "loc": ("main: copy(x, y, loc=(1, 2))", "expected a string", "write it in quotes"),
    "no region": ("def g(x):\n        return x", "a def inside a program is a region", "@region"),
    "decorator": ("@regin\n    def g(x):\n        return x", "this decorator", "write @region"),
    "no return": (REGION[4:] + "        pass", "a region holds calls and one return", "t0 ="),
    "returns nothing": (REGION[4:] + "        a.b(x)", "returns nothing", "add return t0"),
    "after its return": (
        REGION[4:] + "        return x\n        a.b(x)",
        "statements after `return`",
        "put it last",
    ),
    "region value": (REGION[4:] + "        return x + 1", "expected a value of", "write its name"),
    "operator": (
        REGION[4:] + "        t = f(x)(x)\n",
        "expected the name of an",
        "aten.mul.Tensor",
    ),
    "default": (
        "@region\n    def g(x=1):\n        return x",
        "plain parameters only",
        "no default, star or slash",
    ),
}

TEXTS = {
    "empty": ("", "there is no program here", "def name("),
    "no def": ("x = 1", "expected a program", "write one as def name"),
    "no type": ("def f(x):\n    pass", "parameter 'x' has no type", "write name: f32[8, 4]"),
    "star": ("def f(*x):\n    pass", "plain parameters only", "no default, star or slash"),
    "returns": ("def f() -> x:\n    pass", "plain parameters only", "no default"),
    "no size": ("def f(tp: Team):\n    pass", "a team without a size", "Team[4]"),
    "groups": ("def f(tp: Team[[0], [1, 2]]):\n    pass", "groups of different sizes", "as many"),
    "team words": (
        "def f(tp: Team[4].x(1)):\n    pass",
        "a team has no modifier 'x'",
        "modifiers are",
    ),
    "team modifier": ("def f(tp: Team[1].onn([0])): pass", "a team has no", "did you mean 'on'?"),
    "hosts": ("def f(tp: Team[2].on(0)): pass", "expected integers", "as .on([0, 1], [2, 3])"),
    "decorator": ("@f\ndef f():\n    pass", "this decorator has no meaning", "@named("),
    "syntax": ("def f(:\n", "not the syntax of a schedule", "check brackets"),
    "indent": ("def f():\nx", "not the syntax of a schedule", "indentation"),
    "nul": ("def f():\n    \0", "", ""),
    "deep": ("def f():\n    main: copy(" + "(" * 5000, "", ""),
    "chain": ("def f():\n    main: copy(x" + "[0:1]" * 50000 + ", y)", "", ""),
    "sum": ("def f():\n    main: copy(x[" + "1+" * 50000 + "1], y)", "", ""),
    "long number": ("def f():\n    main: copy(x[" + "1" * 5000 + "], y)", "", ""),
    "surrogate": ("def f():\n    main: copy(\ud800)", "", ""),
}


def shown_place(message: str) -> tuple[int, int]:
    found = re.match(r"made_up\.ilc:(\d+):(\d+): ", message)
    assert found, message
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("name", STATEMENTS)
def test_message_of_a_statement(name: str) -> None:
    statement, what, fix = STATEMENTS[name]
    text = f"{HEADER}    main: copy(x, y)\n    {statement}\n"
    with pytest.raises(ParseError) as raised:
        parse(text, file="made_up.ilc")
    message = str(raised.value)
    assert what in message.splitlines()[0]
    assert message.splitlines()[-1].startswith("fix: ")
    assert fix in message.splitlines()[-1]
    line, column = shown_place(message)
    lines = text.splitlines()
    assert f"> {line} | {lines[line - 1]}".rstrip() in message, "the line itself is shown"
    assert f"  {line - 1} | {lines[line - 2]}" in message, "and the one before it"
    carets = next(row for row in message.splitlines() if set(row) <= set(" |^") and "^" in row)
    assert carets.index("^") == len(f"> {line} | ") + column - 1


@pytest.mark.parametrize("name", TEXTS)
def test_message_of_a_text(name: str) -> None:
    text, what, fix = TEXTS[name]
    with pytest.raises(ParseError) as raised:
        parse(text, file="made_up.ilc")
    message = str(raised.value)
    assert message.startswith("made_up.ilc:1") or "made_up.ilc:2" in message
    assert what in message
    assert fix in message


def test_columns_count_characters() -> None:
    text = "def f(x: f32[8], y: out[f32[8]]):\n    main: call('é\U0001f600', 'é', x.permut(0))"
    with pytest.raises(ParseError, match=r"<text>:2:27: a view has no step"):
        parse(text)


def test_two_neighbours_on_each_side() -> None:
    lines = [f"    main: record(e{i})" for i in range(9)]
    lines[5] = "    main: recrd(e5)"
    with pytest.raises(ParseError) as raised:
        parse("def f(x: f32[8]):\n" + "\n".join(lines))
    shown = str(raised.value).splitlines()
    assert [row[2:3] for row in shown[1:7]] == ["5", "6", "7", " ", "8", "9"]


def test_one_program_of_several() -> None:
    text = "def f():\n    pass\ndef g():\n    pass\n"
    with pytest.raises(ParseError, match=r"holds 2 programs \(f, g\): .*parse_set"):
        parse(text)
    assert [program.name for program in parse_set(text)] == ["f", "g"]


def broken(rng: random.Random, text: str) -> str:
    """The text with a few random mistakes."""
    for _ in range(rng.randint(1, 4)):
        words = re.split(r"(\W)", text)
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        match rng.randrange(6):
            case 0:
                words[i] = words[j]
            case 1:
                words[i] = ""
            case 2:
                words[i], words[j] = words[j], words[i]
            case 3:
                words[i] = rng.choice(('"', "(", "]", "=", ":", "\n", "1", "-", ".", "\t", "None"))
            case 4:
                words.insert(
                    i, rng.choice(("0", "tp", ".rank", "[0]", "x", ", ", "**", "\\", "f32"))
                )
            case _:
                words = words[: max(i, 2)]
        text = "".join(words)
    return text


def test_broken_texts_raise_typed_errors(seed: int) -> None:
    """Malformed files end in ParseError or ProgramError, never in anything else."""
    rng = random.Random(seed)
    texts = [path.read_text() for path in GOLDEN]
    texts += [str(well_formed(rng, 6)) + "\n" for _ in range(20)]
    refused = 0
    for _ in range(2500):
        text = broken(rng, rng.choice(texts))
        try:
            for program in parse_set(text):
                validate(program, rng.choice((None, text)))
        except (ParseError, ProgramError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"{error!r} for\n{text}") from error
    assert refused > 500
