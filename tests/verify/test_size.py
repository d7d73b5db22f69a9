"""Large inputs: the work grows with the ranks and the ops, and not with their squares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.line_count import per_op

from interlace.ir import parse
from interlace.verify import check

ROUND = (
    "    main: record(a{0})\n    comm: wait(a{0})\n"
    '    comm: all_reduce(x, y, reduce="sum", team=tp)\n'
    "    comm: record(b{0})\n    main: wait(b{0})\n"
)


def of_ranks(ranks: int) -> str:
    rounds = "".join(ROUND.format(i) for i in range(4))
    return f"def f(tp: Team[{ranks}], x: f32[4], y: out[f32[4]]):\n{rounds}"


def test_many_ranks_take_no_more_for_each() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = parse(of_ranks(count))
        assert check(program).sound
        return count * len(program.ops), lambda: check(program)

    assert per_op(work, 48) < 400


@pytest.mark.timeout(60)
def test_one_collective_on_ten_thousand_ranks() -> None:
    text = "def f(tp: Team[10000], x: f32[4], y: out[f32[4]]):\n"
    assert check(parse(text + '    main: all_reduce(x, y, reduce="sum", team=tp)\n')).sound


@pytest.mark.timeout(60)
def test_two_thousand_streams_that_race() -> None:
    body = "".join(f"    s{i}: copy(x, y)\n" for i in range(2000))
    report = check(parse(f"def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n{body}"))
    assert report.kinds() == {"race"}
    assert report.num_left_out > 5000
