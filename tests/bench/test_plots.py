"""The picture of the overlap rows: which figures stand in it, and the files that are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.bench.plots import OURS, draw_overlap, kernels_over_roof, layers_over_ideal
from interlace.bench.rows import Row, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def kernel(strategy: str, mode: str, r: object, world: int = 4, m: int = 64, **more: object) -> Row:
    sizes = {"op": "ag_gemm", "m": str(m), "k": "8", "n": "16", "world": str(world)}
    return {**sizes, "strategy": strategy, "mode": mode, "r": str(r), "error": "", **more}


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


def test_layers_are_over_the_ideal():
    rows = read(RESULTS / "transformer.csv")
    times = {
        row["way"]: float(row["forward_ms"]) + float(row["backward_ms"])
        for row in rows
        if (row["model"], row["world"], row["how"]) == ("llama3-70b", "4", "measured")
        and not row["error"]
    }
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
