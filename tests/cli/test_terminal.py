"""What a person sees on a terminal: help, choices, their completion, tables of any width, and the
demo's progress and last lines."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console
from tests.cli.schedules import ROOT, SERIAL
from typer.testing import CliRunner

from interlace.cli import app
from interlace.commands import demo, output
from interlace.cost import Span, Timeline, default_machine, default_path
from interlace.demo.plan import TrainingPlan
from interlace.demo.report import DemoGraph, WayOutcome, verdict
from interlace.strategies import StrategyName, names

COMMANDS = ["", "demo", "run", "check", "opt", "show", "simulate", "explain", "calibrate", "doctor"]
BENCHES = ["interconnect", "overlap", "layer", "transformer", "kernels", "optimizer"]


@pytest.mark.parametrize("command", [*COMMANDS, "bench", *(f"bench {name}" for name in BENCHES)])
def test_help_fits_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    text = re.sub(r"[│\s]+", " ", done.stdout)
    if "--device" in text:
        assert "auto|cpu|cuda" in text or "cpu|cuda" in text
    if "--strategy" in text:
        assert all(name in text for name in names())


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


ROWS = [
    ("1", "layers.0.attention", "all_gather_matmul", "peer/get x2", "-", "predicted fastest (cpu)"),
    ("2", "output", "all_gather", "serial", "1.801 ms", "its result leaves the program, so " * 3),
]
HEADINGS = ("site", "module", "kind", "strategy", "serial", "reason")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_cell_of_a_table_breaks(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=width, no_color=True, highlight=False)
    monkeypatch.setattr(output, "console", lambda: terminal)
    output.table(HEADINGS, ROWS, title="sites")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    for cell in (cell for row in ROWS for cell in row[:-1] if cell != "-"):
        assert any(cell in line for line in lines), cell
    assert "predicted fastest (cpu)" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_path_of_a_table_breaks(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=width, no_color=True, highlight=False)
    monkeypatch.setattr(output, "console", lambda: terminal)
    path = f"/home/{'somebody/' * 12}calibration-2-cores.json"
    rows = [("python", "ok", "3.11"), ("calibration", "absent", f"none at {path}: the built-in")]
    output.table(("what", "state", "found"), rows)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert any(path in line for line in lines)
    if width < len(path):
        assert f"[1] {path}" in lines
        assert "none at [1]: the built-in" in " ".join(" ".join(lines).split())


def test_every_command_asks_the_calibration_of_this_host(tmp_path: Path) -> None:
    path, file = default_path(), tmp_path / "mlp.ilc"
    file.write_text(SERIAL)

    def machine(*args: str) -> str:
        done = CliRunner().invoke(app, ["simulate", str(file), "--json", *args])
        return json.loads(done.stdout)["machine"]

    assert machine() == "cpu"
    path.parent.mkdir(parents=True, exist_ok=True)
    default_machine("cpu").replace(name="measured").save(path)
    try:
        assert machine() == "measured"
        told = CliRunner().invoke(app, ["explain", str(file)]).stdout
        assert "candidates, by measured" in told
    finally:
        path.unlink()


def test_the_demo_shows_its_progress_from_the_first_second(capsys: Any) -> None:
    plan = TrainingPlan(steps=5)
    with demo._progress(plan, 2, quiet=False) as hear:
        assert capsys.readouterr().err == "starting 2 ranks\n"
        hear({"event": "way", "way": "serial", "doing": "compiling"})
        for step in range(5):
            hear({"event": "step", "way": "serial", "step": step, "loss": 5.0 - step})
    assert capsys.readouterr().err.splitlines() == [
        "serial: compiling",
        "serial: step 1 of 5, loss 5.000",
        "serial: step 5 of 5, loss 1.000",
    ]
    with demo._progress(plan, 2, quiet=True) as hear:
        hear({"event": "way", "way": "serial", "doing": "compiling"})
    assert capsys.readouterr().err == ""


def outcome(way: str, step_s: float, compute_s: float, comm: tuple[float, float]) -> WayOutcome:
    """A way whose rank computes from 0 on and communicates from `comm[0]` to `comm[1]`."""
    spans = (
        Span(0, "main", 0, "mm", 0.0, compute_s),
        Span(0, "comm", 1, "get", *comm, kind="comm"),
    )
    unused: Any = None
    graph = DemoGraph("forward", unused, unused, Timeline(spans))
    steps = [9.0, step_s, step_s]
    return WayOutcome(way=way, losses=[], step_s=steps, measured_step=1, gradients=[],
                      parameters=[], graphs=[graph])  # fmt: skip


def test_the_demo_says_whether_overlap_paid() -> None:
    plan = TrainingPlan(steps=3)
    serial = outcome("serial", 0.2, 0.1, (0.1, 0.2))
    better = verdict(plan, 1, [serial, outcome("overlapped", 0.12, 0.12, (0.0, 0.1))], True)
    assert (better["paid"], round(better["speedup"], 2)) == (True, 1.67)
    assert better["text"] == [
        "overlap paid on this machine: a step takes 120.0 ms overlapped and 200.0 ms serial "
        "(1.67x)",
        "why: a rank waits 100.0 ms less for communication, and computes 20.0 ms longer",
    ]
    worse = [serial, outcome("overlapped", 0.3, 0.3, (0.0, 0.1))]
    told = verdict(plan, 1, worse, True)
    assert told["paid"] is False
    text = "\n".join(told["text"])
    assert "did not pay" in text
    assert "computes 200.0 ms longer" in text
    assert "copies and compute contend" in text
    assert "interlace calibrate" in text
    assert "interlace calibrate" not in "\n".join(verdict(plan, 1, worse, False)["text"])
    one = verdict(TrainingPlan(steps=1), 1, worse, True)
    assert one["paid"] is None
    assert "--steps 2" in one["text"][0]
