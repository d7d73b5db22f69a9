"""Rows of CSV: appended, never rewritten, so that a file holds every run that was committed.

    append(Path("benchmarks/results/overlap.csv"), rows)
    rows = read(Path("benchmarks/results/overlap.csv"))

A file whose columns differ from the rows' keeps them: new columns are added, by writing it again.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interlace.errors import InterlaceError

Row = dict[str, Any]


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds rows at the end of a file, which is made if it is not there."""
    from interlace.trace.runs import write_whole

    old = read(path) if path.exists() else []
    columns = list(dict.fromkeys(key for row in (*old, *rows) for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in (*old, *rows):
        writer.writerow({key: cell(value) for key, value in row.items()})
    try:
        write_whole(path, text.getvalue().encode())
    except OSError as error:
        raise InterlaceError(f"cannot write {path}: {error.strerror or error}") from error


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
