"""`benchmarks/passes.py`: every pass has its row, and rows of another run stay."""

from __future__ import annotations

from pathlib import Path

from benchmarks.passes import COLUMNS, layers, main

from interlace.bench.rows import read
from interlace.verify import check


def test_every_pass_has_its_row(tmp_path: Path) -> None:
    for _ in range(2):
        main(["--rounds", "1", "--size", "400", "--out", str(tmp_path)])
    rows = read(tmp_path / "passes.csv")
    assert len(rows) == 16
    assert len({row["pass"] for row in rows}) == 8
    for row in rows:
        assert all(row[column] for column in COLUMNS)
        assert 0 < float(row["least_ms"]) <= float(row["median_ms"]) <= float(row["most_ms"])
        assert row["commit"]


def test_the_programs_are_as_large_as_they_are_said_to_be() -> None:
    program = layers(27)
    report = check(program)
    assert report.sound
    assert report.num_ops == 8 * len(program.ops) > 10_000
