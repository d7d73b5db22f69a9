"""Reports of a check, for people and for scripts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.verify.schedules import text_of, without
from tests.verify.test_faults import FAULTS

from interlace.cost import simulate
from interlace.errors import InterlaceError, OptionError, ParseError, SoundnessError
from interlace.ir import parse
from interlace.verify import KINDS, SCHEMA, check

RACE = """\
unsound: 1 fault (2 ranks, 6 ops, MS ms)

error: race: nothing orders line 2 on rank 0, which writes, and line 4 on rank 0, which writes the \
same bytes of y (the same on ranks 0, 1)
  rank 0, line 2 (main): writes y [bytes 0:12]
    > 2 | main: copy(x[0:3], y[0:3])
      3 | main: record(e)
      4 | comm: copy(x[2:4], y[2:4])
  rank 0, line 4 (comm): writes y [bytes 8:16]
      2 | main: copy(x[0:3], y[0:3])
      3 | main: record(e)
    > 4 | comm: copy(x[2:4], y[2:4])
  fix: before line 4 add `comm: wait(e)`"""


@pytest.mark.parametrize("given", ["ring.ilc", ["ring.ilc"]], ids=str)
def test_a_path_that_is_not_there_is_told(given: Any) -> None:
    for checked in (check, simulate):
        with pytest.raises(ParseError, match=r"cannot read ring\.ilc: No such file"):
            checked(given)


@pytest.mark.parametrize("given", [[None], 3], ids=str)
def test_what_is_neither_a_program_nor_a_path_is_refused(given: Any) -> None:
    for checked in (check, simulate):
        with pytest.raises(OptionError, match=r"takes Programs and paths of schedules"):
            checked(given)


def test_the_option_runs_went() -> None:
    program = parse("def f(tp: Team[2], x: f32[4]):\n    return x\n")
    gone: Any = 3
    with pytest.raises(OptionError, match=r"`runs` went, since .* fix: leave it out"):
        check(program, runs=gone)


def test_a_race_in_words() -> None:
    program = parse(
        "def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n"
        "    main: copy(x[0:3], y[0:3])\n    main: record(e)\n    comm: copy(x[2:4], y[2:4])\n"
    )
    report = check(program)
    ms = f"{report.seconds * 1e3:.0f}"
    assert str(report) == RACE.replace("MS", ms)


def test_the_edge_across_ranks_is_a_signal() -> None:
    text = without(text_of("all_gather_matmul_peer"), "notify(ready")
    lines = [line for line in text.splitlines() if "expect(ready" not in line]
    (finding, *_) = check(parse("\n".join(lines))).errors
    assert finding.kind == "race"
    assert re.fullmatch(
        r"after line \d+ add `\w+: notify\(s1, to=tp.*\)`, "
        r"before line \d+ add `\w+: expect\(s1, tp.*\)`",
        finding.fix,
    )
    assert finding.ops[0].rank != finding.ops[1].rank


def test_lines_are_those_of_the_file() -> None:
    text = "\n\n# a remark\n" + without(text_of("slots"), "main: wait(copied)").lstrip()
    report = check(parse(text, file="slots.ilc"))
    op = report.errors[0].ops[0]
    assert text.splitlines()[op.line - 1].strip() == op.text
    assert op.loc == f"slots.ilc:{op.line}"


def test_lines_of_a_file_whose_ops_name_modules() -> None:
    lines = without(text_of("slots"), "main: wait(copied)").strip().splitlines()
    at = {i for i, line in enumerate(lines) if re.match(r"    \w+: (copy|call)\(.*\)$", line)}
    own = ', loc=("layers.0", "model.py", 12))'
    lines = [line[:-1] + own if i in at else line for i, line in enumerate(lines)]
    text = "\n".join(["# one", "# two", *lines]) + "\n"
    (finding, *_) = check(parse(text, file="slots.ilc")).errors
    written = text.splitlines()
    for op in finding.ops:
        assert written[op.line - 1].strip() == op.text
        assert op.loc.startswith(f"slots.ilc:{op.line}")
        for line, shown in op.context:
            assert written[line - 1].strip() == shown
    assert any(op.loc.endswith(", layers.0 (model.py:12)") for op in finding.ops)
    at = [int(line) for line in re.findall(r"(?:after|before|move) line (\d+)", finding.fix)]
    assert at
    assert set(at) <= {op.line for op in finding.ops}, finding.fix


def test_json_has_a_stable_shape() -> None:
    report = check(parse(without(text_of("all_gather_matmul_peer"), "main: wait(e2)")))
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == SCHEMA == 1
    assert set(data) == {
        "schema", "sound", "num_ranks", "num_ops", "num_visited", "symmetry", "seconds",
        "num_left_out", "sizes", "findings",
    }  # fmt: skip
    assert data["sound"] is False
    assert (data["num_ranks"], data["num_ops"]) == (4, 84)
    (finding,) = data["findings"]
    assert set(finding) == {"kind", "level", "message", "fix", "fix_tried", "ranks", "ops"}
    assert finding["fix_tried"] is True
    assert finding["ranks"] == [0, 1, 2, 3]
    for op in finding["ops"]:
        assert set(op) == {
            "rank", "line", "stream", "text", "role", "buffer", "bytes", "loc", "context",
        }  # fmt: skip
    assert [op["bytes"] for op in finding["ops"]] == [[64, 96], [64, 96]]


def test_raise_if_unsound() -> None:
    check(parse(text_of("slots"))).raise_if_unsound()
    report = check(parse(without(text_of("slots"), "main: wait(copied)")))
    with pytest.raises(SoundnessError, match="race") as caught:
        report.raise_if_unsound()
    assert caught.value.findings == report.errors
    assert isinstance(caught.value, InterlaceError)


def test_a_signal_that_nobody_awaits_is_a_remark() -> None:
    text = text_of("slots") + "    main: notify(over, to=tp.others)\n"
    report = check(parse(text))
    assert report.sound
    assert [finding.kind for finding in report.findings] == ["unexpected-notify"]
    assert "remark" in str(report)


def test_more_faults_than_are_listed() -> None:
    ops = "".join(f"    main: copy(x[{i}], t[{i}])\n" for i in range(150))
    ops += "".join(f"    side: copy(x[{i}], t[{i}])\n" for i in range(150))
    rows = ops.replace("[", ".chunk(").replace("])", ", 150))").replace("],", ", 150),")
    head = "def f(tp: Team[1], x: f32[150], z: f32[150]):\n    t = alloc(f32[150])\n"
    report = check(parse(f"{head}{rows}    return ()\n"))
    assert len(report.findings) == 100
    assert report.num_left_out == 50
    assert "and 50 more" in str(report)

    bare = "    u = alloc(f32[150])\n    main: copy(u, z)\n"  # found last
    report = check(parse(f"{head}{rows}{bare}    return ()\n"))
    assert (len(report.findings), report.num_left_out) == (100, 51)
    assert report.kinds() == {"race", "uninitialized"}


def test_every_kind_that_is_found_is_described() -> None:
    found = {kind for damaged, _, _ in FAULTS.values() for kind in check(damaged).kinds()}
    assert len(found) >= 10
    assert found <= set(KINDS)


def test_a_rank_without_ops_raises_no_signal() -> None:
    """The fix has no op of that rank to stand behind."""
    waits = parse("def f(tp: Team[2]):\n    main: expect(ready, 1)\n").instantiate(0)
    nothing = parse("def f(tp: Team[2]):\n    pass\n").instantiate(1)
    report = check([waits, nothing])
    assert report.kinds() == {"deadlock"}
    assert "fix: add what line 2 waits for: rank 1 to raise signal ready to 1" in str(report)
