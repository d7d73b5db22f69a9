"""The demo's processes: heard, bounded, and none left behind, whatever a rank does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.fake_rank import work
from tests.cli.schedules import ROOT, invoke

from interlace import errors
from interlace.launch import launch


def run(*does: str, timeout_s: float = 60.0) -> Any:
    """What launch returned or raised; none of the processes it started is left."""
    heard: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        given = {"does": does, "folder": folder}
        try:
            result: Any = launch(work, given, len(does), heard.append, timeout_s, "the demo")
        except errors.InterlaceError as error:
            result = error
        pids = [int(path.name) for path in Path(folder).iterdir()]
    assert heard, "no rank was started"
    assert not any(map(running, pids))
    assert len(pids) == len(does) or timeout_s < 60
    return result


def test_the_report_of_rank_0_comes_back() -> None:
    does = ("report", "report")
    assert run(*does) == {"world": "2", "does": list(does)}


@pytest.mark.parametrize(
    ("does", "kind", "told"),
    [
        (("wait", "die"), errors.PeerError, "rank 1 of the demo was killed by signal 9"),
        (("wait", "exit"), errors.PeerError, "rank 1 of the demo ended with code 7"),
        (("peer", "team"), errors.TeamError, "rank 1: team said"),
        pytest.param(
            *(("wait", "foreign"), errors.PeerError),
            "rank 1 of the demo raised ValueError: foreign",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dies", "exits", "cause-before-echo", "foreign"],
)
def test_a_failing_rank_is_named_and_all_are_ended(
    does: tuple[str, ...], kind: type[Exception], told: str
) -> None:
    result = run(*does)
    assert type(result) is kind, result
    assert told in str(result)
    assert ("the last words" in str(result)) == ("die" in does), "a dead rank's log is repeated"


@pytest.mark.slow
def test_a_fork_server_of_the_user_is_left_alone(tmp_path: Path) -> None:
    """It would be the whole process's: with its environment, and with what it was told to load."""
    code = (
        "import sys\n"
        "import multiprocessing.forkserver as server\n"
        "from tests.cli.fake_rank import work\n"
        "from interlace.launch import launch\n"
        "server.set_forkserver_preload(['json'])\n"
        "given = {'does': ['report'], 'folder': sys.argv[1]}\n"
        "assert launch(work, given, 1, lambda event: None, 60, 'it')\n"
        "print(server._forkserver._forkserver_pid, server._forkserver._preload_modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        **{"cwd": ROOT, "timeout": 100, "env": {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "None ['json']", done.stderr


def test_time_out_ends_all() -> None:
    began = time.monotonic()
    result = run("wait", "hang", timeout_s=2.0)
    assert isinstance(result, errors.CommTimeoutError)
    assert "did not end in 2 s (ranks [0, 1] are still at it)" in str(result)
    assert time.monotonic() - began < 10


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Not even SIGKILL of the parent leaves a real rank behind."""
    code = (
        "import functools, json, pathlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "from interlace.commands.demo import train\n"
        "from interlace.demo.plan import TrainingPlan\n"
        "from interlace.launch import launch\n"
        "tell = lambda event: print(json.dumps(event), flush=True)\n"
        "work = functools.partial(train, pathlib.Path(sys.argv[2]), 100)\n"
        "launch(work, TrainingPlan(steps=500), 2, tell, 100, 'the demo')\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT / "src"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    try:
        first = json.loads(parent.stdout.readline())  # the ranks are up and at work
        assert first["event"] == "started"
        ranks = [pid for pid in children(parent.pid) if b"spawn_main" in cmdline(pid)]
        assert len(ranks) == 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 30
    while any(map(running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(running, ranks))


def children(pid: int) -> list[int]:
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdecimal() and status(int(path.name))[1] == pid
    ]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def status(pid: int) -> tuple[str, int]:
    """State and parent of a process; `gone` where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "gone", 0
    return fields[0], int(fields[1])


def running(pid: int) -> bool:
    return status(pid)[0] not in ("gone", "Z")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--layers", "0"], "Invalid value for '--layers'"),
        (["--world", "0"], "Invalid value for '--world'"),
        (["--world", "3"], "TeamError: the demo's model has heads=8, which 3 ranks do not divide"),
        (["--strategy", "magic"], "Invalid value for '--strategy'"),
        (["--device", "tpu"], "Invalid value for '--device'"),
        (["--calibration", "/no/such.json"], "CalibrationError: cannot read calibration file"),
    ],
    ids=["steps", "layers", "no-world", "world-of-3", "strategy", "device", "calibration"],
)
def test_bad_arguments_are_refused_before_anything_starts(args: list[str], told: str) -> None:
    code, _, error = invoke("demo", *args)
    assert (code, told in error) == (2, True)
    assert "Traceback" not in error
