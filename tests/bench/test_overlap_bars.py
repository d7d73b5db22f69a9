"""The bars of `bench overlap`, by rows made up: who is compared with whom."""

from __future__ import annotations

import pytest

from interlace_bench.bars import judge_overlap
from interlace_bench.rows import Row

TIMES = {
    ("auto", "eager"): 100.0,
    ("auto", "graph"): 80.0,
    ("get", "eager"): 100.0,
    ("get", "graph"): 80.0,
    ("sequential", "eager"): 150.0,
    ("sequential", "graph"): 112.0,
    ("async-tp", "eager"): 180.0,
}


def rows(dtype: str = "bf16") -> list[Row]:
    """One shape that is large enough to count, timed by everybody."""
    shared = {"op": "ag_gemm", "m": 8192, "k": 8192, "n": 2560, "dtype": dtype, "error": ""}
    figures = {"gemm_us": 78.0, "link_us": 60.0, "host_us": 30.0, "host_runs": 1000}
    return [
        {**shared, **figures, "strategy": name, "mode": mode, "median_us": time}
        for (name, mode), time in TIMES.items()
    ]


def figures(mode: str) -> dict[str, float]:
    """What `auto` is found to reach."""
    found = [
        verdict
        for verdict in judge_overlap(rows())
        if (verdict.of["who"], verdict.of["mode"]) == ("auto", mode)
    ]
    return {verdict.bar: round(verdict.figure, 4) for verdict in found}


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_graphs_are_compared_with_graphs(mode: str) -> None:
    """torch's async-TP is timed eagerly alone: no graph of ours is held against that."""
    found, ours = figures(mode), TIMES["auto", mode]
    assert found["AG+GEMM over sequential, geomean"] == round(TIMES["sequential", mode] / ours, 4)
    assert found["AG+GEMM R, worst"] == round(ours / 78, 4)
    rival = found.get("AG+GEMM over async-TP, geomean")
    assert rival == (1.8 if mode == "eager" else None)


def test_fp8_has_a_bar_of_its_own() -> None:
    (found,) = [
        verdict
        for verdict in judge_overlap(rows("f8e4m3"))
        if (verdict.of["who"], verdict.of["mode"]) == ("auto", "graph")
    ]
    assert (found.bar, found.limit) == ("FP8 AG+GEMM R, geomean", "<= 1.08")
    assert found.figure == pytest.approx(80 / 78)
    both = judge_overlap([*rows(), *rows("f8e4m3")])
    plain = [verdict for verdict in both if not verdict.bar.startswith("FP8")]
    assert plain == judge_overlap(rows())
    assert len(both) == len(plain) + 4
