"""The built-in machines: what is known without measuring.

    >>> default_machine("cuda").name
    'h200'

A calibration (`interlace calibrate`) replaces what it measured.
"""

from __future__ import annotations

from interlace.cost.machine import Curve, Link, Machine
from interlace.errors import CalibrationError


def default_machine(device: str = "cpu") -> Machine:
    """The built-in model of a device: `cpu`, or `cuda` (an H200 with its NVLink peers)."""
    match device.split(":")[0]:
        case "cpu":
            return CPU
        case "cuda" | "h200":
            return H200
        case other:
            raise CalibrationError(
                f"no built-in model of device {other!r}: use cpu or cuda, or a calibration file"
            )


CPU = Machine(
    name="cpu",
    device="cpu",
    gemm_flops=(("f32", 60e9), ("f64", 30e9), ("bf16", 60e9), ("other", 10e9)),
    memory_bandwidth=8e9,
    launch_s=8e-6,
    issue_s=4e-6,
    event_s=10e-6,
    lanes=2,
    backend="gloo",
    links=(
        ("gloo", Link(latency_s=150e-6, bandwidth=1.0e9, lane=1.0)),
        ("peer", Link(latency_s=20e-6, bandwidth=4.0e9, lane=1.0)),
    ),
)
"""A core a rank for compute, and one more to copy with."""


def _curve(kilobytes: tuple[int, ...], microseconds: tuple[float, ...]) -> Curve:
    points = zip(kilobytes, microseconds, strict=True)
    return Curve(tuple((size * 1e3, took * 1e-6) for size, took in points))


SIZES = (6, 100, 800, 3_000, 12_000, 48_000, 192_000, 768_000)
NCCL_GATHER = _curve(SIZES, (15, 16, 22, 38, 83, 203, 676, 2393))
"""Four ranks, from 12 MB up as measured."""
NCCL_SCATTER = _curve(SIZES, (15, 17, 24, 42, 92, 220, 720, 2500))
NCCL_REDUCE = _curve(tuple(2 * size for size in SIZES), (20, 22, 33, 64, 140, 385, 1340, 4900))
EXCHANGE = _curve(SIZES[:6], (9, 9.5, 12, 20, 52, 190))
"""One kernel in which every rank writes to its peers."""
EXCHANGE_REDUCE = _curve((12, 200, 1_600, 6_000, 24_000), (11, 12, 17, 33, 98))
PEER_COPY = _curve(
    (4, 256, 1_000, 2_100, 4_200, 8_400, 16_800, 33_600, 134_000),
    (11, 11.7, 13.8, 16.8, 22, 26.5, 49.6, 95, 370),
)
"""Gets and puts: small ones with what their signals take to arrive, large ones as in a chain of
puts, 5.6 us apart with their signals (measured on two GPUs)."""

H200 = Machine(
    name="h200",
    device="cuda",
    gemm_flops=(
        ("bf16", 830e12),
        ("f16", 830e12),
        ("f32", 50e12),
        ("f64", 55e12),
        ("f8e4m3", 1500e12),
        ("f8e5m2", 1500e12),
        ("other", 50e12),
    ),
    gemm_tile=(128, 256),
    gemm_tiles=((128, 128, 0.85), (64, 128, 0.65), (64, 64, 0.45)),
    units=132,
    fused=1.02,
    memory_bandwidth=3.9e12,
    launch_s=3e-6,
    issue_s=6e-6,
    issue=(
        ("call", 8e-6),
        ("kernel", 8e-6),
        ("copy", 2.5e-6),
        ("peer", 2.5e-6),
        ("collective", 15e-6),
        ("event", 0.6e-6),
        ("signal", 1.6e-6),
    ),
    event_s=1e-6,
    lanes=1,
    backend="nccl",
    links=(
        (
            "nccl",
            Link(
                latency_s=15e-6,
                bandwidth=300e9,
                steals=0.1,
                curves=(
                    ("all_gather", NCCL_GATHER),
                    ("reduce_scatter", NCCL_SCATTER),
                    ("all_reduce", NCCL_REDUCE),
                ),
            ),
        ),
        (
            "peer",
            Link(
                latency_s=11e-6,
                bandwidth=360e9,
                steals=0.02,
                curves=(
                    ("all_gather", EXCHANGE),
                    ("reduce_scatter", EXCHANGE),
                    ("all_reduce", EXCHANGE_REDUCE),
                    ("get", PEER_COPY),
                    ("put", PEER_COPY),
                ),
            ),
        ),
        ("gloo", Link(latency_s=300e-6, bandwidth=1.0e9)),
    ),
    doubt_s=5e-6,
)
"""Four H200s with 18 NVLinks a pair: gathers of 16 to 1024 MB and copies of 2 to 16 MB were
measured, the rest is like what is published of such machines."""
