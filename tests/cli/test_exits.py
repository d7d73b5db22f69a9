"""How commands end: exit codes, errors as JSON, faults of our own; what reaches a terminal."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.schedules import RACE, SOUND, STUCK, invoke

ODD = """\
@named("a\\x1b[31m{odd}")
def f(x: f32[4].named("x\\x1b[2J{odd}"), y: out[f32[4]]):
    site(1, "all_gather", "m\\x1b[5m{odd}", reason="r\\x9b{odd}")
    remark("p\\r{odd}", "t\\x07{odd}", site=1)
    stream["s\\x1b[7m{odd}"]: copy(buffer["x\\x1b[2J{odd}"], y, site=1)
"""


def run(name: str, *args: str, text: str) -> tuple[int, str, str]:
    return invoke(name, "-", *args, text=text)


@pytest.mark.parametrize("name", ["check", "simulate", "explain"])
@pytest.mark.parametrize(("text", "code"), [(SOUND, 0), (RACE, 1), (STUCK, 1), ("def", 2)])
def test_exit_codes(name: str, text: str, code: int) -> None:
    found, out, err = run(name, text=text)
    assert found == code, out + err
    assert "Traceback" not in err
    assert ("unsound" in out or "wait for one another for ever" in err) == (code == 1)
    assert err.startswith("error: ParseError") == (code == 2)


def test_a_prediction_of_an_unsound_schedule_says_so() -> None:
    code, out, _ = run("simulate", text=RACE)
    assert code == 1
    assert out.startswith("predicted for machine 'cpu'")
    assert "the prediction is of a schedule that can go wrong" in out
    assert "race: nothing orders line 8" in out
    code, out, _ = run("simulate", "--json", text=RACE)
    assert (code, json.loads(out)["verdict"]) == (1, "unsound")
    assert json.loads(run("simulate", "--json", text=SOUND)[1])["verdict"] == "sound"


@pytest.mark.parametrize("name", ["check", "simulate", "explain", "show", "opt"])
def test_errors_are_json_where_a_script_asks_for_json(name: str) -> None:
    code, out, err = run(name, "--json", text="def f(:\n")
    assert (code, err) == (2, "")
    error = json.loads(out)["error"]
    assert error["type"] == "ParseError"
    assert error["message"].startswith("<stdin>:1:")


def test_a_fault_of_our_own_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("by \x1b[31m zero")

    monkeypatch.setattr("interlace.verify.check", fail)
    code, out, err = run("check", text=SOUND)
    assert (code, out) == (70, "")
    assert err.startswith("internal error: this is a fault of Interlace; report it in an issue")
    assert err.endswith("ZeroDivisionError: by \\x1b[31m zero\n\n")
    code, out, err = run("check", "--json", text=SOUND)
    assert (code, json.loads(out)["error"]["type"]) == (70, "ZeroDivisionError")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 2)])
def test_other_ends(error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("interlace.verify.check", stop)
    assert run("check", text=SOUND)[0] == code


LARGE = {
    "many ranks": "def f(tp: Team[100000], x: f32[4]):\n    pass\n",
    "digits": f"def f(x: f32[4]):\n    main: call('aten.neg.default', x, {'1' * 4300})\n",
    "wide": f"def f(x: f32[{'9' * 4299}]):\n    pass\n",
    "deep": "def f(x: f32[4]):\n    main: copy(" + "(" * 150 + "x" + ")" * 150 + ", x)\n",
    "nested": f"def f(x: f32[4]):\n    return {'(' * 150}x,{'),' * 149}),\n",
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("verb", ["check", "show", "simulate", "explain", "opt"])
def test_what_is_too_large_ends_in_words(verb: str, name: str) -> None:
    code, _, err = run(verb, text=LARGE[name])
    assert code == 2 or (name in ("deep", "nested") and code in (0, 1)), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "size", ["--world=1000000", "--mesh=tp=1000000", f"--mesh=tp={'9' * 5000}"], ids=range(3)
)
def test_worlds_that_are_too_large(size: str) -> None:
    code, _, err = run("check", size, text=SOUND)
    assert (code, "TeamError" in err) == (2, True), err


@pytest.mark.parametrize("odd", ["\\ud800", "é\\u202e"])
@pytest.mark.parametrize(
    "line", ["check", "show", "simulate", "explain", "opt -p schedule", "check --json"]
)
def test_names_reach_no_terminal_as_they_are(line: str, odd: str) -> None:
    text, args = ODD.format(odd=odd), line.split()
    code, out, err = run(*args, text=text)
    assert code in (0, 1), err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    wrong = text.replace("copy(buffer", "coppy(buffer") + "    # \x1b[31m\n"
    code, out, err = run(*args, text=wrong)
    assert code == 2
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err)


def test_pages_and_traces_of_odd_names(tmp_path: Path) -> None:
    page, trace = (str(tmp_path / name) for name in ("p.html", "t.json"))
    text = ODD.format(odd="\\ud800")
    assert run("show", "--html", page, text=text)[0] == 0
    assert run("simulate", "--html", page, "--perfetto", trace, text=text)[0] == 0
    assert "\\ud800" in Path(page).read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--html", "--perfetto", "--out"])
def test_a_file_that_cannot_be_written_is_an_error(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run("simulate", option, str(tmp_path / "file" / "page"), text=SOUND)
    assert code == 2
    assert err.startswith("error: InterlaceError: cannot write")


@pytest.mark.parametrize("line", ["simulate --html", "simulate --out", "opt -o", "show --html"])
def test_a_folder_is_no_file_to_write(line: str, tmp_path: Path) -> None:
    for path in (".", str(tmp_path)):
        code, _, err = run(*line.split(), path, text=SOUND)
        assert code == 2, err
        assert err.startswith(f"error: InterlaceError: cannot write {path}: it is a directory")


def test_a_benchmark_looks_first_whether_it_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*_: object, **__: object) -> None:
        raise AssertionError("measured before the folder was looked at")

    monkeypatch.setattr("interlace_bench.ranks.run", ran)
    (tmp_path / "file").write_text("")
    for line in ("bench interconnect --device cpu --out", "calibrate --device cpu --out"):
        code, out, err = invoke(*line.split(), str(tmp_path / "file" / "x"))
        assert code == 2, out
        assert "InterlaceError: cannot write in" in err


def test_a_terminal_without_unicode() -> None:
    import os
    import subprocess

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "show", "-"],
        **{"input": b'@named("\xc3\xa9")\ndef f(x: f32[4]):\n    pass\n', "timeout": 60},
        env=env,
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 2), done.stderr
    assert b"Traceback" not in done.stderr


def test_an_endless_file_is_refused() -> None:
    code, _, err = invoke("check", "/dev/zero")
    assert (code, "Traceback" in err) == (2, False)
