"""The bars of `bench kernels`, by rows made up: what is judged, and when a bar is missed."""

from __future__ import annotations

from typing import Any

import pytest

from interlace_bench.bars import judge_kernels, missed

CE = {"op": "cross-entropy", "shape": "8192x128256", "dtype": "bf16", "does": "forward+backward"}
LINEAR = {**CE, "op": "linear-cross-entropy", "shape": "8192x4096x128256"}
ADAM = {"op": "adam", "shape": "1.40e9 all f32", "dtype": "f32", "does": "step"}
HOST = {"op": "host", "shape": "Executor.run, 8 calls", "dtype": "f32", "does": "host"}


def row(of: dict[str, str], way: str, **figures: Any) -> dict[str, Any]:
    columns = ("median_us", "share", "peak_bytes", "kept_bytes", "state_bytes", "calls")
    return {
        **dict.fromkeys(columns, ""),
        **of,
        "device": "cuda",
        "way": way,
        "error": "",
        **figures,
    }


def told(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, bool]]:
    return {(v.bar, v.of["way"]): (round(v.figure, 4), v.passed) for v in judge_kernels(rows)}


@pytest.mark.parametrize(("share", "passed"), [(0.85, True), (0.849, False)])
def test_the_loss_is_judged_by_bandwidth_and_memory(share: float, passed: bool) -> None:
    rows = [
        row(CE, "interlace", share=share, peak_bytes=100.0),
        row(CE, "torch.compile", share=0.5, peak_bytes=99.0),
        row({**CE, "dtype": "f32"}, "interlace", share=0.1, peak_bytes=1.0),
        row({**CE, "does": "forward"}, "interlace", share=0.1, peak_bytes=1.0),
    ]
    assert told(rows) == {
        ("share of copy bandwidth", "interlace"): (share, passed),
        ("peak memory over torch.compile's", "interlace"): (1.0101, False),
    }
    assert len(missed(judge_kernels(rows))) == (1 if passed else 2)


def test_rows_that_tell_nothing_are_no_verdict() -> None:
    broken = row(CE, "torch.compile", peak_bytes=99.0, error="absent")
    assert told([row(CE, "interlace", share=0.9, peak_bytes=100.0), broken]) == {
        ("share of copy bandwidth", "interlace"): (0.9, True)
    }
    assert judge_kernels([row(CE, "interlace", error="wrong")]) == []
    assert judge_kernels([]) == missed([]) == []


def test_no_variant_clears_a_bar_for_the_default() -> None:
    """Nor one variant the bar of time and another that of memory."""
    rows = [
        row(LINEAR, "interlace", median_us=100.0, peak_bytes=60.0, kept_bytes=10.0),
        row(LINEAR, "interlace f32 sums", median_us=112.0, peak_bytes=19.0, kept_bytes=10.0),
        row(LINEAR, "unfused", median_us=100.0, peak_bytes=110.0, kept_bytes=10.0),
    ]
    assert told(rows) == {
        ("extra memory over unfused", "interlace"): (0.5, False),
        ("time over unfused", "interlace"): (1.0, True),
    }
    assert len(missed(judge_kernels(rows))) == 1


@pytest.mark.parametrize(("state", "passed"), [(50.0, True), (51.0, False)])
def test_adam_is_judged_by_bandwidth_rival_and_states(state: float, passed: bool) -> None:
    half = {**ADAM, "shape": "1.40e9 all bf16", "dtype": "bf16"}
    rows = [
        row(ADAM, "interlace", median_us=10.0, share=0.9, state_bytes=100.0),
        row(ADAM, "torch", median_us=10.0, share=0.9, state_bytes=100.0),
        row(half, "interlace", median_us=5.0, share=0.89, state_bytes=state),
    ]
    found = [(v.bar, v.of["case"].split(" ", 2)[2], v.passed) for v in judge_kernels(rows)]
    assert found == [
        ("share of copy bandwidth", "all f32 f32 step", True),
        ("share of copy bandwidth", "all bf16 bf16 step", False),
        ("time over torch fused", "all f32 f32 step", False),
        ("bytes of states over those of fp32 moments", "all bf16 bf16 step", passed),
    ]


def test_muon_is_judged_by_its_default_way() -> None:
    shapes = {"x @ x.mT": "4096x4096", "step": "8 layers of llama3-8b"}
    rows = [
        row({"op": "muon", "shape": shape, "dtype": "bf16", "does": does}, way, speedup_torch=times)
        for does, shape in shapes.items()
        for way, times in (("interlace", 1.6), ("interlace gram", 3.0), ("torch", 1.0))
    ]
    found = [(v.of["way"], v.limit, v.figure, v.passed) for v in judge_kernels(rows)]
    assert found == [("interlace", ">= 1.7", 1.6, False), ("interlace", ">= 1.5", 1.6, True)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_is_judged_on_every_device_at_every_size(device: str) -> None:
    """One call has the least to hide a run behind, and a team the most to do."""
    few = {**HOST, "shape": "Executor.run, 1 calls"}
    team = {**HOST, "shape": "Executor.run, 8 calls, a team of 2"}
    loss = {**HOST, "shape": "cross_entropy 64x512"}
    rows = [
        row(of, way, median_us=us, calls=calls, device=device)
        for of, mine, calls in ((HOST, 13.0, 8), (few, 13.1, 1), (team, 50.0, 8), (loss, 90.0, ""))
        for way, us in (("interlace", mine), ("torch", 10.0))
    ]
    found = [(v.of["case"].split(" f32")[0], v.figure, v.passed) for v in judge_kernels(rows)]
    assert found == [
        (f"host {HOST['shape']}", 1.3, True),
        (f"host {few['shape']}", 1.31, False),
        (f"host {team['shape']}", 5.0, False),
    ]


def test_what_a_cpu_measures_of_bandwidth_is_not_judged() -> None:
    rows = [
        row(ADAM, "interlace", share=0.1, median_us=9.0, device="cpu"),
        row(ADAM, "torch", median_us=1.0, device="cpu"),
    ]
    assert judge_kernels(rows) == []
