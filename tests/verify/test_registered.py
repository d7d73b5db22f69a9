"""Registered parameters: peers may touch them between the begin and the end of their rank's run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fuzzing.oracle.machine import explore
from tests.support.registered import TEXTS

from interlace.ir import Program, parse, validate
from interlace.verify import Report, check


def agreed(programs: Program | list[Program]) -> Report:
    """The report, after the check of one run, of three and the oracle said the same."""
    report = check(programs)
    assert check(programs, fold=False).kinds() == report.kinds(), report
    verdict = explore(programs, runs=2)
    assert verdict.race == ("race" in report.kinds()), f"{verdict}\n{report}"
    assert verdict.deadlock == ("deadlock" in report.kinds()), f"{verdict}\n{report}"
    if not verdict.race:
        assert verdict.uninitialized == ("uninitialized" in report.kinds()), f"{verdict}\n{report}"
    return report


def changed(text: str, *changes: tuple[str, str]) -> Program:
    """The Program with some lines, by what they begin with, replaced; by nothing, dropped."""
    lines = text.splitlines()
    for start, new in changes:
        found = [i for i, line in enumerate(lines) if line.strip().startswith(start)]
        assert found, f"no line begins with {start!r}"
        for i in reversed(found):
            lines[i : i + 1] = [f"    {new}"] if new else []
    program = parse("\n".join(lines))
    validate(program)
    return program


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_is_sound(text: Callable[[int], str], world: int) -> None:
    program = parse(text(world))
    validate(program)
    assert check(program).sound, str(check(program))
    assert check(program, in_order=True).sound
    if world == 2:
        assert agreed(program).sound


def test_a_get_before_the_peer_has_begun_races_with_its_caller() -> None:
    report = agreed(
        changed(TEXTS["gather_matmul"](2), ("comm: expect(begun", ""), ("main: notify(begun", ""))
    )
    assert report.kinds() == {"race"}
    (finding,) = report.errors
    assert "reads x of rank" in finding.message
    assert "nothing orders it after the begin of the run there" in finding.message
    assert "before which the caller may touch x" in finding.message
    assert finding.fix.startswith("before line 2 add `main: notify(")


def test_a_get_still_under_way_at_the_peers_end_races_with_its_callers_next_write() -> None:
    report = agreed(
        changed(TEXTS["gather_matmul"](2), ("comm: expect(done", ""), ("comm: notify(done", ""))
    )
    assert report.kinds() == {"race"}
    (finding,) = report.errors
    assert "nothing orders it before the end of the run there" in finding.message
    assert "at the end add `main: expect(" in finding.fix
    assert [op.text.split("(")[0] for op in finding.ops] == ["comm: get", "return"]


def test_a_put_that_nobody_awaits_races_with_what_the_run_returns() -> None:
    report = agreed(
        changed(TEXTS["gather_put"](2), ("main: expect(came", ""), ("comm: notify(came", ""))
    )
    assert report.kinds() == {"race"}
    assert "returns y" in str(report)


def test_a_put_before_the_peer_has_begun_races_with_its_caller() -> None:
    report = agreed(
        changed(TEXTS["gather_put"](2), ("comm: expect(open", ""), ("comm: notify(open", ""))
    )
    assert report.kinds() == {"race"}
    assert "before which the caller may touch y" in str(report)


def test_what_no_rank_writes_of_a_registered_output_is_no_result() -> None:
    report = agreed(changed(TEXTS["gather_put"](2), ("main: copy(x, y", "")))
    assert report.kinds() == {"uninitialized"}


def test_what_an_output_held_in_the_run_before_does_not_count() -> None:
    """Each run begins with an output of which nothing is written, whatever it lies in."""
    lines = (
        "def late(tp: Team[2], x: f32[2], y: out[f32[2].registered(tp)], z: out[f32[2]]):",
        "    main: copy(y, z)",
        "    main: copy(x, y)",
    )
    report = agreed(parse("\n".join(lines)))
    assert report.kinds() == {"uninitialized"}


def test_puts_of_two_ranks_into_the_same_bytes_race() -> None:
    report = check(changed(TEXTS["gather_put"](3), ("comm: put", "comm: put(x, y[0], peer=1)")))
    assert "race" in report.kinds()


def test_ranks_register_alike() -> None:
    text = TEXTS["gather_put"](2)
    first = parse(text).instantiate(0)
    other = {
        "no such parameter": "y: out[f32[8, 8]]",
        "it is an input f32[8, 8]": "y: f32[8, 8].registered(tp)",
        "it is an output f32[16, 8]": "y: out[f32[16, 8].registered(tp)]",
        "it is an output i32[8, 8]": "y: out[i32[8, 8].registered(tp)]",
        "it is an output f32[8, 8].strides(1, 8)": (
            "y: out[f32[8, 8].strides(1, 8).registered(tp)]"
        ),
        "it is an output f32[8, 2, 4]": "y: out[f32[8, 2, 4].registered(tp)]",
    }
    assert check([first, parse(text).instantiate(1)]).sound
    for said, declared in other.items():
        wrong = parse(text.replace("y: out[f32[8, 8].registered(tp)]", declared)).instantiate(1)
        report = check([first, wrong])
        (found,) = (f for f in report.errors if f.kind == "mismatch")
        assert "the same element type, sizes and strides" in found.fix
        assert "mismatch" in report.kinds(), report
        assert said in str(report)
    assert check([first]).kinds() >= {"deadlock"}, "the other rank is none of the set"


def test_a_rank_of_the_team_without_a_program_is_a_mismatch() -> None:
    """Nobody knows what is done there to the memory that is put to."""
    text = """
def f(tp: Team[2], x: f32[4], y: f32[4].registered(tp)):
    main: put(x, y, peer=tp.rank + 1)
    main: notify(come, to=tp.rank + 1)
"""
    (finding,) = check([parse(text).instantiate(0)]).errors
    assert finding.kind == "mismatch"
    told = "on rank 1 it is nothing, for no Program of the set runs there"
    assert finding.message == f"rank 0 registers y with team tp: an input f32[4]; {told}"
