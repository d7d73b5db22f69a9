"""The arithmetic of the Triton kernels, against plain torch, in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import interlace

SCRIPT = Path(__file__).with_name("interpreted.py")
SOURCE = Path(interlace.__file__).parents[1]


@pytest.mark.kernels
def test_kernels_compute_what_torch_does(seed: int) -> None:
    """In a process of its own: Triton reads whether it interprets when a kernel is defined."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); sys.argv[1:] = ['{seed}', '8']\n"
    code += f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all right"
