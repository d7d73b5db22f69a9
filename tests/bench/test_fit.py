"""Fitting: the figures that samples were made from are found again, and missing kinds stay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from interlace.cost import Machine, default_machine
from interlace.cost.gemm import gemm_seconds
from interlace.errors import CalibrationError
from interlace.ir import DType
from interlace_bench.calibration.fit import Sample, fit

H200 = default_machine("cuda")


def transfers(kind: str, backend: str, latency: float, rate: float, **more: object) -> list[Sample]:
    """Samples of a link of round figures, from 1 KiB to 256 MiB."""
    blank = Sample(kind=kind, backend=backend, nbytes=1, seconds=1.0, **more)  # pyright: ignore[reportArgumentType]
    found: list[Sample] = []
    for power in range(10, 29, 2):
        moved = blank.link_bytes * (1 << power)
        found.append(
            Sample(
                kind=kind,
                backend=backend,
                nbytes=1 << power,
                seconds=latency + moved / rate,
                **more,  # pyright: ignore[reportArgumentType]
            )
        )
    return found


def test_transfers() -> None:
    samples = [
        *transfers("get", "peer", 5e-6, 400e9, protocol="ce", ranks=4),
        *transfers("all_gather", "nccl", 12e-6, 350e9, ranks=4),
        *transfers("all_gather", "nccl", 9e-6, 320e9, ranks=2),
        *transfers("all_reduce", "peer", 7e-6, 200e9, ranks=4),
    ]
    machine = fit(samples, H200)
    peer, nccl = machine.link("peer"), machine.link("nccl")
    assert sum(peer.times("get", 1e8)) == pytest.approx(5e-6 + 1e8 / 400e9, rel=0.02)
    assert peer.times("get", 1e8, 2) == peer.times("get", 1e8, 4) == peer.times("get", 1e8)
    assert (peer.latency_s, peer.bandwidth) == pytest.approx((5e-6, 400e9), rel=0.01)
    assert sum(nccl.times("all_gather", 3e7, 4)) == pytest.approx(12e-6 + 3e7 / 350e9, rel=0.03)
    assert sum(nccl.times("all_gather", 3e7, 2)) == pytest.approx(9e-6 + 3e7 / 320e9, rel=0.03)
    assert sum(nccl.times("all_gather", 3e7, 8)) == sum(nccl.times("all_gather", 3e7, 4))
    assert sum(peer.times("all_reduce", 1e6, 4)) == pytest.approx(7e-6 + 1e6 / 200e9, rel=0.08)
    before = H200.link("nccl")
    assert nccl.times("reduce_scatter", 1e6, 4) == before.times("reduce_scatter", 1e6, 4)
    assert machine.link("gloo") == H200.link("gloo")


def test_matmuls_answer_for_themselves_and_move_the_speed_of_their_type() -> None:
    shapes = [(8192, 8192, 8192), (4096, 4096, 7168), (256, 4096, 4096), (1024, 4096, 4096)]
    slower = {shape: 1.3 * gemm_seconds(H200, DType.bf16, *shape) + 4e-6 for shape in shapes}
    samples = [Sample(kind="launch", seconds=4e-6)]
    samples += [
        Sample(kind="gemm", dtype="bf16", shape=shape, seconds=seconds)
        for shape, seconds in slower.items()
    ]
    machine = fit(samples, H200)
    assert machine.launch_s == 4e-6
    for shape, seconds in slower.items():
        assert gemm_seconds(machine, DType.bf16, *shape) == pytest.approx(seconds - 4e-6)
    assert dict(machine.gemm_flops)["bf16"] == pytest.approx(830e12 / 1.3, rel=0.01)
    other = 4096, 8192, 8192
    expected = 1.3 * gemm_seconds(H200, DType.bf16, *other)
    assert gemm_seconds(machine, DType.bf16, *other) == pytest.approx(expected, rel=0.05)
    assert gemm_seconds(machine, DType.f32, *other) == gemm_seconds(H200, DType.f32, *other)


def test_host_and_memory() -> None:
    samples = [
        Sample(kind="issue", protocol="call", seconds=7e-6),
        Sample(kind="issue", protocol="call", seconds=9e-6),
        Sample(kind="issue", protocol="collective", seconds=20e-6),
        Sample(kind="issue", protocol="signal", seconds=3e-6),
        *(Sample(kind="copy", nbytes=n, seconds=3e-6 + 2 * n / 2e12) for n in (1 << 20, 1 << 28)),
    ]
    machine = fit(samples, H200)
    issue = dict(machine.issue)
    assert (issue["call"], issue["collective"]) == (16e-6, 40e-6), "amid others twice as long"
    assert issue["signal"] == 3e-6
    assert fit(samples, H200.replayed).issue, "of a base whose host takes nothing"
    before = dict(H200.issue)
    assert issue["peer"] == pytest.approx(16e-6 / before["call"] * before["peer"])
    assert machine.event_s == H200.event_s
    assert machine.memory_bandwidth == pytest.approx(2e12, rel=0.01)


def test_what_only_the_host_did_tells_little_of_the_device() -> None:
    host = [
        Sample(kind="issue", protocol="call", seconds=10e-6),
        Sample(kind="issue", protocol="collective", seconds=20e-6),
    ]
    small, large = (16, 4096, 4096), (8192, 8192, 8192)
    samples = [
        *(Sample(kind="launch", seconds=10e-6), *host),
        Sample(kind="gemm", dtype="bf16", shape=small, seconds=11e-6),
        Sample(kind="gemm", dtype="bf16", shape=large, seconds=2e-3),
        *(
            Sample(kind="all_gather", backend="nccl", nbytes=n, seconds=s, ranks=4)
            for n, s in ((1 << 10, 21e-6), (1 << 24, 90e-6))
        ),
    ]
    machine = fit(samples, H200)
    assert machine.launch_s == H200.launch_s
    assert [(time.m, time.seconds) for time in machine.gemms] == [(8192, 2e-3)]
    link, before = machine.link("nccl"), H200.link("nccl")
    assert link.times("all_gather", 768, 4) == before.times("all_gather", 768, 4)
    assert sum(link.times("all_gather", 0.75 * (1 << 24), 4)) == pytest.approx(90e-6)
    alone = fit([s for s in samples if s.kind != "issue"], H200)
    assert alone.launch_s == 10e-6
    assert len(alone.gemms) == 2
    assert sum(alone.link("nccl").times("all_gather", 768, 4)) == pytest.approx(21e-6)


def test_any_kinds_may_be_missing(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kinds = ["get", "put", "send", "all_gather", "all_reduce", "gemm", "launch", "issue"]
    kinds += ["copy", "barrier", "something new"]
    samples = [
        Sample(
            kind=rng.choice(kinds),
            backend=rng.choice(["", "nccl", "peer", "gloo", "ucc"]),
            protocol=rng.choice(["", "ce", "cpu", "call"]),
            dtype=rng.choice(["", "bf16", "int3"]),
            nbytes=rng.choice([0, 1, 1 << 20]),
            shape=rng.choice([(0, 0, 0), (8, 8, 8), (512, 256, 128)]),
            ranks=rng.choice([0, 1, 2, 4]),
            seconds=rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e-6, 1e-3]),
        )
        for _ in range(40)
    ]
    samples.append(Sample(kind="launch", seconds=1e-6))
    path = tmp_path / "machine.json"
    machine = fit(samples, H200)
    machine.save(path)
    assert Machine.load(path).replace(host="") == machine
    assert gemm_seconds(machine, DType.bf16, 100, 100, 100) > 0


def test_nothing_to_fit() -> None:
    for samples in ([], [Sample(kind="get", seconds=0.0)]):
        with pytest.raises(CalibrationError, match="nothing to calibrate with"):
            fit(samples, H200)
