"""`benchmarks/passes.py`: every pass has its row, and rows of another run stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.passes import BARS_MS, HEAD, layers, main

from interlace.verify import check
from interlace_bench.rows import read


def test_every_pass_has_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--rounds", "1", "--size", "400", "--out", str(tmp_path)]
    assert main(given) == 0
    monkeypatch.setitem(BARS_MS, "simulate", 1e-6)
    assert main(given) == 0, "bars are for --check"
    capsys.readouterr()
    assert main([*given, "--check"]) == 1
    assert "over its bar: simulate" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*given, "--rounds", "0"])
    rows = read(tmp_path / "passes.csv")
    assert len(rows) == 3 * len(BARS_MS)
    assert {row["pass"] for row in rows} == set(BARS_MS)
    for row in rows:
        assert all(row[column] for column in HEAD)
        assert 0 < float(row["least_ms"]) <= float(row["median_ms"]) <= float(row["most_ms"])
        assert row["commit"]


def test_the_programs_are_as_large_as_they_are_said_to_be() -> None:
    program = layers(27)
    report = check(program)
    assert report.sound
    assert report.num_ops == 8 * len(program.ops) > 10_000
