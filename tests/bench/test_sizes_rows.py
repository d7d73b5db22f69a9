"""`benchmarks/sizes.py`: rows of all ways, and the bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import sizes

from interlace_bench.rows import read


def test_a_way_that_is_slower_or_wrong_misses_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = {"eager": [2.0], "aot_eager": [1.0], "interlace": [1.1]}
    alike = dict.fromkeys(taken, True)
    told: dict[str, Any] = {"taken": taken, "alike": alike}
    monkeypatch.setattr(sizes, "launch", lambda *_: told)
    given = ["--case", "lengths", "--out", str(tmp_path), "--check"]
    assert sizes.main(given) == 0
    taken["interlace"] = [1.3]
    assert sizes.main(given[:-1]) == 0, "bars are for --check"
    capsys.readouterr()
    assert sizes.main(given) == 1
    assert "over the bar: lengths, 1.30 of 1.2" in capsys.readouterr().out
    taken["interlace"], alike["interlace"] = [0.5], False
    assert sizes.main(given) == 1
    assert "not eager's: lengths, interlace" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sizes.main(["--steps", "10"])
    rows = read(tmp_path / "sizes.csv")
    assert len(rows) == 12
    assert [row["ratio"] for row in rows[:3]] == ["2", "1", "1.1"]
    assert all(row["torch"] and row["commit"] for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_steps_are_timed_and_equal_eager(tmp_path: Path) -> None:
    assert sizes.main(["--case", "exchange", "--steps", "12", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "sizes.csv")
    assert [row["way"] for row in rows] == ["eager", "aot_eager", "interlace"]
    assert all(row["equal"] == "True" and float(row["median_ms"]) > 0 for row in rows)
