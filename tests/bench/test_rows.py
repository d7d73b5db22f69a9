"""Rows: appended, with columns that may grow."""

from __future__ import annotations

import math
from pathlib import Path

from interlace_bench.rows import append, number, read


def test_rows_are_appended_and_columns_grow(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    append(path, [{"a": 1, "b": math.nan, "c": 'say "x, y"'}])
    append(path, [{"a": 2.5, "d": "late"}])
    assert read(path) == [
        {"a": "1", "b": "", "c": 'say "x, y"', "d": ""},
        {"a": "2.5", "b": "", "c": "", "d": "late"},
    ]
    assert math.isnan(number("")) and number("2.5") == 2.5  # noqa: PT018
