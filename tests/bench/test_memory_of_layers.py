"""`benchmarks/memory_of_layers.py`: rows of each way, and what a layer adds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from benchmarks import memory_of_layers

from interlace_bench.rows import number, read


def test_rows_have_what_a_layer_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(way: str, form: str, layers: int, given: argparse.Namespace) -> Any:
        if (way, layers) == ("inductor", 4):
            return None
        sizes = dict.fromkeys(("torch_peak_bytes", "device_bytes"), 100 + 7 * layers)
        return {**sizes, "rest_bytes": 3, "step_ms": 2.0, "host_ms": 1.0, "first_s": 9.0}

    monkeypatch.setattr(memory_of_layers, "measured", measured)
    given = ["--device", "cpu", "--layers", "1", "4", "8", "--out", str(tmp_path)]
    assert memory_of_layers.main([*given, "--ways", "interlace"]) == 0
    assert memory_of_layers.main([*given, "--ways", "inductor"]) == 1
    rows = read(tmp_path / "memory_of_layers.csv")
    assert [(row["way"], row["layers"]) for row in rows] == [
        *(("interlace", count) for count in "148"),
        *(("inductor", count) for count in "18"),
    ]
    assert [row["device_growth"] for row in rows] == ["", "7", "7", "", "7"]
    assert {number(row["torch_peak_bytes"]) for row in rows} == {107, 128, 156}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["interlace", "fp8", "inductor", "floor"])
def test_layers_are_trained_in_processes_of_their_own(way: str, tmp_path: Path) -> None:
    given = ["--device", "cpu", "--model", "tiny", "--sequence", "64", "--layers", "1"]
    given += ["--forms", "whole", "--ways", way, "--out", str(tmp_path)]
    assert memory_of_layers.main(given) == 0
    (row,) = read(tmp_path / "memory_of_layers.csv")
    assert number(row["weights_bytes"]) > 0
    assert number(row["step_ms"]) > 0
