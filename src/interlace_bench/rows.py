"""Rows of CSV: appended, never rewritten, so that a file holds every run that was committed.

    append(Path("benchmarks/results/overlap.csv"), rows)
    rows = read(Path("benchmarks/results/overlap.csv"))

A file whose columns differ from the rows' keeps them: new columns are added, by writing it again.
Every row says where it was measured (`facts`): commit, GPU, versions, date.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib
import importlib.metadata
import io
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import interlace
from interlace.trace.tracks import write_whole

Row = dict[str, Any]


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds rows at the end of a file, which is made if it is not there."""
    old = read(path) if path.exists() else []
    columns = list(dict.fromkeys(key for row in (*old, *rows) for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in (*old, *rows):
        writer.writerow({key: cell(value) for key, value in row.items()})
    write_whole(path, text.getvalue())


def read(path: Path) -> list[Row]:
    """All rows, as text."""
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def number(value: Any) -> float:
    """A cell as a number; NaN where it is empty."""
    return float(value) if value not in ("", None) else math.nan


def plain(value: Any) -> Any:
    """A value for JSON, which knows no NaN: None instead."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell(value: Any) -> str:
    """A value as a cell: numbers short, NaN empty."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else str(value)


def facts(device: str, commit: str = "") -> dict[str, str]:
    """The columns that are the same for all rows of a run; `commit` where git cannot tell."""
    nccl = ""
    if device == "cuda":
        of_torch: Any = importlib.import_module("torch.cuda.nccl")
        nccl = ".".join(map(str, of_torch.version()))
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {
        "commit": commit or source_commit(),
        "gpu": gpu or platform.machine(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "nccl": nccl,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def source_commit() -> str:
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
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
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
