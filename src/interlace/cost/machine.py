"""Machine: the figures from which op times follow, built in or read from a calibration file.

    >>> default_machine("cpu").replace(lanes=1).save("mine.json")
    >>> Machine.load("mine.json").lanes
    1

Every figure is of one rank. Ranks must choose alike, so all load the same file, or take the same
built-in model, which does not look at the machine it runs on.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from interlace.cost.site_times import SiteTime
from interlace.ir import DType


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes: the bytes grow from point to point, and the seconds never fall."""

    points: tuple[tuple[float, float], ...]

    @property
    def latency_s(self) -> float:
        """What the smallest message takes."""
        return self.points[0][1]

    @property
    def bandwidth(self) -> float:
        """The best rate of a whole message, latency included."""
        return max(nbytes / seconds for nbytes, seconds in self.points)

    def seconds(self, nbytes: float) -> float:
        """How long a message of that size takes."""
        points = self.points
        after = bisect_left(points, (nbytes, 0.0))
        if after == 0:
            return points[0][1]
        if after < len(points):
            (low, quick), (high, slow) = points[after - 1], points[after]
            part = math.log(nbytes / low) / math.log(high / low)
            return quick * (slow / quick) ** part
        last, longest = points[-1]
        if len(points) == 1:
            return longest * nbytes / last
        before, shorter = points[-2]
        rate = (longest - shorter) / (last - before) or longest / last
        return longest + (nbytes - last) * rate

    @classmethod
    def of(cls, measured: Iterable[tuple[float, float]]) -> Curve | None:
        """The curve of some (bytes, seconds); None where nothing was measured.

        Sizes measured more than once count by their median. Where noise lets a larger message be
        quicker than a smaller one, both take the mean.
        """
        found: defaultdict[float, list[float]] = defaultdict(list)
        for nbytes, seconds in measured:
            if nbytes > 0 and 0 < seconds < math.inf:
                found[float(nbytes)].append(seconds)
        blocks: list[tuple[float, list[float]]] = []  # (mean seconds, sizes)
        for size in sorted(found):
            mean, sizes = statistics.median(found[size]), [size]
            while blocks and blocks[-1][0] > mean:
                before, others = blocks.pop()
                mean = (mean * len(sizes) + before * len(others)) / (len(sizes) + len(others))
                sizes = others + sizes
            blocks.append((mean, sizes))
        points = tuple((size, mean) for mean, sizes in blocks for size in sizes)
        return cls(points) if points else None


def link_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """The bytes that pass through the busiest rank's link, one way; `nbytes` are those of a point-
    to-point transfer, or of the larger of a rank's two tensors in a collective."""
    part = nbytes * (ranks - 1) / ranks if ranks > 1 else 0.0
    match kind:
        case "get" | "put" | "send" | "copy":
            return nbytes
        case "barrier":
            return 0.0
        case "all_reduce":
            return 2 * part
        case "broadcast":
            return nbytes if ranks > 1 else 0.0
        case _:
            return part


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What moves bytes between ranks: a message of n bytes takes `latency_s + n / bandwidth`."""

    latency_s: float
    bandwidth: float
    """Bytes a second into (or out of) one rank."""
    lane: float = 0.0
    """How much of a compute lane a transfer occupies: 1 for a core that copies, 0 for an engine."""
    steals: float = 0.0
    """The fraction of compute speed that a transfer costs the rank while it runs."""
    curves: tuple[tuple[str, Curve], ...] = ()
    """What was measured goes before the two figures: seconds by the bytes through a rank's link,
    for each kind of transfer (`get`, `put`, `all_gather`, ...), also as `kind@ranks`."""

    def times(self, kind: str, nbytes: float, ranks: int = 0) -> tuple[float, float]:
        """The part of a transfer that nothing slows, and the part that others may slow."""
        curves = dict(self.curves)
        curve = curves.get(f"{kind}@{ranks}") or curves.get(kind)
        if curve is None:
            return self.latency_s, nbytes / self.bandwidth
        return curve.latency_s, curve.seconds(nbytes) - curve.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTime:
    """What a matmul of M x K by K x N was measured to take, its launch included."""

    dtype: str
    m: int
    k: int
    n: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model of the machine that runs each rank."""

    name: str
    device: str
    host: str = ""
    """Where it was measured (`fingerprint()`); empty for a built-in model."""
    gemm_flops: tuple[tuple[str, float], ...]
    """Floating point operations a second of a large matmul, by element type (`other`: the rest)."""
    gemm_tile: tuple[int, int] = (1, 1)
    """Rows and columns of the tile that one unit computes,"""
    gemm_tiles: tuple[tuple[int, int, float], ...] = ()
    """other tiles, with their part of that speed,"""
    units: int = 1
    """and how many units compute at once: a matmul takes whole waves of tiles."""
    gemms: tuple[GemmTime, ...] = ()
    """Matmuls that were measured: they go before the model, and correct it nearby."""
    fused: float = 1.0
    """How many times longer a matmul takes in a kernel that also waits and signals."""
    memory_bandwidth: float
    """Bytes a second that a pointwise op reads and writes."""
    launch_s: float
    """What each compute op takes besides its work."""
    issue_s: float
    """How long the host takes to issue an op."""
    issue: tuple[tuple[str, float], ...] = ()
    """The same by what is issued: `call`, `kernel`, `copy`, `peer`, `collective`, `event`,
    `signal`."""
    event_s: float = 0.0
    """How long a stream takes for an event, a signal or a slot."""
    lanes: int = 1
    """How many streams of a rank run at full speed at once; more share them."""
    backend: str
    """What runs collectives that name no backend."""
    links: tuple[tuple[str, Link], ...]
    """By transport: `gloo`, `nccl`, and `peer` for one-sided copies."""
    doubt_s: float = 0.0
    """A predicted gain that is smaller than this counts for nothing."""
    sites: tuple[SiteTime, ...] = ()
    """Whole sites that were measured, by strategy."""
    captured: bool = False
    """Whether runs are replays of a captured graph, so that the host issues nothing."""
    kernels: bool = True
    """Whether a GPU there runs the kernels of `fused`; this too is found when it is asked for."""

    def replace(self, **changes: Any) -> Machine:
        """This machine with some figures changed."""
        return dataclasses.replace(self, **changes)

    def flops(self, dtype: DType) -> float:
        """The speed of a matmul of that element type."""
        speeds = dict(self.gemm_flops)
        return speeds.get(str(dtype), speeds["other"])

    def link(self, transport: str | None) -> Link:
        """The link of a transport; an unknown one is taken to be like the default backend."""
        links = dict(self.links)
        return links.get(transport or self.backend, links[self.backend])

    @property
    def replayed(self) -> Machine:
        """The same where a captured graph is replayed: the host issues nothing."""
        issue = tuple((what, 0.0) for what, _ in self.issue)
        return self.replace(issue=issue, issue_s=0.0, captured=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a calibration file for this host, whole or not at all."""
        from interlace.cost.machine_file import save

        save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, any_host: bool = False, gpus: str | None = None
    ) -> Machine:
        """Reads a calibration file; `any_host` takes one that was measured elsewhere.

        `gpus` says what this host has (`4 x NVIDIA H200`); without it a file of GPUs is taken on
        trust, since nothing here looks for them.
        """
        from interlace.cost.machine_file import load

        return load(path, any_host=any_host, gpus=gpus)
