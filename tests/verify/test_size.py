"""Large inputs: the work grows with the ranks and the ops, and not with their squares."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.support.line_count import per_op

from interlace.errors import ProgramError
from interlace.ir import parse
from interlace.verify import check
from interlace.verify.graph import HappensBefore

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


@pytest.mark.timeout(60)
def test_one_collective_on_three_thousand_ranks() -> None:
    text = "def f(tp: Team[3000], x: f32[4], y: out[f32[4]]):\n"
    assert check(parse(text + '    main: all_reduce(x, y, reduce="sum", team=tp)\n')).sound


@pytest.mark.timeout(60)
def test_four_hundred_streams_that_race() -> None:
    body = "".join(f"    s{i}: copy(x, y)\n" for i in range(400))
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


def drawn(rng: random.Random, num_chains: int) -> HappensBefore:
    """A graph of ops, and of collectives in which some chains meet."""
    graph, tails = HappensBefore(num_chains), [-1] * num_chains

    def op(chain: int, *others: int) -> int:
        node, tail = graph.add(), tails[chain]
        graph.preds[node] = [*([tail] if tail >= 0 else []), *others]
        graph.chain[node], graph.pos[node] = chain, graph.pos[tail] + 1 if tail >= 0 else 1
        tails[chain] = node
        return node

    for _ in range(rng.randint(5, 25)):
        count = len(graph.preds)
        if rng.random() < 0.7:
            others = rng.sample(range(count), min(count, rng.choice((0, 0, 1, 2))))
            op(rng.randrange(num_chains), *others)
            continue
        chains = rng.sample(range(num_chains), rng.randint(1, num_chains))
        begins = [op(chain) for chain in chains]
        meeting = graph.add()
        graph.preds[meeting] = rng.sample(begins, rng.randint(1, len(begins)))
        for chain, begin in zip(chains, begins, strict=True):
            end = op(chain, meeting)
            graph.begins[end] = begin
    return graph


def test_clocks_tell_what_the_edges_do(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        graph = drawn(rng, rng.randint(2, 6))
        graph.solve()
        earlier: list[set[int]] = []  # nodes are numbered in an order in which they can finish
        for before in graph.preds:
            earlier.append(set(before).union(*(earlier[other] for other in before)))
        placed = [node for node, chain in enumerate(graph.chain) if chain >= 0]
        for one in placed:
            for other in placed:
                begin = graph.begins.get(other, other)
                assert graph.before(one, other) == (one in earlier[begin])


def test_ops_that_learn_nothing_of_others_share_a_clock() -> None:
    """One on its stream, then a collective, then two more; the other stream's end never comes."""
    graph = HappensBefore(2)
    first, begin, end, after, last, meeting, lost = (graph.add() for _ in range(7))
    for at, node in enumerate((first, begin, end, after, last)):
        graph.chain[node], graph.pos[node] = 0, at + 1
        graph.preds[node] = [node - 1] if at else []
    graph.preds[end].append(meeting)
    graph.preds[meeting] = [begin]
    graph.chain[lost], graph.pos[lost], graph.never[lost] = 1, 1, "nothing"
    graph.solve()
    clocks = graph.clocks
    assert clocks[begin] is clocks[first]
    assert clocks[end] is not clocks[begin]
    assert clocks[end] is clocks[after] is clocks[last] is clocks[meeting]
    assert clocks[lost] is None
    assert not graph.before(first, lost)
    assert not graph.before(lost, last)
