"""The strategy that a site gets: from a table of measured times, or predictions, and one margin.

    >>> choice = pick([Estimate("serial", None, 0, 0.5), Estimate("fused", row, 0, 0.4)])
    >>> choice.best.label, choice.gains, choice.source
    ('fused', True, 'predicted')

Where the calibration has measured serial and others at this very site, those alone are compared;
else all are, as predicted. Of 1,140 sites in benchmarks/results/overlap.csv, what this takes is
0.45 % slower than the best measured strategy by predictions (geometric mean), and 0.05 % by the
table (tests/passes/test_measured_choices.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from interlace.strategies import Strategy

MARGIN = 0.97
"""A strategy must take less than this part of the serial time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A strategy for a site, and the time it takes."""

    label: str
    row: Strategy | None
    """None: serial."""
    chunks: int
    predicted_ms: float
    measured_ms: float | None = None
    """The time of this very site, where the calibration has it."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The fastest strategy of some, and what it was compared by."""

    best: Estimate
    """The fastest, serial apart; serial where there is no other."""
    serial_ms: float
    best_ms: float
    source: Literal["measured", "predicted"]

    @property
    def gains(self) -> bool:
        """True if the best is faster than serial by the margin."""
        return self.best_ms < MARGIN * self.serial_ms


def pick(estimates: Sequence[Estimate]) -> Pick:
    """The fastest of some estimates, of which serial is the first."""
    serial, *others = estimates
    known = [(e.measured_ms, e) for e in others if e.measured_ms is not None]
    if serial.measured_ms is not None and (known or not others):
        best_ms, best = min(known, key=lambda pair: pair[0], default=(serial.measured_ms, serial))
        return Pick(best, serial.measured_ms, best_ms, "measured")
    best = min(others, key=lambda e: e.predicted_ms, default=serial)
    return Pick(best, serial.predicted_ms, best.predicted_ms, "predicted")
