"""What measured sites say of others."""

from __future__ import annotations

import math

import pytest

from interlace.cost import SiteKey, SiteTime
from interlace.cost.site_times import correction, doubt, mean, measured

SITE = SiteKey(kind="all_gather_matmul", dtype="bf16", m=1024, k=4096, n=4096, world=4)


def at(m: int, seconds: float, predicted_s: float, strategy: str = "fused") -> SiteTime:
    key = SiteKey(kind=SITE.kind, dtype=SITE.dtype, m=m, k=SITE.k, n=SITE.n, world=SITE.world)
    return SiteTime(site=key, strategy=strategy, seconds=seconds, predicted_s=predicted_s)


def test_what_was_measured_counts() -> None:
    times = [at(1024, 3e-5, 2e-5), at(512, 1e-5, 1e-5)]
    assert measured(times, SITE, "fused") == 3e-5
    assert measured(times, SITE, "exchange") is None
    assert correction(times, SITE, "exchange", 2e-5) is None
    assert correction([], SITE, "fused", 2e-5) is doubt([], SITE, 2e-5) is None


def test_half_of_a_correction_is_in_proportion_and_half_by_as_much() -> None:
    """Twelve microseconds more than twelve: twice as much, or as many more."""
    near = [at(1025, 24e-6, 12e-6)]
    for predicted in (12e-6, 13e-6, 24e-6, 240e-6):
        found = correction(near, SITE, "fused", predicted)
        assert found == pytest.approx(math.sqrt(2 * (1 + 12e-6 / predicted)), rel=1e-3)


@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_the_seconds_of_large_sites_make_no_more_of_a_small_one_than_their_ratio(
    ratio: float,
) -> None:
    """A millisecond more or less would leave nothing of ten microseconds, or all too much."""
    found = correction([at(1025, ratio * 2e-3, 2e-3)], SITE, "fused", 1e-5)
    assert found == pytest.approx(ratio, rel=1e-3)


def test_the_nearer_ones_count_more_and_far_ones_nothing() -> None:
    near, far = at(1100, 2e-5, 1e-5), at(1 << 22, 9e-5, 1e-5)
    alone, both = (correction(times, SITE, "fused", 1e-5) for times in ([near], [near, far]))
    assert alone is not None and both is not None  # noqa: PT018
    assert alone < both < 1.05 * alone
    distant = correction([at(1 << 40, 9e-5, 1e-5)], SITE, "fused", 1e-5)
    assert distant == pytest.approx(1, abs=0.1)
    assert mean([((4, 4), 3.0), ((8, 4), 1.0)], (4, 4)) == pytest.approx(3, rel=1e-2)


def test_the_worst_speaks_for_those_of_which_nothing_was_measured() -> None:
    times = [at(1025, 2e-5, 1e-5), at(1025, 3e-5, 1e-5, "serial"), at(1025, 5e-6, 0.0, "get")]
    assert doubt(times, SITE, 1e-5) == correction(times, SITE, "serial", 1e-5)
    assert correction(times, SITE, "fused", 0.0) is None
