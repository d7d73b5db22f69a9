"""SiteTime: what a whole site was measured to take with a strategy; and what that says of others.

    >>> site = SiteKey(kind="all_gather_matmul", dtype="bf16", m=64, k=64, n=64, world=4)
    >>> times = [SiteTime(site=site, strategy="fused", seconds=3e-5, predicted_s=2e-5)]
    >>> measured(times, site, "fused"), round(correction(times, site, "fused", 2e-5), 2)
    (3e-05, 1.5)

Note [In proportion, or by as much]
    What a prediction leaves out is the same for every size or grows with it, and a few measurements
    do not tell which. So a correction is the geometric mean of a ratio and of a difference in
    seconds; the difference changes a prediction by no more than the largest measured ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FAR = 3.0
"""The distance (in doublings) at which a measurement is worth as much as the bare prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteKey:
    """Which site, up to the strategy."""

    kind: str
    """As the IR calls it: `all_gather_matmul`, `matmul_reduce_scatter`, `all_to_all_matmul`, ..."""
    dtype: str
    m: int
    k: int
    n: int
    world: int
    graph: bool = False
    """Whether it ran as a captured graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTime:
    """One site, one strategy, measured."""

    site: SiteKey
    strategy: str
    seconds: float
    predicted_s: float = 0.0
    """What this machine predicts for it without this table; 0: not known."""

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.seconds / self.predicted_s if self.predicted_s > 0 else 1.0


def measured(times: Iterable[SiteTime], site: SiteKey, strategy: str) -> float | None:
    """The measured seconds of a site with a strategy, if it was measured."""
    return next((t.seconds for t in times if t.strategy == strategy and t.site == site), None)


def host_at_most(times: Iterable[SiteTime], site: SiteKey, strategy: str, host_s: float) -> float:
    """What the host takes to issue a strategy: `host_s`, and no more than any site of that kind
    and type took with it, however small, since issuing it is the same for all."""
    like = site.kind, site.dtype, site.world, site.graph
    took = [(t.site, t.seconds) for t in times if t.strategy == strategy]
    alike = [s for at, s in took if (at.kind, at.dtype, at.world, at.graph) == like]
    return min([host_s, *alike])


def correction(
    times: Iterable[SiteTime], site: SiteKey, strategy: str, predicted_s: float
) -> float | None:
    """What to multiply a prediction by, as others with that strategy tell; None where none does."""
    near = [
        (_place(time.site), time)
        for time in times
        if time.strategy == strategy
        and time.predicted_s > 0
        and (time.site.kind, time.site.dtype, time.site.graph)
        == (site.kind, site.dtype, site.graph)
    ]
    if not near or predicted_s <= 0:
        return None
    at = _place(site)
    ratio = blend([(place, time.ratio) for place, time in near], at)
    late = mean([(place, time.seconds - time.predicted_s) for place, time in near], at)
    ratios = [1.0, *(time.ratio for _, time in near)]
    more = min(max(1 + late / predicted_s, min(ratios)), max(ratios))
    return math.sqrt(ratio * more)


def doubt(times: Iterable[SiteTime], site: SiteKey, predicted_s: float) -> float | None:
    """The largest correction of any strategy for such sites; None where nothing tells.

    For a strategy that nobody measured: beside corrected ones a bare prediction would look best.
    """
    known = tuple(times)
    names = sorted({time.strategy for time in known})
    found = [correction(known, site, name, predicted_s) for name in names]
    return max((ratio for ratio in found if ratio is not None), default=None)


def _place(site: SiteKey) -> tuple[float, ...]:
    return site.m, site.k, site.n, site.world**2


def blend(points: Sequence[tuple[Sequence[float], float]], at: Sequence[float]) -> float:
    """A ratio between those of some points in log space; far from all of them it is 1."""
    return math.exp(mean([(place, math.log(ratio)) for place, ratio in points], at))


def mean(points: Sequence[tuple[Sequence[float], float]], at: Sequence[float]) -> float:
    """What some points have, the nearer ones the more; far from all of them it is 0."""
    total, weights = 0.0, 1 / FAR**2
    for place, value in points:
        weight = 1 / (distance(place, at) ** 2 + 1e-4)
        total += weight * value
        weights += weight
    return total / weights


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How many doublings lie between two sizes."""
    return math.sqrt(sum(math.log2(a / b) ** 2 for a, b in zip(one, other, strict=True)))
