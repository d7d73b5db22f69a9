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
SCRIPTS = """
import runpy, sys
seed, *each = sys.argv[1:]
for name, rounds in (one.split("=") for one in each):
    sys.argv[1:] = [seed, rounds]
    runpy.run_module(f"tests.kernels.interpreted_{name}", run_name="__main__")
"""
"""Several scripts in one process: most of what one takes are its imports."""
ROUNDS = {"adam": 4, "cross_entropy": 8, "float8": 10, "gemm": 4, "grouped": 3, "muon": 3}


@pytest.mark.kernels
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names", [("adam", "cross_entropy", "gemm"), ("float8", "grouped", "muon")], ids="-".join
)
def test_kernels_compute_what_torch_does(names: tuple[str, ...], times: int, seed: int) -> None:
    """In a process of its own: Triton reads whether it interprets when a kernel is defined."""
    given = [f"{name}={times * ROUNDS[name]}" for name in names]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPTS, str(seed), *given],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["all right"] * len(names)
