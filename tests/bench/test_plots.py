"""The picture of the overlap rows: which figures stand in it, and the files that are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.plot import OURS, draw_overlap, kernels_over_roof, layers_over_ideal

from interlace_bench.rows import Row, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def kernel(strategy: str, mode: str, r: object, world: int = 4, m: int = 64, **more: object) -> Row:
    sizes = {"op": "ag_gemm", "m": str(m), "k": "8", "n": "16", "world": str(world)}
    told = {"strategy": strategy, "mode": mode, "r": str(r), "error": "", "commit": "a"}
    told["dtype"] = "bf16"
    return {**sizes, **told, **more}


def test_the_latest_rows_in_their_faster_mode():
    rows = [
        *(kernel("auto", "eager", 3.0), kernel("auto", "graph", 1.25), kernel("put", "eager", 1.0)),
        *(kernel("auto", "eager", 2.0), kernel("sequential", "eager", 1.5)),
        *(kernel("async-tp", "eager", "nan"), kernel("auto", "graph", 1.0, error="wrong")),
        *(kernel("auto", "eager", 1.1, m=8), kernel("auto", "eager", 1.2, world=2)),
    ]
    assert kernels_over_roof(rows) == {
        4: {
            "AG+GEMM 8 x 8 x 16": {OURS: 1.1},
            "AG+GEMM 64 x 8 x 16": {OURS: 1.25, "NCCL, then matmul": 1.5},
        },
        2: {"AG+GEMM 64 x 8 x 16": {OURS: 1.2}},
    }


def test_a_shape_is_of_one_commit_the_last_with_all_ways():
    rows = [
        *(kernel("auto", "eager", 1.3, commit="a"), kernel("async-tp", "eager", 1.4, commit="a")),
        *(kernel("auto", "eager", 1.1, commit="b"), kernel("async-tp", "eager", 1.2, commit="b")),
        kernel("auto", "eager", 1.0, commit="c"),
        *(kernel("auto", "eager", 2.0, commit="b", m=8), kernel("auto", "graph", 3.0, m=8)),
    ]
    assert kernels_over_roof(rows)[4] == {
        "AG+GEMM 8 x 8 x 16": {OURS: 3.0},
        "AG+GEMM 64 x 8 x 16": {OURS: 1.1, "async-TP": 1.2},
    }


def test_layers_are_over_the_ideal_of_the_last_run_with_all_ways():
    rows = read(RESULTS / "transformer.csv")
    runs: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["model"], row["world"], row["how"]) == ("llama3-70b", "4", "measured"):
            both = float(row["forward_ms"] or "nan") + float(row["backward_ms"] or "nan")
            runs.setdefault(row["commit"], {})[row["way"]] = both
    times = [times for times in runs.values() if {"inductor", "async-tp", "compile"} <= {*times}][
        -1
    ]
    found = layers_over_ideal(rows)[4]["layer llama3-70b, 8192 tokens"]
    ways = {OURS: "compile", "async-TP": "async-tp", "NCCL, then matmul": "inductor"}
    assert found == pytest.approx(
        {name: times[way] / times["ideal"] for name, way in ways.items()}, rel=1e-3
    )


def test_a_light_and_a_dark_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    layers = read(RESULTS / "transformer.csv")
    draw_overlap(read(RESULTS / "overlap.csv"), tmp_path / "overlap.png", layers)
    pictures = [(tmp_path / name).read_bytes() for name in ("overlap.png", "overlap-dark.png")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
