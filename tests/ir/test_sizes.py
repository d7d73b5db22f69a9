"""Symbolic sizes: their arithmetic is that of integers, and what is decided holds for the class."""

from __future__ import annotations

import contextlib
import random

import pytest

from interlace.errors import ParseError, SizeError
from interlace.ir import parse
from interlace.ir.sizes import (
    UNBOUNDED,
    Int,
    Known,
    NamedSize,
    Size,
    SizeClass,
    at,
    counted,
    deciding,
    divided,
    divisors,
    fixed,
    gcd,
    greatest,
    least,
    named,
    never_above,
)

S, T = named("S"), named("T")


def test_arithmetic_is_exact_and_numbers_are_plain() -> None:
    assert 4 * (S + 1) - 4 * S == 4
    assert type(4 * (S + 1) - 4 * S) is int
    assert (S - S, S * 0, (S + T) * 2 - 2 * T - 2 * S) == (0, 0, 0)
    assert at(2 * S * T, {"S": 3, "T": 5}) == 30
    assert hash(S + T) == hash(T + S)
    assert str(3 * S * T - S + 7) == "3 * S * T - S + 7"


def class_of(values: dict[str, int]) -> SizeClass:
    return SizeClass(tuple(NamedSize(name, value) for name, value in values.items()))


def expression(rng: random.Random, depth: int = 3) -> tuple[str, object]:
    """A random expression of S and T as Python's text, with the questions that it asks."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([("S", None), ("T", None), (str(rng.choice([0, 1, 2, 3, 8, 64])), None)])
    one, other = expression(rng, depth - 1)[0], expression(rng, depth - 1)[0]
    number = rng.choice([1, 2, 3, 4, 8, 12])
    forms = [
        f"({one} + {other})",
        f"({one} - {other})",
        f"({one} * {rng.choice([other, str(number)])})",
        f"({one} // {number})",
        f"({one} % {number})",
        f"({one} if {one} {rng.choice(['<', '<=', '==', '!=', '>', '>='])} {other} else {other})",
        f"max({one}, {other})",
        f"min({one}, {other})",
        f"abs({one})",
        f"counted(abs({one}), {number}, 5)",
    ]
    return rng.choice(forms), None


def evaluated(text: str, s: Int, t: Int) -> Int:
    return eval(text, {"S": s, "T": t, "counted": counted})


@pytest.mark.parametrize("part", range(4))
def test_what_is_decided_for_some_values_holds_for_their_class(part: int, seed: int) -> None:
    rng = random.Random(seed + part)
    compared = outside = 0
    for _ in range(500):
        text, _ = expression(rng)
        values = {"S": rng.randrange(1, 200), "T": rng.randrange(1, 200)}
        try:
            with deciding(class_of(values)) as known:
                found = evaluated(text, S, T)
        except SizeError:
            continue
        assert at(found, values) == evaluated(text, values["S"], values["T"]), (text, values)
        sizes = known.size_class()
        assert sizes.holds(values), (text, values, str(sizes))
        for _ in range(30):
            near = {
                name: max(0, value + rng.choice([-12, -8, -4, -1, 1, 4, 8, 12, 24]))
                for name, value in values.items()
            }
            if not sizes.holds(near):
                outside += 1
                continue
            compared += 1
            expected = evaluated(text, near["S"], near["T"])
            assert at(found, near) == expected, (text, values, near, str(sizes), str(found))
    assert compared > 1000
    assert outside > 1000


def test_a_size_is_no_integer_by_itself() -> None:
    with pytest.raises(SizeError, match="has no one value"):
        range(S)  # type: ignore[arg-type]
    with pytest.raises(SizeError, match="compared where no values"):
        bool(S > 3)
    with deciding(class_of({"S": 8})) as known:
        assert fixed(S // 2) == 4
    assert str(known.size_class()) == "S == 8"


def test_equal_expressions_need_no_decision() -> None:
    with deciding(class_of({"S": 8, "T": 9})) as known:
        assert S * T == T * S
        assert S * 256 % 64 == 0
    assert not str(known.size_class())
    with deciding(class_of({"S": 8, "T": 9})) as known:
        assert S * T // T == S
    assert str(known.size_class()) == "T >= 1"


def test_a_division_is_exact_for_the_whole_class_or_noted() -> None:
    with deciding(class_of({"S": 4, "T": 6})) as known:
        assert 4 * S // S == 4
        quotient = T * T // (2 * T)
    sizes = known.size_class()
    assert not sizes.holds({"S": 0, "T": 6})
    for t in range(1, 40):
        if sizes.holds({"S": 4, "T": t}):
            assert at(quotient, {"T": t}) == t * t // (2 * t)
    with deciding(class_of({"S": 0})), pytest.raises(ZeroDivisionError):
        assert 4 * S // S


def test_a_size_that_only_steered_is_in_the_class() -> None:
    program = parse("""
