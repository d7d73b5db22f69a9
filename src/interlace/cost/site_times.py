"""SiteTime: what a whole site was measured to take with a strategy; and what that says of others.

A site is told by its kind, its element type, the M, K and N of its rank's matmul and the size of
its team; a strategy by its label (`serial`, `peer/put`, `pipeline x4`). Where the site itself was
measured, that counts. Where only others were, the prediction is corrected as theirs would have had
to be, the nearer ones the more:

    >>> site = SiteKey(kind="all_gather_matmul", dtype="bf16", m=64, k=64, n=64, world=4)
    >>> times = [SiteTime(site=site, strategy="fused", seconds=3e-5, predicted_s=2e-5)]
    >>> measured(times, site, "fused"), round(correction(times, site, "fused"), 2)
    (3e-05, 1.5)
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


def correction(times: Iterable[SiteTime], site: SiteKey, strategy: str) -> float | None:
    """Measured over predicted for such sites with that strategy; None where nothing tells."""
    near = [
        (_place(time.site), time.ratio)
        for time in times
        if time.strategy == strategy
        and time.predicted_s > 0
        and (time.site.kind, time.site.dtype, time.site.graph)
        == (site.kind, site.dtype, site.graph)
    ]
    return blend(near, _place(site)) if near else None


def doubt(times: Iterable[SiteTime], site: SiteKey) -> float | None:
    """The largest correction of any strategy for such sites; None where nothing tells.

    For a strategy that nobody measured: beside corrected ones a bare prediction would look best.
    """
    known = tuple(times)
    found = [correction(known, site, name) for name in sorted({time.strategy for time in known})]
    return max((ratio for ratio in found if ratio is not None), default=None)


def _place(site: SiteKey) -> tuple[float, ...]:
    return site.m, site.k, site.n, site.world**2


def blend(points: Sequence[tuple[Sequence[float], float]], at: Sequence[float]) -> float:
    """A ratio between those of some points in log space; far from all of them it is 1."""
    total, weights = 0.0, 1 / FAR**2
    for place, ratio in points:
        weight = 1 / (distance(place, at) ** 2 + 1e-4)
        total += weight * math.log(ratio)
        weights += weight
    return math.exp(total / weights)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How many doublings lie between two sizes."""
    return math.sqrt(sum(math.log2(a / b) ** 2 for a, b in zip(one, other, strict=True)))
