"""Limits of texts and Programs: what is too large is a typed error, with its line, at once."""

from __future__ import annotations

import time

import pytest

from interlace.errors import InterlaceError, ParseError, ProgramError, TeamError
from interlace.ir import parse, validate
from interlace.ir.text.spelling import excerpt, visible
from interlace.ir.types import MAX_RANKS

COPY = "def f({params}):\n    main: copy(x, y)\n"

TOO_LARGE = {
    "digits": (f"x: f32[{'1' * 4299}]", "an integer of more than 63 bits"),
    "more digits than Python reads": (f"x: f32[{'1' * 4301}]", "an integer of more than 64 bits"),
    "hexadecimal": (f"x: f32[0x{'f' * 6000}]", "an integer of more than 63 bits"),
    "64 bits": (f"x: f32[{1 << 63}]", "an integer of more than 63 bits"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_for_a_text(name: str) -> None:
    params, what = TOO_LARGE[name]
    began = time.perf_counter()
    with pytest.raises(ParseError) as raised:
        parse(COPY.format(params=params), file="large.ilc")
    assert str(raised.value).startswith("large.ilc:1:")
    assert what in str(raised.value).splitlines()[0]
    assert len(str(raised.value)) < 2000, "a long line is cut"
    assert time.perf_counter() - began < 5


def test_a_text_that_is_too_long() -> None:
    with pytest.raises(ParseError, match="more than 16777216 characters"):
        parse("#" * ((1 << 24) + 1))


TOO_WIDE = {
    "bytes": ("x: f32[4294967296, 4294967296]", "'x' has too many dimensions or bytes"),
    "bytes of nothing": (f"x: f32[0, {1 << 62}, {1 << 62}]", "'x' has too many dimensions"),
    "strides": (f"x: f32[2, 2].strides({1 << 62}, 1)", "'x' has too many dimensions or bytes"),
    "dimensions": (f"x: f32[{', '.join('1' * 65)}]", "'x' has too many dimensions or bytes"),
}


@pytest.mark.parametrize("name", TOO_WIDE)
def test_what_is_too_large_for_memory(name: str) -> None:
    params, what = TOO_WIDE[name]
    text = f"def f({params}):\n    main: record(e)\n"
    with pytest.raises(ProgramError) as raised:
        validate(parse(text), text)
    assert what in str(raised.value)


def test_a_view_that_is_too_large() -> None:
    view = f"x.expand({1 << 40}, {1 << 40})"
    text = f"def f(x: f32[1, 1]):\n    main: copy({view}, {view})\n"
    with pytest.raises(ProgramError) as raised:
        validate(parse(text), text)
    assert f"{view} has too many dimensions or elements" in str(raised.value)


@pytest.mark.parametrize(
    "teams", [f"tp: Team[{MAX_RANKS + 1}]", f"dp: Team[{MAX_RANKS}], tp: Team[{MAX_RANKS}]"]
)
def test_too_large_a_world(teams: str) -> None:
    program = parse(f"def f({teams}, x: f32[4]):\n    main: host_sync()\n")
    with pytest.raises(ProgramError, match="65536 are the most"):
        validate(program)
    with pytest.raises(TeamError, match="65536 are the most"):
        len(program.world)


def test_an_argument_that_is_too_large() -> None:
    text = f'def f(x: f32[4]):\n    main: call("aten.add.Tensor", x, {1 << 64})\n'
    with pytest.raises(ParseError, match="2:38: an integer of more than 64 bits"):
        parse(text)


def test_words_that_a_terminal_would_obey_are_marked_in_excerpts() -> None:
    text = "def f(x: f32[8]):\n    # \x1b[31m red \u202e back\n    main: coppy(x, x)\n"
    with pytest.raises(ParseError) as raised:
        parse(text)
    message = str(raised.value)
    assert visible(message) == message
    assert "# \ufffd[31m red \ufffd back" in message
    assert visible("\x1b[31m\ud800\n\u202e é") == "\\x1b[31m\\ud800\n\\u202e é"


def test_a_form_feed_ends_no_line() -> None:
    """As Python counts them; another count would show the reader another line."""
    text = "def f(x: f32[8]):\n    # \x0c \u2028 \x1c\n    main: copy(x, z)\n"
    with pytest.raises(ProgramError) as raised:
        validate(parse(text), text)
    assert "> 3 |     main: copy(x, z)" in str(raised.value)


def test_an_excerpt_of_a_long_line_shows_the_place() -> None:
    shown = excerpt(["a" * 5000 + "bad" + "c" * 5000], 1, 5001, 3).splitlines()
    place = shown[1].index("^")
    assert shown[0][place : place + 3] == "bad"
    assert shown[1].count("^") == 3
    assert all(len(line) < 450 for line in shown)


@pytest.mark.parametrize("fused", ["(0x" + "f" * 6000 + ")(x)", "part", "part.x(y)", "1"])
def test_parts_that_are_none(fused: str) -> None:
    with pytest.raises(InterlaceError, match=r"expected a part|more than 64 bits"):
        parse(f"def f(x: f32[8]):\n    main: fused({fused})\n")