def f(S: Size[4], T: Size[6], U: Size[7], x: f32[S], y: out[f32[S]]):
    assume(T % 2 == 0)
    main: copy(x, y)
""")
    numbered, before = program.numbered()
    assert before == {"s0": "S", "s1": "T"}
    assert str(numbered.sizes) == "s1 % 2 == 0"


def test_common_divisors() -> None:
    assert gcd(12 * S, 8) == 4
    assert list(map(str, divisors((4 * S, 6 * S)))) == ["1", "2", "S", "2 * S"]
    assert list(divisors((4, 6))) == [1, 2]
    assert list(divisors((0, 0))) == [1]


TEXT = """\
def main(tp: Team[2], S: Size[12], B: Size[3], x: f32[B, S, 8], y: out[f32[B, S // 2, 8]]):
    assume(S >= 2, S <= 64, S % 4 == 0, B * S - 5 > 0)
    full = alloc(f32[B * S, 8])
    main: copy(x.view(B * S, 8), full)
    main: copy(full[0:(S - 4) // 2, :], full[4:S // 2 + 2, :])
    main: call("aten.full.default", (B, 2 * S), 1.5, out=(t := f32[B, 2 * S]))
    return t
"""


def test_the_text_of_a_program_has_sizes_and_their_class() -> None:
    program = parse(TEXT)
    assert parse(str(program)) == program
    assert str(program.sizes) == "S >= 2, S <= 64, S % 4 == 0, B * S - 5 > 0"
    assert program.sizes.values == {"S": 12, "B": 3}
    concrete = program.at({"S": 8, "B": 2})
    assert "full = alloc(f32[16, 8])" in str(concrete)
    assert "full[0:2][4:6" not in str(concrete)
    assert 'call("aten.full.default", (2, 16), 1.5' in str(concrete)
    assert not concrete.sizes.sizes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("S % 4 == 0", "S % 4 == 1", "does not hold"),
        ("S >= 2", "S >= 13", "does not hold"),
        ("S >= 2", "S", "what is assumed"),
        ("S >= 2", "Q >= 2", "no size is named 'Q'"),
        ("Size[12]", "Size", "a size without a value"),
        ("f32[B * S, 8]", "f32[B * Q, 8]", "no size is named 'Q'"),
    ],
)
def test_errors_of_the_text(old: str, new: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(TEXT.replace(old, new))


def test_the_sizes_of_two_classes() -> None:
    one, other = Known(class_of({"S": 12})), Known(class_of({"S": 12}))
    assert one.is_positive(S - 3)
    assert one.rest(S, 4) == 0
    assert other.is_positive(40 - S)
    assert other.rest(S, 6) == 0
    both = one.size_class() & other.size_class()
    assert str(both) == "S >= 4, S <= 39, S % 12 == 0"
    assert isinstance(S * 2, Size)


def test_bounds_hold_for_every_size_of_a_class(seed: int) -> None:
    rng = random.Random(seed)
    ranges = {"S": (3, 9), "T": (0, 7)}
    sizes = [NamedSize(n, value=low, low=low, high=high) for n, (low, high) in ranges.items()]
    for _ in range(200):
        text = expression(rng)[0]
        with contextlib.suppress(SizeError), deciding(SizeClass(tuple(sizes))) as known:
            value = evaluated(text, S, T)
            low, high = least(value), greatest(value)
            held = known.size_class()
            for s in range(3, 10):
                for t in range(8):
                    if held.holds(values := {"S": s, "T": t}):
                        assert low <= at(value, values) <= high, (text, values)
    with deciding(SizeClass(tuple(sizes))) as known:
        assert (least(S * T - 9 * T), greatest(S * T - 9 * T)) == (-42, 0)
        assert (least(divided(S, 2)), greatest(divided(S, 2))) == (2, 4)
        assert never_above(S * T, 9 * T)
        assert not never_above(S, 8)
        assert not known.size_class().facts
    with deciding(class_of({"S": 4})):
        assert greatest(2 * S + 1) == UNBOUNDED
        assert least(2 * S + 1) == 1
