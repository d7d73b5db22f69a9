"""What a person sees on a terminal: help, choices, their completion, the demo's progress and last
lines."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.cli.schedules import ROOT, SERIAL, invoke

from interlace.commands import demo
from interlace.cost import default_machine, default_path
from interlace.demo.plan import TrainingPlan
from interlace.strategies import StrategyName, names

COMMANDS = ["", "demo", "run", "check", "opt", "show", "simulate", "explain", "calibrate", "doctor"]
BENCHES = ["interconnect", "overlap", "layer", "transformer", "kernels", "optimizer"]


@pytest.mark.parametrize("command", [*COMMANDS, "bench", *(f"bench {name}" for name in BENCHES)])
def test_help_fits_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = invoke(*command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    text = re.sub(r"[│\s]+", " ", out)
    if "--device" in text:
        assert "auto|cpu|cuda" in text or "cpu|cuda" in text
    if "--strategy" in text:
        assert all(name in text for name in names())


@pytest.mark.parametrize("columns", [80, 200])
def test_help_is_in_boxes_on_a_terminal_alone(columns: int) -> None:
    """No type stands beside an option that takes no value; maintainers' commands come last."""
    shown, env = [], {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": str(columns)}
    for args in ([], ["check"]):
        line = [sys.executable, "-m", "interlace", *args, "--help"]
        ours, theirs = pty.openpty()
        with subprocess.Popen(line, env=env, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            boxed = b""
            with contextlib.suppress(OSError):  # at its end
                while part := os.read(ours, 1 << 16):
                    boxed += part
            os.close(ours)
        assert process.returncode == 0
        piped = subprocess.run(line, env=env, capture_output=True, text=True, check=True).stdout
        shown += [boxed.decode(), piped]
        assert "╭" in boxed.decode()
        assert "╭" not in piped
        assert "<bool>" not in boxed.decode() + piped
    for text in shown[:2]:
        assert text.index("doctor") < text.index("For developing Interlace") < text.index("bench")
    assert "-V" in shown[1]


def test_help_of_a_group_cuts_no_sentence() -> None:
    for group in ([], ["bench"]):
        assert "..." not in invoke(*group, "--help")[1].partition("Commands:")[2]


def test_choices_of_strategies_are_the_rows() -> None:
    assert set(get_args(StrategyName)) == set(names())


@pytest.mark.parametrize(
    ("line", "offered"),
    [("demo --device ", ["auto", "cpu", "cuda"]), ("explain --strategy p", ["pipeline", "peer"])],
)
def test_a_shell_completes_choices(line: str, offered: list[str]) -> None:
    words = f"interlace {line}"
    place = {"COMP_WORDS": words, "COMP_CWORD": "3", "_INTERLACE_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", "from interlace.cli import app; app(prog_name='interlace')"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **place},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == offered, done.stderr


def test_every_command_asks_the_calibration_of_this_host(tmp_path: Path) -> None:
    path, file = default_path(), tmp_path / "mlp.ilc"
    file.write_text(SERIAL)

    def machine(*args: str) -> str:
        return json.loads(invoke("simulate", str(file), "--json", *args)[1])["machine"]

    assert machine() == "cpu"
    path.parent.mkdir(parents=True, exist_ok=True)
    default_machine("cpu").replace(name="measured").save(path)
    try:
        assert machine() == "measured"
        told = invoke("explain", str(file))[1]
        assert "candidates, by measured" in told
    finally:
        path.unlink()


def test_the_demo_shows_its_progress_from_the_first_second(capsys: Any) -> None:
    plan = TrainingPlan(steps=5)
    hear = demo._progress(plan, 2, quiet=False)
    assert capsys.readouterr().err == "starting 2 ranks\n"
    for step in range(5):
        hear({"event": "step", "way": "serial", "step": step, "loss": 5.0 - step})
    assert capsys.readouterr().err.splitlines() == [
        "serial: step 1 of 5, loss 5.000",
        "serial: step 5 of 5, loss 1.000",
    ]
    demo._progress(plan, 2, quiet=True)({"event": "step", "way": "serial", "step": 0, "loss": 5.0})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("times", "begin", "hint"),
    [
        ((200.0, 120.0), "overlap paid on this machine: a whole step takes 120.0 ms", ""),
        ((200.0, 201.0), "overlap made no difference", "interlace calibrate"),
        ((200.0, 300.0), "overlap did not pay", "contend for the same cores"),
    ],
)
def test_the_demo_says_whether_overlap_paid(
    times: tuple[float, float], begin: str, hint: str
) -> None:
    serial, overlapped = times
    ways = {"serial": {"step_ms": serial}, "overlapped": {"step_ms": overlapped}}
    text = demo.verdict({"device": "cpu", "plan": {"steps": 2}, "ways": ways})
    assert text.startswith(begin)
    assert hint in text
    assert ("calibrate" in text) == bool(hint)
    assert "--steps 2" in demo.verdict({"plan": {"steps": 1}})
