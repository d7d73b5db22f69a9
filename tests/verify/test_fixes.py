"""Every fix of a race that a finding tells is one: applied to the letter, the race is gone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.verify.literal_fixes import faulty, fixed, single
from tests.verify.schedules import text_of, without

from interlace.ir import Program, parse, parse_set, print_set
from interlace.verify import Finding, Report, check, fixes


def apply_many(seed: int, events: int, signals: int) -> Counter[str]:
    """Applies fixes of single findings until there were so many events and signals among them."""
    rng, met = random.Random(seed), Counter[str]()
    while met["events"] < events or met["signals"] < signals:
        for programs in faulty(rng):
            found = single(programs)
            if found is None:
                continue
            text, finding = found
            met[finding.kind] += 1
            assert finding.fix
            if not finding.fixed:
                met[f"{finding.kind} in words"] += 1
                continue
            shown = f"seed {seed}\n{text}\n{finding}"
            read = fixed(text, finding.fix)
            assert list(finding.fixed) == read, shown
            after = check(read)
            shown = f"{shown}\n{after}"
            assert after.sound, shown
            if "deadlock" not in check(parse_set(text), in_order=True).kinds():
                assert "deadlock" not in check(read, in_order=True).kinds(), shown
            met["signals"] += "notify(" in finding.fix
            met["events"] += "wait(" in finding.fix
    return met


@pytest.mark.timeout(400)
def test_fixes_of_single_findings_hold_to_the_letter(seed: int) -> None:
    met = apply_many(seed, 60, 36)  # about 140 races, a tenth of them in words
    print(dict(met))
    assert met["race in words"] <= 0.2 * met["race"]


def test_a_fix_between_ranks_keeps_the_order_of_the_list() -> None:
    """Whoever reads what a peer then overwrites reads first, though the ranks differ."""
    text = (
        "def f(tp: Team[2], x: f32[4], y: f32[4], z: out[f32[4]]):\n"
        "    s = alloc(f32[4], symmetric=tp)\n    main: copy(x, s)\n    main: barrier(team=tp)\n"
        "    main: get(s, peer=tp.rank + 1, dst=z)\n    main: copy(y, s)\n    main: free(s)\n"
    )
    finding = found([parse(text)], "race")
    (program,) = finding.fixed
    assert check(program).sound
    ops = [type(op).__name__ for op in program.ops]
    assert ops.index("Get") < ops.index("Notify") < ops.index("Expect"), finding.fix
    assert check(program, in_order=True).sound


def told(report: Report) -> Counter[tuple[str, tuple[str, ...]]]:
    """The faults by what their ops say."""
    return Counter((one.kind, tuple(sorted(op.text for op in one.ops))) for one in report.errors)


@pytest.mark.timeout(400)
def test_one_fix_of_several_findings_leaves_fewer(seed: int) -> None:
    rng, met = random.Random(seed), Counter[str]()
    while met["fixes"] < 30:
        for programs in faulty(rng):
            text = print_set(programs)
            report = check(parse_set(text, file="drawn.ilc"))
            if len(report.errors) < 2 or {"deadlock", "mismatch"} & report.kinds():
                continue
            for finding in rng.sample(report.errors, 2):
                if finding.fixed:
                    met["fixes"] += 1
                    after = check(fixed(text, finding.fix))
                    shown = f"seed {seed}\n{text}\n{finding}\n{after}"
                    assert len(after.errors) < len(report.errors), shown
                    assert after.kinds() <= report.kinds(), shown


def found(text: str | list[Program], kind: str) -> Finding:
    """The first finding of a kind."""
    report = check(parse_set(text) if isinstance(text, str) else text)
    return next(finding for finding in report.errors if finding.kind == kind)


def test_a_fix_is_proved_once_and_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    real = fixes.Draft.programs
    monkeypatch.setattr(fixes.Draft, "programs", lambda self: tried.append(self) or real(self))
    report = check(parse(without(text_of("slots"), "main: wait(copied)")))
    assert report.kinds() == {"race"}
    assert not tried
    assert report.errors[0].fix
    assert len(tried) == 1
    assert str(report)
    assert len(tried) == len(report.errors)


def test_an_edit_that_is_no_fix_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes.Fixes, "race", lambda self, *args: fixes.Draft(self._programs))
    (finding, *_) = check(parse(without(text_of("slots"), "main: wait(copied)"))).errors
    assert finding.fix == finding.words
    assert not finding.fixed


def test_a_fix_of_a_large_set_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "MAX_OPS", 1)
    (finding, *_) = check(parse(without(text_of("slots"), "main: wait(copied)"))).errors
    assert not finding.fixed
    assert finding.fix == finding.words


def test_a_slot_that_is_returned_and_never_freed_is_told() -> None:
    text = (
        "def f(tp: Team[2], x: f32[4]):\n    a = alloc(f32[4], symmetric=tp)\n"
        "    main: copy(x, a)\n    return a\n"
    )
    report = check(parse(text))
    assert {"leak", "result"} <= report.kinds()
    assert "the next run overwrites" in str(report)
