"""Bugs that others have had, each as a schedule with the bug and as the same schedule, fixed.

docs/explanation/public-bugs.md is written from the headers of these files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.fuzzing.oracle.machine import explore
from tests.verify.schedules import GOLDEN

from interlace.ir import parse_set, validate
from interlace.verify import check

BUGS = sorted((GOLDEN / "bugs").glob("*.bad.ilc"))


THREAD = r"# thread: https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+"


def name(path: Path) -> str:
    return path.name.removesuffix(".bad.ilc")


def good_text(path: Path) -> str:
    return path.with_name(f"{name(path)}.good.ilc").read_text()


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
    assert verdict.deadlock == ("deadlock" in report.kinds())
    if wanted == "leak":  # a slot that is not freed blocks the run after the next
        assert explore(programs, runs=3).deadlock
    assert verdict.race or "race" not in report.kinds()


@pytest.mark.parametrize("path", BUGS, ids=name)
def test_the_fixed_schedule_is_sound(path: Path) -> None:
    text = good_text(path)
    programs = parse_set(text, file=path.name)
    for program in programs:
        validate(program)
    report = check(programs)
    assert report.sound, str(report)


def test_there_are_25_each_with_its_own_thread() -> None:
    heads = [path.read_text().splitlines()[:2] for path in BUGS]
    threads = {thread for _, thread in heads}
    assert all(re.fullmatch(THREAD, thread) for thread in threads)
    assert len({title for title, _ in heads}) == len(threads) == len(BUGS) >= 25


def test_the_fixed_schedule_names_the_same_thread() -> None:
    for path in BUGS:
        bad, good = (text.splitlines()[:2] for text in (path.read_text(), good_text(path)))
        assert good == [f"{bad[0]}: fixed", bad[1]]
