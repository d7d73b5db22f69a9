"""The built-in machines: what is known without measuring.

    >>> default_machine("cuda").name
    'h200'

A calibration (`interlace calibrate`) replaces what it measured.
"""

from __future__ import annotations

from interlace.cost.curve import Curve
from interlace.cost.machine import Link, Machine
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


def _curve(*points: tuple[float, float]) -> Curve:
    """A curve from (kilobytes, microseconds)."""
    return Curve(tuple((size * 1e3, took * 1e-6) for size, took in points))


NCCL_GATHER = _curve(
    *((6, 15.0), (100, 16.0), (800, 22.0), (3_000, 38.0)),
    *((12_000, 83.0), (48_000, 203.0), (192_000, 676.0), (768_000, 2393.0)),
)
"""Four ranks, from 12 MB up as measured."""
NCCL_SCATTER = _curve(
    *((6, 15.0), (100, 17.0), (800, 24.0), (3_000, 42.0)),
    *((12_000, 92.0), (48_000, 220.0), (192_000, 720.0), (768_000, 2500.0)),
)
NCCL_REDUCE = _curve(
    *((12, 20.0), (200, 22.0), (1_600, 33.0), (6_000, 64.0)),
    *((24_000, 140.0), (96_000, 385.0), (384_000, 1340.0), (1_536_000, 4900.0)),
)
EXCHANGE = _curve((6, 9.0), (100, 9.5), (800, 12.0), (3_000, 20.0), (12_000, 52.0), (48_000, 190.0))
"""One kernel in which every rank writes to its peers."""
EXCHANGE_REDUCE = _curve((12, 11.0), (200, 12.0), (1_600, 17.0), (6_000, 33.0), (24_000, 98.0))
PEER_COPY = _curve(
    *((4, 11.0), (256, 11.7), (1_000, 13.8), (2_100, 16.8), (4_200, 22.0)),
    *((8_400, 26.5), (16_800, 49.6), (33_600, 95.0), (134_000, 370.0)),
)
"""Gets and puts: small ones with what their signals take to arrive, large ones as in a chain of
puts, 5.6 us apart with their signals (measured on two GPUs)."""

H200 = Machine(
    name="h200",
    device="cuda",
    gemm_flops=(
        *(("bf16", 830e12), ("f16", 830e12), ("f32", 50e12), ("f64", 55e12)),
        *(("f8e4m3", 1500e12), ("f8e5m2", 1500e12), ("other", 50e12)),
    ),
    gemm_tile=(128, 256),
    gemm_tiles=((128, 128, 0.85), (64, 128, 0.65), (64, 64, 0.45)),
    units=132,
    fused=1.02,
    memory_bandwidth=3.9e12,
    launch_s=3e-6,
    issue_s=6e-6,
    issue=(
        *(("call", 8e-6), ("kernel", 8e-6), ("copy", 2.5e-6), ("peer", 2.5e-6)),
        *(("collective", 15e-6), ("event", 0.6e-6), ("signal", 1.6e-6)),
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
