"""SiteTime: the measured time of a whole site with a strategy.

>>> site = SiteKey(kind="all_gather_matmul", dtype="bf16", m=64, k=64, n=64, world=4)
>>> measured([SiteTime(site=site, strategy="fused", seconds=3e-5)], site, "fused")
3e-05
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteKey:
    """The sizes and types of a site, up to the strategy."""

    kind: str
    """As the IR calls it: `all_gather_matmul`, `matmul_reduce_scatter`, `all_to_all_matmul`, ..."""
    dtype: str
    m: int
    k: int
    n: int
    world: int
    graph: bool = False
    """The site ran as a captured graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTime:
    """One site, one strategy, measured."""

    site: SiteKey
    strategy: str
    seconds: float


def measured(times: Iterable[SiteTime], site: SiteKey, strategy: str) -> float | None:
    """The measured seconds of a site with a strategy, if it was measured."""
    return next((t.seconds for t in times if t.strategy == strategy and t.site == site), None)
