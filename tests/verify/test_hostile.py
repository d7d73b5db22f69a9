"""Schedules that are made to keep a reader busy get an answer, or a refusal that says a number.

`python -m tests.verify.hostile 1000000` measures all of them at a megabyte.
"""

from __future__ import annotations

import random
import sys

import pytest
from tests.verify.hostile import HOSTILE, ONE, filled, measure

from interlace.errors import ProgramError
from interlace.ir import parse_set, validate
from interlace.verify import Report, check, graph, regions

MOST_SECONDS, MOST_BYTES = 60, 2 << 30
"""Limits: seconds of a processor, so that a busy machine takes no more, and bytes of memory."""


def assert_answered(name: str, size: int, seconds: int) -> None:
    done = measure(HOSTILE[name](size), seconds)
    shown = f"{name}: {done._replace(said=done.said[:300])}"
    assert done.code in (0, 1, 2), shown
    assert done.seconds <= seconds, shown
    assert done.most_bytes <= MOST_BYTES, shown
    assert ("error: " in done.said) == (done.code == 2) or done.code == 1, shown


@pytest.mark.timeout(400)
def test_some_are_answered(seed: int) -> None:
    for name in random.Random(seed).sample(sorted(HOSTILE), 2):
        assert_answered(name, 10_000, MOST_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_is_answered(name: str) -> None:
    assert_answered(name, 1_000_000, MOST_SECONDS)


@pytest.mark.timeout(400)
def test_ops_on_boxes_of_sixty_thousand_runs() -> None:
    done = measure(HOSTILE["long_boxes"](4_000), MOST_SECONDS)
    assert done.code == 1, done
    assert "race: nothing orders" in done.said
    assert done.most_bytes < MOST_BYTES


def checked(text: str) -> Report:
    programs = parse_set(text)
    for program in programs:
        validate(program)
    return check(programs)


def test_what_is_too_large_is_refused_with_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    text = filled(4_000, ONE, lambda k: "main: copy(x, y)", lambda k: f"s{k}: copy(x, y)")
    assert not checked(text).sound
    monkeypatch.setattr(regions, "MAX_STEPS", 100)
    with pytest.raises(ProgramError, match="takes more than 100 steps: check it in parts"):
        checked(text)
    monkeypatch.setattr(graph, "MAX_WORDS", 1_000)
    with pytest.raises(ProgramError, match="takes more than 8,000 bytes: check the schedule on"):
        checked(text)


def test_a_product_of_too_many_terms_is_refused() -> None:
    names = [f"S{k}" for k in range(20)]
    sizes = ", ".join(f"{name}: Size[2]" for name in names)
    size = f"({' + '.join(names)})"
    text = "def f(tp: Team[1], {}, x: f32[{}]):\n    main: host_sync()\n"
    assert checked(text.format(sizes, size)).sound
    with pytest.raises(Exception, match="a product of more than 256 terms of named sizes"):
        checked(text.format(sizes, f"{size} * {size}"))


def test_ranks_with_places_in_too_many_teams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["interlace.ir.validate"], "MAX_PLACES", 64 * 6)
    teams = ", ".join(f"t{k}: Team[2]" for k in range(6))
    text = "def f({}, x: f32[4], y: out[f32[4]]):\n    main: copy(x, y)\n"
    assert checked(text.format(teams)).sound
    with pytest.raises(ProgramError, match="384 places are looked up at most"):
        checked(text.format(f"{teams}, more: Team[1]"))


def test_comparing_named_sizes_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def f(tp: Team[1], {}x: f32[{} + 99], y: f32[{} + 99]):\n"
    body = "".join(
        f"    main: copy(x[{{2}}+{k}:{{2}}+{k + 1}], y[{{2}}+{k}:{{2}}+{k + 1}])\n"
        for k in range(50)
    )
    monkeypatch.setattr(regions, "MAX_STEPS", 20_000)
    assert checked((text + body.replace("{2}", "64")).format("", "64", "64")).sound
    with pytest.raises(ProgramError, match="takes more than 20,000 steps"):
        checked((text + body.replace("{2}", "S")).format("S: Size[64], ", "S", "S"))
