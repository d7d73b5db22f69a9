"""Large inputs: the work grows with the ranks and the ops, and not with their squares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.line_count import per_op

from interlace.errors import ProgramError
from interlace.ir import parse
from interlace.verify import check
from interlace.verify.happens_before.graph import HappensBefore

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


GATHER = """def f(tp: Team[{0}], x: f32[4], y: out[f32[{1}]]):
    main: all_gather(x, y, team=tp)
    main: reduce_scatter(y, x, reduce="sum", team=tp)
"""


def test_what_grows_with_the_team_is_summed_up_once() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = parse(GATHER.format(count, 4 * count))
        assert check(program).sound
        return count * len(program.ops), lambda: check(program)

    assert per_op(work, 32) < 800


TAKE = """
    s{0} = alloc(f32[4], symmetric=tp, storage="s")
    main: copy(x, s{0})
    main: barrier(team=tp)
    main: get(s{0}, y, peer=tp.rank + 1)
    main: free(s{0})
"""


def test_a_slot_that_is_taken_again_awaits_all_ranks_once() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        head = f"def f(tp: Team[{count}], x: f32[4], y: out[f32[4]]):"
        program = parse(head + "".join(TAKE.format(i) for i in range(6)))
        assert check(program).sound
        return count * len(program.ops), lambda: check(program)

    assert per_op(work, 48) < 500


LAYER = (
    '    main: all_reduce(x, y, reduce="sum", team=tp)\n    main: record(a{0})\n'
    '    comm: wait(a{0})\n    comm: all_reduce(y, z, reduce="sum", team=dp)\n'
    "    comm: record(b{0})\n    main: wait(b{0})\n"
)


def test_what_ranks_of_a_mesh_know_of_all_is_put_together_once_for_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    real = HappensBefore._new_base
    monkeypatch.setattr(HappensBefore, "_new_base", lambda *args: made.append(1) or real(*args))
    head = "dp: Team[16], tp: Team[8], x: f32[4], y: out[f32[4]], z: out[f32[4]]"
    body = "".join(LAYER.format(i) for i in range(6))
    assert check(parse(f"def f({head}):\n{body}")).sound
    assert 0 < sum(made) <= 2 * 6 * (16 + 8)  # by groups, and not by ranks: 128


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
    assert "10000 faults or more (" in str(report).splitlines()[0]


def test_signals_between_too_many_pairs_are_refused_at_once() -> None:
    text = """
def f(tp: Team[60000], x: f32[4], y: out[f32[4]]):
    main: copy(x, y)
    main: notify(done, to=tp.others)
    main: expect(done, tp.others)
"""
    with pytest.raises(ProgramError, match="check the schedule on fewer ranks"):
        check(parse(text.strip()))
