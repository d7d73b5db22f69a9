"""Curves of transfer times: between measured sizes, beyond them, and through noise."""

from __future__ import annotations

import itertools
import random

import pytest

from interlace.cost.machine import Curve, Link
from interlace_bench.calibration.fit import curve_of


def line(nbytes: float) -> float:
    """Ten microseconds and 100 GB/s."""
    return 10e-6 + nbytes / 100e9


def test_sizes_that_were_measured_between_them_and_beyond() -> None:
    points = tuple((float(1 << p), line(1 << p)) for p in range(10, 31))
    curve = Curve(points)
    for nbytes, seconds in points:
        assert curve.seconds(nbytes) == pytest.approx(seconds)
    assert curve.bandwidth == pytest.approx(points[-1][0] / points[-1][1])
    for nbytes in (3e3, 5e5, 7e6, 9e7, 4e9):
        assert curve.seconds(nbytes) == pytest.approx(line(nbytes), rel=0.02)
    assert curve.seconds(1) == curve.seconds(0) == curve.latency_s == points[0][1]
    alone = Curve(((1e6, 1e-3),))
    assert alone.seconds(10) == 1e-3
    assert alone.seconds(2e6) == pytest.approx(2e-3)


def test_a_curve_never_falls(seed: int) -> None:
    rng = random.Random(seed)
    measured = [
        (float(1 << power), line(1 << power) * rng.uniform(0.5, 2.0))
        for power in range(6, 28)
        for _ in range(3)
    ]
    rng.shuffle(measured)
    curve = curve_of(measured)
    assert curve is not None
    assert len(curve.points) == 22
    for (low, quick), (high, slow) in itertools.pairwise(curve.points):
        assert low < high
        assert quick <= slow
    times = [curve.seconds(rng.uniform(1, 1e9)) for _ in range(50)]
    assert all(time > 0 for time in times)


def test_what_is_no_measurement_is_left_out() -> None:
    assert curve_of([]) is None
    assert curve_of([(0, 1.0), (8, 0.0), (8, float("inf")), (8, float("nan"))]) is None
    assert curve_of([(8, 1.0), (8, 3.0), (8, 2.0)]) == Curve(((8.0, 2.0),))


def test_a_link_takes_the_curve_of_the_kind_and_the_team() -> None:
    four, any_size = Curve(((8.0, 4.0),)), Curve(((8.0, 2.0),))
    curves = (("all_gather", any_size), ("all_gather@4", four))
    link = Link(latency_s=1.0, bandwidth=1.0, curves=curves)
    assert sum(link.times("all_gather", 8, 4)) == 4
    assert sum(link.times("all_gather", 8, 2)) == 2
    assert link.times("broadcast", 8, 4) == (1.0, 8.0)
