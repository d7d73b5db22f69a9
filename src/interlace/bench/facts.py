"""What a row says of where it was measured: commit, GPU, versions, date, and the SM clock.

>>> facts("cpu")["torch"]
'2.11.0'
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import math
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import interlace


def facts(device: str) -> dict[str, str]:
    """The columns that are the same for all rows of a run."""
    nccl = ""
    if device == "cuda":
        of_torch: Any = importlib.import_module("torch.cuda.nccl")
        nccl = ".".join(map(str, of_torch.version()))
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {
        "commit": commit(),
        "gpu": gpu or platform.machine(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "nccl": nccl,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def commit() -> str:
    """The commit of the source that runs, with `+` where it was changed; empty for a package."""
    source = Path(interlace.__file__).parent
    answers: list[str] = []
    for question in (
        ("rev-parse", "--short=12", "HEAD"),
        ("status", "--porcelain", "-uno", "--", str(source)),
    ):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                ["git", "-C", str(source), *question],
                **{"capture_output": True, "text": True, "timeout": 10, "check": True},
            )
            answers.append(done.stdout.strip())
    if not answers or not answers[0]:
        return ""
    return answers[0] + ("+" if any(answers[1:]) else "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class SMClock:
    """Reads the clock of a GPU's multiprocessors by NVML (`nvidia-ml-py`), where that is there."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        with contextlib.suppress(Exception):  # NVML is an extra, and raises what it likes
            pynvml: Any = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml

    def read(self) -> float:
        """The clock now, in MHz; NaN where it cannot be read."""
        if self._nvml is None:
            return math.nan
        try:
            return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        except self._nvml.NVMLError:
            return math.nan
