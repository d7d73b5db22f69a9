"""The demo on GPUs, alone and under torchrun: in order and overlapped have the same bits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.schedules import ROOT
from tests.cli.test_demo import assert_same_bits
from tests.gpu.cases import on_a_gpu

from interlace.ir import parse
from interlace.verify import check

pytestmark = on_a_gpu(400, 2)

STEPS = 4


def world() -> int:
    return next(n for n in (4, 2) if n <= torch.cuda.device_count())


def run(launcher: list[str], out: Path) -> dict[str, Any]:
    """The report of a short demo."""
    demo = ["interlace", "demo", "--json", "--steps", str(STEPS), "--layers", "1"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", *demo, "--device", "cuda", "--out", str(out)],
        **{"env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}, "timeout": 380, "cwd": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["alone", "torchrun"])
def test_demo(tmp_path: Path, how: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world())]
    report = run(torchrun if how == "torchrun" else [], tmp_path)
    assert report["world"] == world()
    assert report["device"] == torch.cuda.get_device_name()
    ways = report["ways"]
    overlapped, losses = ways["overlapped"], ways["overlapped"]["losses"]
    assert_same_bits(ways["in_order"], overlapped)
    for way in ("eager", "serial"):
        assert losses[0] == pytest.approx(ways[way]["losses"][0], abs=0.02)
        assert losses == pytest.approx(ways[way]["losses"], abs=0.3)
    assert losses[0] == pytest.approx(math.log(256), abs=1.0)
    assert losses[-1] < losses[0]
    for path in tmp_path.glob("*.ilc"):
        assert check(parse(path.read_text())).sound
    assert 0 <= overlapped["overlap"]["hidden"] <= 1
    assert (tmp_path / "timeline.html").exists()
