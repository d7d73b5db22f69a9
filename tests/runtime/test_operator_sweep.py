"""Operators of torch with the samples of `op_db`, through texts that declare nothing."""

from __future__ import annotations

import pytest
from tests.support.operator_sweep import sweep

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


@pytest.mark.slow  # what it found is in test_operator_facts.py, a case for each kind
@pytest.mark.timeout(7200)
def test_operators_run_as_in_eager() -> None:
    tally = sweep()
    assert not tally.otherwise
    assert len(tally.by_op) >= 1200
    assert len(tally.running) >= LEAST * len(tally.by_op)
    unknown = [r for r in tally.refused if not any(known in r for known in REASONS)]
    assert not unknown
