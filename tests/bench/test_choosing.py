"""`benchmarks/choosing.py`: one run chooses, another judges."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmarks.choosing import main, off


def test_a_choice_is_judged_by_the_medians_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first run `put` had one quick round; it is 10 % slower than `fused` by all medians."""
    times = {
        "first": {"put": (110, 80), "fused": (100, 98), "get": (150, 150), "auto": (1, 1)},
        "second": {"put": (220, 219), "fused": (200, 199), "get": (300, 300), "auto": (1, 1)},
    }
    site = {"op": "ag_gemm", "m": 8, "k": 8, "n": 8, "dtype": "bf16", "mode": "eager", "error": ""}
    rows = [
        site
        | {"commit": commit, "world": world, "strategy": name, "median_us": median}
        | {"least_us": least}
        for commit, each in times.items()
        for world in (2, 4)
        for name, (median, least) in each.items()
    ]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for world in ("2", "4"):
        assert off(path, world, 0.0) == pytest.approx([0.0, 0.0])
        assert sorted(off(path, world, 1.0)) == pytest.approx([0.0, 0.1])
    monkeypatch.setattr("sys.argv", ["choosing", str(path)])
    main()
    assert capsys.readouterr().out.count("50.0%") == 6, "from 0.5 on the quick round chooses"
