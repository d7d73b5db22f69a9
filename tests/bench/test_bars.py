"""The bars of `bench overlap`, by rows made up: what is judged, and when it is missed."""

from __future__ import annotations

from typing import Any

import pytest

from interlace_bench.bars import BarVerdict, judge, missed
from interlace_bench.rows import Row

# -- overlap ---------------------------------------------------------------------------------------


def site(op: str, m: int, strategy: str, us: float, mode: str = "eager", **more: Any) -> Any:
    return {
        **{"op": op, "m": m, "k": 8192, "n": 8192, "strategy": strategy, "mode": mode},
        **{"median_us": us, "gemm_us": 100.0, "link_us": 60.0, "host_us": 30.0},
        **{"host_runs": 1000, "dtype": "bf16", "error": "", **more},
    }


def found(verdicts: list[BarVerdict], bar: str, mode: str = "eager") -> BarVerdict:
    (one,) = (v for v in verdicts if (v.bar, v.mode) == (bar, mode))
    return one


def test_bars_are_judged_by_geometric_mean_and_worst() -> None:
    rows = [
        *(site("ag_gemm", 8192, "auto", 100.0), site("ag_gemm", 4096, "auto", 121.0)),
        *(site("ag_gemm", 8192, "put", 99.0), site("ag_gemm", 4096, "put", 110.0)),
        *(site("ag_gemm", 8192, "sequential", 150.0), site("ag_gemm", 4096, "sequential", 150.0)),
        site("ag_gemm", 8192, "get", 50.0, error="wrong"),
    ]
    verdicts = judge("overlap", rows)
    mean = found(verdicts, "AG+GEMM R, geomean")
    assert mean.figure == pytest.approx(1.1)
    assert not mean.passed
    assert mean.worst.startswith("ag_gemm 4096 8192 8192")
    assert found(verdicts, "AG+GEMM R, worst").figure == pytest.approx(1.21)
    gain = found(verdicts, "AG+GEMM over sequential, geomean")
    assert gain.passed
    assert gain.worst.startswith("ag_gemm 4096")
    assert found(verdicts, "over the best fixed strategy, worst").figure == pytest.approx(1.1)
    assert not [v for v in verdicts if v.mode == "graph" or "GEMM+RS" in v.bar]


@pytest.mark.parametrize(("us", "passes"), [(50.9, True), (51.1, False)])
def test_small_cases_may_be_a_microsecond_slower(us: float, passes: bool) -> None:
    small: dict[str, Any] = {"k": 4096, "n": 4096}
    rows = [
        site("gemm_rs", 64, "auto", us, **small),
        site("gemm_rs", 64, "sequential", 50.0, **small),
    ]
    verdict = found(judge("overlap", rows), "small: us slower than max(2 %, 1 us) allows, worst")
    assert verdict.passed is passes


def test_a_bar_is_missed_where_no_mode_clears_it() -> None:
    rows = [
        *(site("ag_gemm", 8192, "auto", 200.0), site("ag_gemm", 8192, "auto", 104.0, "graph")),
        site("ag_gemm", 8192, "sequential", 150.0),
    ]
    verdicts = judge("overlap", rows)
    assert not found(verdicts, "AG+GEMM R, worst").passed
    assert found(verdicts, "AG+GEMM R, worst", mode="graph").passed
    assert (
        missed(verdicts)
        == [
            "AG+GEMM over sequential, geomean",
            "host time of an AG+GEMM call, us",
        ][: len(missed(verdicts))]
    )
    host = found(verdicts, "host time of an AG+GEMM call, us", mode="graph")
    assert not host.passed, "a replay has 10 us, not 40"


TIMES = {
    ("auto", "eager"): 100.0,
    ("auto", "graph"): 80.0,
    ("get", "eager"): 100.0,
    ("get", "graph"): 80.0,
    ("sequential", "eager"): 150.0,
    ("sequential", "graph"): 112.0,
    ("async-tp", "eager"): 180.0,
}


def timed(dtype: str = "bf16") -> list[Row]:
    """One shape that is large enough to count, timed by everybody."""
    shared = {"k": 8192, "n": 2560, "dtype": dtype, "gemm_us": 78.0}
    return [site("ag_gemm", 8192, name, us, mode, **shared) for (name, mode), us in TIMES.items()]


def figures(mode: str) -> dict[str, float]:
    """What `auto` is found to reach."""
    found = [verdict for verdict in judge("overlap", timed()) if verdict.mode == mode]
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
    (found,) = [verdict for verdict in judge("overlap", timed("f8e4m3")) if verdict.mode == "graph"]
    assert (found.bar, found.limit) == ("FP8 AG+GEMM R, geomean", "<= 1.08")
    assert found.figure == pytest.approx(80 / 78)
    both = judge("overlap", [*timed(), *timed("f8e4m3")])
    plain = [verdict for verdict in both if not verdict.bar.startswith("FP8")]
    assert plain == judge("overlap", timed())
    assert len(both) == len(plain) + 2


def test_rows_that_tell_nothing_are_no_verdict() -> None:
    rows = [site("ag_gemm", 8192, "auto", 100.0), site("ag_gemm", 8192, "put", 90.0, error="wrong")]
    bars = {verdict.bar for verdict in judge("overlap", rows)}
    assert bars == {"AG+GEMM R, geomean", "AG+GEMM R, worst", "host time of an AG+GEMM call, us"}
    assert judge("overlap", [site("ag_gemm", 8192, "auto", 1.0, error="wrong")]) == []
    assert judge("overlap", []) == missed([]) == []
