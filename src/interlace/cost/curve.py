"""Curve: how long a message of n bytes takes, from a few measured sizes.

Between its points a curve is straight in log space, which suits what starts as a latency and ends
as a bandwidth; below them it is the latency, above them the bandwidth of the last two goes on.

    >>> curve = Curve(((1e3, 10e-6), (1e6, 14e-6), (1e9, 2.8e-3)))
    >>> curve.seconds(1e3), curve.latency_s
    (1e-05, 1e-05)
    >>> round(curve.seconds(2e9) * 1e3, 2)
    5.59
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


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
