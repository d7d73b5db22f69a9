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


def test_stages_of_a_first_and_a_second_process_have_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(layers: int, _: str, kept: str) -> list[dict[str, float]]:
        second = Path(kept, "entry").exists()
        Path(kept, "entry").touch()
        of_rank: dict[str, float] = {}
        for stage in first_step.STAGES:
            of_rank[stage] = layers / (4 if second else 1)
        return [of_rank, of_rank | {"load": 2.0}]

    monkeypatch.setattr(first_step, "first_steps", steps)
    monkeypatch.setattr(first_step.compileall, "compile_dir", lambda *_, **__: True)
    given = ["--stages", "--layers", "1", "4", "--rounds", "2", "--out", str(tmp_path)]
    assert first_step.main(given) == 0
    rows = read(tmp_path / "first_step_stages.csv")
    assert [(row["layers"], row["process"]) for row in rows] == [
        *(("1", "first"), ("1", "second"), ("4", "first"), ("4", "second")),
    ]
    assert [float(row["load_s"]) for row in rows] == [1.5, 1.125, 3.0, 1.5]
    assert [float(row["find_sites to bind_s"]) for row in rows] == [6, 1.5, 24, 6]
    assert [float(row["of_fewest_layers"]) for row in rows] == [1, 1, 4, 4]
    assert [float(row["own_s"]) for row in rows] == [8.5, 2.875, 31, 8.5]
    assert float(rows[3]["of_first"]) == pytest.approx(8.5 / 31, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_process_tells_its_stages(tmp_path: Path) -> None:
    for is_second in (False, True):
        (told,) = first_step.first_steps(1, "interlace-stages", str(tmp_path), world=1)
        own = {stage: told[stage] for stage in first_step.STAGES}
        assert all(own[stage] > 0 for stage in ("load", "import", "cache", "agreement", "binding"))
        assert (own["choice"] == own["proof"] == 0) is is_second


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_first_step_is_timed_in_processes_of_its_own(tmp_path: Path) -> None:
    seconds, cpu = first_step.first_step(1, "interlace-kept", str(tmp_path), world=1)
    assert [*tmp_path.glob("*.json")]
    assert 0 < cpu < 100
    assert 0 < seconds < 170
