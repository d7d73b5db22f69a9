"""Schedules that the tests of the commands read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from interlace.cli import app

ROOT = Path(__file__).resolve().parents[2]

SOUND = """\
def all_gather_linear(tp: Team[2], x: f32[64, 256], w: f32[256, 512], y: out[f32[128, 512]]):
    full = alloc(f32[128, 256], symmetric=tp)
    main: copy(x, full[tp.rank])
    main: notify(ready, to=tp.others)
    main: record(e0)
    comm: wait(e0)
    comm: expect(ready, tp.rank + 1)
    comm: get(full[tp.rank + 1], peer=tp.rank + 1)
    comm: record(e1)
    main: call("aten.mm.out", full[tp.rank], w, out=y[tp.rank])
    main: wait(e1)
    main: call("aten.mm.out", full[tp.rank + 1], w, out=y[tp.rank + 1])
    main: free(full)
"""

RACE = SOUND.replace("    main: wait(e1)\n", "")

RING = """\
def ring(tp: Team[4], x: f32[8], y: out[f32[8]]):
    main: group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))
"""

STUCK = """\
def stuck(tp: Team[2], x: f32[8], y: out[f32[8]]):
    main: recv(y, peer=tp.rank + 1)
    main: send(x, peer=tp.rank + 1)
"""

SERIAL = """\
def mlp(tp: Team[2], x: f32[2048, 512], w: f32[512, 256]):
    full = empty(f32[4096, 512])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[4096, 256]))
    return y
"""

STAGES = """\
def first(pp: Team[[0, 1]], x: f32[8]):
    ranks(0)
    main: send(x, peer=1, team=pp)


def second(pp: Team[[0, 1]], y: out[f32[8]]):
    ranks(1)
    main: recv(y, peer=0, team=pp)
"""

RIGHT = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1
"""
"""Of torch's pipelines."""


def invoke(*args: str, text: str = "") -> tuple[int, str, str]:
    """Runs a command in this process, with `text` as standard input: code, stdout, stderr."""
    done = CliRunner().invoke(app, list(args), input=text)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def command(
    *args: str, stdin: str | None = None, env: dict[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m interlace` in a process of its own."""
    found = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "interlace", *args],
        **{"input": stdin, "env": found, "timeout": timeout_s, "cwd": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
