"""Schedules of the passes with one fault each: what is unsound is flagged, what is sound is so."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.verify.mutants import (
    STRATEGIES,
    Sweep,
    schedule,
    schedules,
)

WORLDS = (2, 3, 4, 5, 6, 7, 8)
SORTS = ("drop", "swap", "early free", "stream", "peer", "epoch", "slice", "dtype", "count", "team")


def test_every_strategy_has_its_schedules() -> None:
    found = schedules((2, 4))
    assert {way for _, way, _ in found} == {*STRATEGIES}
    assert {kind for kind, _, _ in found} == {"gather", "scatter", "reduce", "dispatch", "combine"}


@pytest.mark.timeout(120)
def test_some_schedules_with_one_fault(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    sweep, draw = Sweep(seed), random.Random(seed)
    cases = [
        (kind, way, draw.choice(WORLDS)) for kind in ("gather", "reduce") for way in STRATEGIES
    ]
    for one in [*cases, ("dispatch", "ring", 3), ("combine", "peer-put", 4)]:
        if schedule(*one) is not None:
            sweep.visit(one, 5)
    record_property("fuzz", str(sweep))
    assert not sweep.wrong, "\n\n".join(sweep.wrong)
    assert sweep.of("flagged") >= 25, sweep
    assert sweep.of("equal") >= 5, sweep
