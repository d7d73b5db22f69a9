"""Rows: appended, with columns that may grow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from interlace_bench.calibration.fit import Sample
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


def test_a_row_inside_a_host_is_of_the_ranks_there() -> None:
    """Two hosts of two ranks: a copy takes two ranks, a message between hosts all four."""
    fixed: Any = {"kind": "send", "backend": "gloo", "nbytes": 8, "seconds": 1e-3}
    samples = [Sample(**fixed, pattern="ring", ranks=2)]
    samples += [Sample(**fixed, pattern="hosts", ranks=4, hosts=2)]
    assert [sample.row["world"] for sample in samples] == [2, 4]


def test_a_copy_to_all_others_takes_as_long_as_all_of_them() -> None:
    fixed: Any = {"kind": "get", "backend": "peer", "nbytes": 8000, "seconds": 1e-6, "ranks": 4}
    ring, every = (Sample(**fixed, pattern=pattern).row for pattern in ("ring", "all"))
    assert (ring["us"], every["us"]) == (1.0, 3.0)
    assert ring["gbs"] == every["gbs"] == 8.0
