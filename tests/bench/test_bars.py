"""The bars of `bench overlap` and `bench kernels`, by rows made up: what is judged, and when it is
missed."""

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


# -- kernels ---------------------------------------------------------------------------------------

CE = {"op": "cross-entropy", "shape": "8192x128256", "dtype": "bf16", "does": "forward+backward"}
LINEAR = {**CE, "op": "linear-cross-entropy", "shape": "8192x4096x128256"}
ADAM = {"op": "adam", "shape": "1.40e9 all f32", "dtype": "f32", "does": "step"}
HOST = {"op": "host", "shape": "Executor.run, 8 calls", "dtype": "f32", "does": "host"}


def kernel(of: dict[str, str], way: str, **figures: Any) -> dict[str, Any]:
    columns = ("median_us", "share", "peak_bytes", "kept_bytes", "state_bytes", "calls")
    return {
        **dict.fromkeys(columns, ""),
        **of,
        "device": "cuda",
        "way": way,
        "error": "",
        **figures,
    }


def kernel_bars(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, bool]]:
    return {(v.bar, v.way): (round(v.figure, 4), v.passed) for v in judge("kernels", rows)}


@pytest.mark.parametrize(("share", "passed"), [(0.85, True), (0.849, False)])
def test_the_loss_is_judged_by_bandwidth_and_memory(share: float, passed: bool) -> None:
    rows = [
        kernel(CE, "interlace", share=share, peak_bytes=100.0),
        kernel(CE, "torch.compile", share=0.5, peak_bytes=99.0),
        kernel({**CE, "dtype": "f32"}, "interlace", share=0.1, peak_bytes=1.0),
        kernel({**CE, "does": "forward"}, "interlace", share=0.1, peak_bytes=1.0),
    ]
    assert kernel_bars(rows) == {
        ("share of copy bandwidth", "interlace"): (share, passed),
        ("peak memory over torch.compile's", "interlace"): (1.0101, False),
    }
    assert len(missed(judge("kernels", rows))) == (1 if passed else 2)


def test_rows_that_tell_nothing_are_no_verdict() -> None:
    broken = kernel(CE, "torch.compile", peak_bytes=99.0, error="absent")
    assert kernel_bars([kernel(CE, "interlace", share=0.9, peak_bytes=100.0), broken]) == {
        ("share of copy bandwidth", "interlace"): (0.9, True)
    }
    assert judge("kernels", [kernel(CE, "interlace", error="wrong")]) == []
    assert judge("kernels", []) == missed([]) == []


def test_no_variant_clears_a_bar_for_the_default() -> None:
    """Nor one variant the bar of time and another that of memory."""
    rows = [
        kernel(LINEAR, "interlace", median_us=100.0, peak_bytes=60.0, kept_bytes=10.0),
        kernel(LINEAR, "interlace f32 sums", median_us=112.0, peak_bytes=19.0, kept_bytes=10.0),
        kernel(LINEAR, "unfused", median_us=100.0, peak_bytes=110.0, kept_bytes=10.0),
    ]
    assert kernel_bars(rows) == {
        ("extra memory over unfused", "interlace"): (0.5, False),
        ("time over unfused", "interlace"): (1.0, True),
    }
    assert len(missed(judge("kernels", rows))) == 1


def test_adam_is_judged_by_bandwidth_and_rival() -> None:
    half = {**ADAM, "shape": "1.40e9 all bf16", "dtype": "bf16"}
    rows = [
        kernel(ADAM, "interlace", median_us=10.0, share=0.9),
        kernel(ADAM, "torch", median_us=10.0, share=0.9),
        kernel(half, "interlace", median_us=5.0, share=0.89),
    ]
    found = [(v.bar, v.case.split(" ", 2)[2], v.passed) for v in judge("kernels", rows)]
    assert found == [
        ("share of copy bandwidth", "all f32 f32 step", True),
        ("share of copy bandwidth", "all bf16 bf16 step", False),
        ("time over torch fused", "all f32 f32 step", False),
    ]


def test_muon_is_judged_by_its_default_way() -> None:
    of = {"op": "muon", "dtype": "bf16", "does": "step"}
    rows = [
        kernel({**of, "shape": shape}, way, speedup_torch=times)
        for shape in ("8 layers of llama3-8b", "80 small matrices")
        for way, times in (("interlace", 1.6), ("interlace gram", 3.0), ("torch", 1.0))
    ]
    found = [(v.way, v.limit, v.figure, v.passed) for v in judge("kernels", rows)]
    assert found == [("interlace", ">= 1.5", 1.6, True), ("interlace", ">= 6", 1.6, False)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_is_judged_on_every_device_at_every_size(device: str) -> None:
    """One call has the least to hide a run behind, and a team the most to do."""
    few = {**HOST, "shape": "Executor.run, 1 calls"}
    team = {**HOST, "shape": "Executor.run, 8 calls, a team of 2"}
    loss = {**HOST, "shape": "cross_entropy 64x512"}
    rows = [
        kernel(of, way, median_us=us, calls=calls, device=device)
        for of, mine, calls in ((HOST, 13.0, 8), (few, 13.1, 1), (team, 50.0, 8), (loss, 90.0, ""))
        for way, us in (("interlace", mine), ("torch", 10.0))
    ]
    found = [(v.case.split(" f32")[0], v.figure, v.passed) for v in judge("kernels", rows)]
    assert found == [
        (f"host {HOST['shape']}", 1.3, True),
        (f"host {few['shape']}", 1.31, False),
        (f"host {team['shape']}", 5.0, False),
    ]


def test_what_a_cpu_measures_of_bandwidth_is_not_judged() -> None:
    rows = [
        kernel(ADAM, "interlace", share=0.1, median_us=9.0, device="cpu"),
        kernel(ADAM, "torch", median_us=1.0, device="cpu"),
    ]
    assert judge("kernels", rows) == []
