"""Accelerate and the Trainer of transformers train compiled models, with and without our patch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "docs" / "upstream" / "accelerate-backend.patch"
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="accelerate and transformers are not installed",
)


def both_ranks(folder: Path, name: str, paths: list[Path]) -> list[str]:
    """The printed lines of `accelerated.py` on 2 ranks; raises for a rank that fails."""
    path = os.pathsep.join(map(str, [*paths, ROOT / "src", ROOT]))
    environ = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).with_name("accelerated.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(folder), name],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, text in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, text
    return printed


@pytest.mark.timeout(270)
def test_a_model_that_was_compiled_before_trains_as_the_whole(tmp_path: Path) -> None:
    for text in both_ranks(tmp_path, "none", []):
        assert "accelerated: 3 steps" in text
        assert "trained: 3 steps" in text


@pytest.mark.slow
@pytest.mark.timeout(270)
def test_the_patch_lets_accelerate_take_the_backend_by_name(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "accelerate")
    command = ["git", "apply", "-p2", str(PATCH)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=30)
    choices = [sys.executable, "-m", "accelerate.commands.launch", "--help"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(choices, env=environ, capture_output=True, text=True, timeout=120)
    assert ",interlace}" in shown.stdout
    for text in both_ranks(tmp_path, "interlace", [tmp_path]):
        assert "accelerated: 3 steps" in text
        assert "trained: 3 steps" in text
