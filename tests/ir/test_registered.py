"""Registered parameters in text, in the builder, and what `validate` says of them."""

from __future__ import annotations

import pytest

import interlace
from interlace.errors import ProgramError
from interlace.ir import Buffer, DType, parse, validate

HEAD = "def f(tp: Team[2], dp: Team[2], x: {}):\n    rows = table(tp, 1, 3)\n    {}"
GET = "main: get(x[0], x[1], peer=tp.rank + 1)"


def test_text_and_builder_agree() -> None:
    with interlace.program("f", team=2) as p:
        x = p.input("x", "f32", (4, 2), strides=(1, 4), registered=p.tp)
        y = p.output("y", "f32", (4, 2), registered="tp")
        p.copy(x, y)
    text = str(p.program).splitlines()[0]
    assert text == (
        "def f(tp: Team[2], x: f32[4, 2].strides(1, 4).registered(tp), "
        "y: out[f32[4, 2].registered(tp)]):"
    )
    assert parse(str(p.program)).params == p.program.params
    assert [buffer.registered for buffer in p.program.params] == [True, True]
    assert not Buffer("s", DType.f32, (4,), "symmetric", "tp").registered
    assert not Buffer("x", DType.f32, (4,), "input").registered


def test_peers_reach_what_is_registered() -> None:
    validate(parse(HEAD.format("f32[4, 4].registered(tp)", GET)))


@pytest.mark.parametrize(
    ("declared", "op", "what", "fix"),
    [
        ("f32[4, 4]", GET, "'x' is input: peers of 'tp' cannot reach it", ".registered(tp)"),
        (
            "f32[4, 4].registered(dp)",
            GET,
            "'x' is registered on 'dp': peers of 'tp' cannot reach it",
            ".registered(tp)",
        ),
        ("f32[4].registered(t)", "pass", "no team is named 't'", "did you mean 'tp'?"),
        (
            "f32[rows[tp.rank]].registered(tp)",
            "pass",
            "'x' is registered, but has [1, 3] elements on different ranks",
            "the largest size on every rank",
        ),
        (
            "f32[4, 4].strides(1, 0).registered(tp)",
            "pass",
            "'x' is registered, but its elements overlap",
            "the tensor that was expanded",
        ),
        ("f32[4]", "t = alloc(f32[4].registered(tp))", "'t' is local and has a team", "no other"),
    ],
)
def test_what_cannot_be_registered(declared: str, op: str, what: str, fix: str) -> None:
    with pytest.raises(ProgramError) as caught:
        validate(parse(HEAD.format(declared, op)))
    assert what in str(caught.value)
    assert fix in str(caught.value)
