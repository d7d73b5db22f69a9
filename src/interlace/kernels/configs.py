"""The tile shapes of the GEMM kernels, and which one a shape gets.

    >>> choose(rows=2048, columns=14336, parts=4, processors=132).bn
    256

Tiles of 128 x 256 keep the tensor cores busiest; smaller ones cost more per element and pay where
large ones would leave most processors without work in the last wave.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one GEMM kernel is cut: tile, k-step, warps, depth of the pipeline, rows per group."""

    bm: int
    bn: int
    bk: int = 64
    warps: int = 8
    stages: int = 3
    group_m: int = 8
    halves: bool = False
    flatten: bool = True


CONFIGS: tuple[tuple[Config, float], ...] = (
    (Config(bm=128, bn=256, stages=3), 1.0),
    (Config(bm=128, bn=128, stages=4, warps=4), 0.57),
    (Config(bm=64, bn=256, stages=4, warps=4), 0.56),
    (Config(bm=64, bn=128, bk=128, stages=4, warps=4), 0.33),
    (Config(bm=64, bn=64, bk=128, stages=6, warps=4), 0.22),
)
"""Candidates and the time of one of their tiles, in times of a 128 x 256 one (H200)."""

WITH_TAIL = Config(bm=128, bn=256, stages=4, halves=True)
"""What large tiles become where the last wave is cut in halves, and what a half takes."""

HALF = 0.57


def tiles(config: Config, rows: int, columns: int, parts: int) -> int:
    """How many tiles `parts` chunks of `rows` rows have."""
    return parts * -(-rows // config.bm) * -(-columns // config.bn)


def short_tail(total: int, processors: int) -> bool:
    """Whether the last wave has so few tiles that all of their halves fit in one wave."""
    rest = total % processors
    return total > processors and 0 < 2 * rest <= processors


def choose(
    *, rows: int, columns: int, parts: int, processors: int, may_halve: bool = True
) -> Config:
    """The candidate whose waves take the least time; the larger tile where two are equal."""
    found, least = CONFIGS[0][0], float("inf")
    for config, time in CONFIGS:
        total = tiles(config, rows, columns, parts)
        cost = -(-total // processors) * time
        if may_halve and config is CONFIGS[0][0] and short_tail(total, processors):
            config, cost = WITH_TAIL, cost - 1 + HALF
        if cost < least:
            found, least = config, cost
    return found
