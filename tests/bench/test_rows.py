"""Rows: appended, with columns that may grow; and what they say of the bars."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from interlace_bench.bars import BarVerdict, judge_overlap, missed
from interlace_bench.interconnect import row as row_of
from interlace_bench.rows import append, number, read
from interlace_bench.transfers import Figure


def test_rows_are_appended_and_columns_grow(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    append(path, [{"a": 1, "b": math.nan, "c": 'say "x, y"'}])
    append(path, [{"a": 2.5, "d": "late"}])
    assert read(path) == [
        {"a": "1", "b": "", "c": 'say "x, y"', "d": ""},
        {"a": "2.5", "b": "", "c": "", "d": "late"},
    ]
    assert math.isnan(number("")) and number("2.5") == 2.5  # noqa: PT018


def test_a_figure_inside_a_host_is_of_the_ranks_there() -> None:
    """Two hosts of two ranks: a copy takes two ranks, a message between hosts all four."""
    fixed: Any = {"kind": "send", "backend": "gloo", "nbytes": 8, "seconds": 1e-3, "moved": 8.0}
    figures = [Figure(**fixed, pattern="ring", ranks=2)]
    figures += [Figure(**fixed, pattern="hosts", ranks=4, hosts=2)]
    assert [row_of(figure, {})["world"] for figure in figures] == [2, 4]


def row(op: str, m: int, strategy: str, us: float, mode: str = "eager", **more: Any) -> Any:
    return {
        **{"op": op, "m": m, "k": 8192, "n": 8192, "strategy": strategy, "mode": mode},
        **{"median_us": us, "gemm_us": 100.0, "link_us": 60.0, "host_us": 30.0},
        **{"host_runs": 1000, "error": "", **more},
    }


def found(
    verdicts: list[BarVerdict], bar: str, who: str = "auto", mode: str = "eager"
) -> BarVerdict:
    (one,) = (v for v in verdicts if (v.bar, v.of["who"], v.of["mode"]) == (bar, who, mode))
    return one


def test_bars_are_judged_by_geometric_mean_and_worst() -> None:
    rows = [
        *(row("ag_gemm", 8192, "auto", 100.0), row("ag_gemm", 4096, "auto", 121.0)),
        *(row("ag_gemm", 8192, "put", 99.0), row("ag_gemm", 4096, "put", 110.0)),
        *(row("ag_gemm", 8192, "sequential", 150.0), row("ag_gemm", 4096, "sequential", 150.0)),
        row("ag_gemm", 8192, "get", 50.0, error="wrong"),
    ]
    verdicts = judge_overlap(rows)
    mean = found(verdicts, "AG+GEMM R, geomean")
    assert mean.figure == pytest.approx(1.1)
    assert not mean.passed
    assert mean.of["worst"].startswith("ag_gemm 4096,8192,8192")
    assert found(verdicts, "AG+GEMM R, worst").figure == pytest.approx(1.21)
    gain = found(verdicts, "AG+GEMM over sequential, geomean")
    assert gain.passed
    assert gain.of["worst"].startswith("ag_gemm 4096")
    assert found(verdicts, "AG+GEMM R, geomean", "best").figure == pytest.approx(
        (0.99 * 1.1) ** 0.5
    )
    assert found(verdicts, "over the best fixed strategy, worst").figure == pytest.approx(1.1)
    assert not [v for v in verdicts if v.of["mode"] == "graph" or "GEMM+RS" in v.bar]


@pytest.mark.parametrize(("us", "passes"), [(50.9, True), (51.1, False)])
def test_small_cases_may_be_a_microsecond_slower(us: float, passes: bool) -> None:
    small: dict[str, Any] = {"k": 4096, "n": 4096}
    rows = [
        row("gemm_rs", 64, "auto", us, **small),
        row("gemm_rs", 64, "sequential", 50.0, **small),
    ]
    verdict = found(judge_overlap(rows), "small: us slower than max(2 %, 1 us) allows, worst")
    assert verdict.passed is passes


def test_a_bar_is_missed_where_no_mode_clears_it() -> None:
    rows = [
        *(row("ag_gemm", 8192, "auto", 200.0), row("ag_gemm", 8192, "auto", 104.0, "graph")),
        row("ag_gemm", 8192, "sequential", 150.0),
    ]
    verdicts = judge_overlap(rows)
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
