"""Bugs that others have had, each as a schedule with the bug and as the same schedule mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.schedules import GOLDEN

from interlace.ir import parse_set, validate
from interlace.verify import check
from interlace.verify.oracle.machine import explore

BUGS = sorted((GOLDEN / "bugs").glob("*.bad.ilc"))


def name(path: Path) -> str:
    return path.name.removesuffix(".bad.ilc")


@pytest.mark.parametrize("path", BUGS, ids=name)
def test_the_bug_is_found(path: Path) -> None:
    text = path.read_text()
    wanted = next(
        line.removeprefix("# finds: ") for line in text.splitlines() if line.startswith("# finds: ")
    )
    programs = parse_set(text, file=path.name)
    for program in programs:
        validate(program)
    report = check(programs)
    assert wanted in report.kinds(), str(report)
    verdict = explore(programs, runs=1)
    assert verdict.complete
    assert verdict.deadlock == ("deadlock" in report.kinds())
    assert verdict.race or "race" not in report.kinds()


@pytest.mark.parametrize("path", BUGS, ids=name)
def test_the_mended_schedule_is_sound(path: Path) -> None:
    text = path.with_name(f"{name(path)}.good.ilc").read_text()
    programs = parse_set(text, file=path.name)
    for program in programs:
        validate(program)
    report = check(programs)
    assert report.sound, str(report)


def test_there_are_a_dozen() -> None:
    assert len(BUGS) >= 12
