"""The strategy that is taken, from measured and predicted times."""

from __future__ import annotations

import pytest

from interlace.cost.choose import Estimate, pick
from interlace.strategies import STRATEGIES


def estimate(label: str, predicted: float, measured: float | None = None) -> Estimate:
    """An estimate in milliseconds."""
    row = None if label == "serial" else STRATEGIES["pipeline", None]
    return Estimate(label, row, 0, predicted, measured)


@pytest.mark.parametrize(
    ("found", "fastest", "gains", "source"),
    [
        ([("serial", 1.0)], "serial", False, "predicted"),
        ([("serial", 1.0, 2.0)], "serial", False, "measured"),
        ([("serial", 1.0), ("a", 0.98)], "a", False, "predicted"),
        ([("serial", 1.0), ("a", 0.96), ("b", 0.96)], "a", True, "predicted"),
        ([("serial", 1.0), ("a", 0.96), ("b", 0.95)], "b", True, "predicted"),
        ([("serial", 9.0, 1.0), ("a", 9.0, 0.96), ("b", 0.1)], "a", True, "measured"),
        ([("serial", 9.0, 1.0), ("a", 9.0, 0.98), ("b", 0.1)], "a", False, "measured"),
        ([("serial", 9.0, 0.1), ("a", 8.0), ("b", 9.0)], "a", True, "predicted"),
        ([("serial", 1.0), ("a", 2.0, 0.1)], "a", False, "predicted"),
    ],
)
def test_what_is_taken(
    found: list[tuple[str, float]], fastest: str, gains: bool, source: str
) -> None:
    taken = pick([estimate(*each) for each in found])
    assert (taken.best.label, taken.gains, taken.source) == (fastest, gains, source)
