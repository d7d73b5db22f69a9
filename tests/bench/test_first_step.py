"""`benchmarks/first_step.py`: rows of all backends, and the bar."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import first_step

from interlace_bench.rows import read


def test_all_backends_have_rows_and_the_slower_one_misses_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took = {"aot_eager": 2.0, "interlace": 2.5, "interlace-kept": 2.1}
    monkeypatch.setattr(
        first_step, "first_step", lambda _, name, kept: (took[name], 2 * took[name])
    )
    monkeypatch.setattr(first_step.compileall, "compile_dir", lambda *_, **__: True)
    given = ["--layers", "1", "3", "--rounds", "2", "--out", str(tmp_path), "--check"]
    assert first_step.main(given) == 0
    took["interlace"] = 2.7
    assert first_step.main(given[:-1]) == 0, "bars are for --check"
    capsys.readouterr()
    assert first_step.main(given) == 1
    assert "over the bar: 3 layers, 1.35 of 1.3" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        first_step.main(["--rounds", "0"])
    rows = read(tmp_path / "first_step.csv")
    assert len(rows) == 18
    assert [row["least_cpu_s_ratio"] for row in rows[:3]] == ["1", "1.25", "1.05"]
    assert all(row["torch"] and row["commit"] for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_first_step_is_timed_in_processes_of_its_own(tmp_path: Path) -> None:
    seconds, cpu = first_step.first_step(1, "interlace-kept", str(tmp_path), world=1)
    assert [*tmp_path.glob("*.json")]
    assert 0 < cpu < 100
    assert 0 < seconds < 170
