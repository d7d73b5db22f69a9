"""The work that a check does: no more for each op of a large Program than for those of a small one.

`benchmarks/passes.py --check` takes the time, and holds it against the bars.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.passes import lacking_a_notify, layers
from tests.support.line_count import per_op

from interlace.ir import Program
from interlace.verify import Report, check

RANKS = 8
Check = Callable[[Program], Report]


def a_set(program: Program) -> Report:
    return check([program.instantiate(rank) for rank in range(RANKS)])


def in_full(program: Program) -> Report:
    return check(program, fold=False)


@pytest.mark.parametrize(
    ("checked", "most"),
    [(check, 240), (a_set, 420), (in_full, 660)],
    ids=["spmd", "set of 8", "every rank"],
)
def test_a_large_program_takes_no_more_for_each_op(checked: Check, most: int) -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = layers(count)
        report = checked(program)
        assert report.sound
        assert report.num_ops == RANKS * len(program.ops)
        return report.num_ops, lambda: checked(program)

    assert per_op(work, 2) < most


def test_nor_does_a_fault_deep_in_it() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = lacking_a_notify(layers(count))
        assert check(program).kinds() == {"deadlock"}
        return RANKS * len(program.ops), lambda: check(program)

    assert per_op(work, 2) < 200
