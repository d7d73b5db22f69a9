"""Each message of the parser, with its place (tests/verify/test_trial.py: texts with damage)."""

from __future__ import annotations

import re

import pytest
from tests.ir.refusals import assert_told, rows

from interlace.errors import ParseError
from interlace.ir import parse, parse_set

HEADER = "def f(tp: Team[4], dp: Team[2], x: f32[8, 4], y: out[f32[8, 4]]):\n"

TEXTS = {
    "empty": ("", "there is no program here", "def name("),
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


@pytest.mark.parametrize(("statement", "what", "fix"), rows("statement", 3))
def test_message_of_a_statement(statement: str, what: str, fix: str) -> None:
    text = f"{HEADER}    main: copy(x, y)\n    {statement}\n"
    with pytest.raises(ParseError) as raised:
        parse(text, file="made_up.ilc")
    message = str(raised.value)
    assert_told(message, what, fix)
    line, column = shown_place(message)
    lines = text.splitlines()
    assert f"> {line} | {lines[line - 1]}".rstrip() in message, "the line itself is shown"
    assert f"  {line - 1} | {lines[line - 2]}" in message, "and the one before it"
    carets = next(row for row in message.splitlines() if set(row) <= set(" |^") and "^" in row)
    assert carets.index("^") == len(f"> {line} | ") + column - 1


@pytest.mark.parametrize(("text", "what", "fix"), [*TEXTS.values(), *rows("text", 3)])
def test_message_of_a_text(text: str, what: str, fix: str) -> None:
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
