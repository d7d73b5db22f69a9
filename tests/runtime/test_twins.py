"""Two Executors of one Program are two: ranks that call them in different order are told so."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from tests.runtime.programs import TEXTS, Outcome, attempt, inputs_of, prepared
from tests.support.pool import Pool


def swapped(kind: str, seed: int) -> Outcome:
    """Rank 0 calls the first of two equal Executors, the other ranks the second."""
    rank = dist.get_rank()
    with prepared(kind) as first, prepared(kind) as second:
        inputs = inputs_of(first.program, rank, seed)
        found = attempt(lambda: (first if rank == 0 else second).run(inputs))
        dist.barrier()
        return found


@pytest.mark.parametrize("kind", TEXTS)
def test_equal_programs_called_in_different_order(pool: Pool, kind: str, seed: int) -> None:
    for error, text, seconds in pool(2).run(swapped, kind, seed, replace=True):
        assert error == "AgreementError", text
        assert "different order" in text
        assert seconds < 10
