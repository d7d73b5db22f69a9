"""Operators of torch with the samples of `op_db`, through texts that declare nothing."""

from __future__ import annotations

import pytest
from tests.support.operator_sweep import Tally, sweep

LEAST = 0.9
"""The part of all overloads that run."""
REASONS = (
    "changes an argument's shape, strides or memory",
    "unsound: uninitialized",
    "unsound: in-place",
    "a tensor that is not strided",
    "no element type for",
)
"""Why an operator may be refused."""


pytest.importorskip("expecttest", reason="torch.testing imports it: in the extra dev")


def assert_as_eager(tally: Tally, overloads: int) -> None:
    print(tally)
    assert not tally.otherwise
    assert len(tally.by_op) >= overloads
    assert len(tally.running) >= LEAST * len(tally.by_op)
    unknown = [r for r in tally.refused if not any(known in r for known in REASONS)]
    assert not unknown


@pytest.mark.timeout(900)
def test_some_operators_run_as_in_eager() -> None:
    assert_as_eager(sweep(sample=30, seed=51), 100)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_operators_run_as_in_eager() -> None:
    assert_as_eager(sweep(), 1200)
