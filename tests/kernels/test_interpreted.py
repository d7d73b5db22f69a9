"""The arithmetic of all Triton kernels in Triton's interpreter, against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import interlace

SOURCE = Path(interlace.__file__).parents[1]
ROOT = Path(__file__).parents[2]
ROUNDS = {"adam": 10, "cross_entropy": 20, "float8": 25, "gemm": 8, "grouped": 6, "muon": 6}


@pytest.mark.kernels
@pytest.mark.parametrize("name", ROUNDS)
def test_kernels_compute_what_torch_does(name: str, seed: int) -> None:
    """In a process of its own: Triton reads whether it interprets when a kernel is defined."""
    script = f"tests.kernels.interpreted_{name}"
    done = subprocess.run(
        [sys.executable, "-m", script, str(seed), str(ROUNDS[name])],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all right"
