"""Dependencies of a list order: bytes, lifetimes, signals, and what may not be permuted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import pytest
from benchmarks.passes import chain
from tests.support.line_count import per_op

from interlace.errors import ProgramError
from interlace.ir import Alloc, Buffer, Copy, DType, Program, RankIndex, Table, Team, View, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.passes.dependencies import Before, dependencies
from interlace.verify import check


def before(text: str, listed: bool = False) -> Before:
    """The dependencies of a Program, written from its first op on."""
    head = "def p(tp: Team[3], x: f32[2, 4], y: f32[6, 4], z: f32[6, 4]):\n"
    return dependencies(parse(head + text), listed)


def test_programs_of_other_teams_or_tables_have_other_answers() -> None:
    """Answers are kept from Program to Program: of equal views of equal buffers, but for the same
    teams and tables alone."""

    def follows(size: int, *rows: int) -> bool:
        mine = View("x").chunk(0, "rows") if rows else View("x").chunk(RankIndex("tp"), 4)
        program = Program(
            teams=(Team("tp", size),),
            tables=(Table("rows", "tp", rows),) if rows else (),
            params=(Buffer("x", DType.f32, (8,)), Buffer("z", DType.f32, (4,))),
            ops=tuple(Copy(src=View("z"), dst=to) for to in (View("x").slice(0, 4, 8), mine)),
        )
        return dependencies(program)[1] == (0,)

    for _ in range(2):
        assert not follows(2), "quarters 0 and 1"
        assert follows(4)
        assert not follows(2, 4, 4)
        assert follows(2, 6, 2)


def test_another_distance_has_another_answer() -> None:
    """A put of the rows of the next rank is read by that one alone: for the one after, no signal
    orders anything."""

    def read(distance: int) -> Before:
        return before(f"""
    full = alloc(f32[6, 4], symmetric=tp)
    main: put(x, full[tp.rank], peer=tp.rank + 1)
    main: notify(here, to=tp.rank + 1)
    main: expect(here, tp.rank - 1)
    main: copy(full[tp.rank - {distance}], y[0:2])
""")

    for _ in range(2):
        assert read(1)[4] == (0, 3)
        assert read(2)[4] == (0,)


def test_a_view_that_cannot_be_is_told_by_the_name_of_its_buffer() -> None:
    program = Program(
        teams=(tp := Team("tp", 2),),
        params=(Buffer("weights", DType.f32, (9,)), Buffer("z", DType.f32, (4,))),
        ops=(Copy(src=View("weights").chunk(tp.rank, 2), dst=View("z")),),
    )
    with pytest.raises(ProgramError, match="of a view of 'weights'"):
        dependencies(program)


GET = """
    full = alloc(f32[6, 4], symmetric=tp)
    main: copy(x, full[tp.rank])
    main: notify(ready, to=tp.others)
    main: expect(ready, tp.rank + 1)
    main: get(full[tp.rank + 1], peer=tp.rank + 1)
    main: expect(ready, tp.rank + 2)
    main: get(full[tp.rank + 2], peer=tp.rank + 2)
    main: free(full)
"""


def test_a_get_follows_its_own_signal_alone() -> None:
    edges = before(GET)
    assert edges[1] == (0,)
    assert edges[2] == (1,), "the notify publishes the copy"
    assert edges[3] == edges[5] == (), "no stream waits for a notify of its own rank"
    assert edges[4] == (0, 3), "the rows of another rank wait for that rank's signal"
    assert edges[6] == (0, 5)
    assert edges[7] == (0, 1, 4, 6)
    edges = before(GET, listed=True)
    assert edges[3] == edges[5] == (2,), "but each is listed after the notify of its value"


def test_a_put_is_published_to_its_reader_alone() -> None:
    edges = before("""
    full = alloc(f32[6, 4], symmetric=tp)
    main: copy(x, full[tp.rank])
    main: put(x, full[tp.rank], peer=tp.rank + 1)
    main: notify(here, to=tp.rank + 1)
    main: put(x, full[tp.rank], peer=tp.rank + 2)
    main: notify(here, to=tp.rank + 2)
    main: expect(here, tp.rank - 1)
    main: copy(full[tp.rank - 1], y[0:2])
    main: expect(here, tp.rank - 2)
    main: copy(full[tp.rank - 2], y[2:4])
    main: copy(full[tp.rank], y[4:6])
""")
    assert edges[3] == (2,)
    assert edges[5] == (4,), "not after the other put, nor the copy of the own rows"
    assert edges[7] == (0, 6)
    assert edges[9] == (0, 8)
    assert edges[10] == (0, 1), "the own rows wait for no signal"


def test_without_a_signal_what_meets_peers_stays() -> None:
    edges = before("""
    full = alloc(f32[6, 4], symmetric=tp)
    main: copy(y, full)
    main: barrier(team=tp)
    main: put(x, full[tp.rank], peer=tp.rank + 1)
    main: barrier(team=tp)
    main: copy(full, z)
""")
    assert 1 in edges[2]
    assert 2 in edges[3]
    assert 3 in edges[4]
    assert 4 in edges[5]


def test_signals_of_another_team_order_what_is_in_slots_too() -> None:
    program = parse(
        "def p(tp: Team[2], w: Team[[0, 1]], x: f32[4], y: f32[4]):\n"
        "    s = alloc(f32[4], symmetric=tp)\n"
        "    main: copy(x, s)\n"
        "    main: notify(here, to=w.others)\n"
        "    main: expect(here, w.rank + 1)\n"
        "    main: get(s, y, peer=tp.rank + 1)\n"
        "    main: notify(got, to=w.others)\n"
        "    main: expect(got, w.rank + 1)\n"
        "    main: copy(y, s)\n"
        "    main: free(s)\n"
    )
    edges = dependencies(program, listed=False)
    for earlier, later in ((1, 2), (3, 4), (4, 5), (6, 7)):
        assert earlier in edges[later]
    lowered = lower(program, Options(overlap=True))
    assert check(program).sound
    check(lowered).raise_if_unsound()


def test_collectives_of_another_team_stay_out_of_what_the_own_team_orders() -> None:
    program = parse(
        "def p(tp: Team[2], dp: Team[2], x: f32[4], y: f32[4], z: f32[4]):\n"
        "    s = alloc(f32[4], symmetric=tp)\n"
        "    main: copy(x, s)\n"
        "    main: all_reduce(z, z, reduce='sum', team=dp)\n"
        "    main: barrier(team=tp)\n"
        "    main: get(s, y, peer=tp.rank + 1)\n"
    )
    edges = dependencies(program, listed=False)
    assert edges[2] == ()
    assert 1 in edges[3]
    assert 2 not in edges[3]
    assert 3 in edges[4]


def test_empty_boxes_count_as_whole_unless_a_table_makes_them_empty() -> None:
    edges = before("    main: copy(y[0:2], z[0:2])\n    main: copy(z[4:4], y[4:4])\n")
    assert edges[1] == (0,), "ranks that were traced apart must agree"
    program = parse(
        "def p(tp: Team[2], x: f32[rows[tp.rank], 4], y: f32[3, 4]):\n"
        "    rows = table(tp, 3, 0)\n"
        "    main: copy(x, y.chunk(tp.rank, rows))\n"
        "    main: copy(y.chunk(tp.rank + 1, rows), y.chunk(tp.rank + 1, rows))\n"
    )
    assert dependencies(program)[1] == ()


def test_as_strided_counts_as_the_whole_buffer() -> None:
    strided = "y.as_strided((2, 4), (4, 1), 16)"
    for one, other in (("y[0:2], x", f"x, {strided}"), ("x, y[0:2]", f"{strided}, z[0:2]")):
        assert before(f"    main: copy({one})\n    main: copy({other})\n")[1] == (0,)


@pytest.mark.parametrize("frozen", [False, True])
def test_lists_that_are_not_ours_to_permute(frozen: bool) -> None:
    """Of a set of Programs, whose ranks a team joins."""
    team = "pipe: Team[[0, 2], [1, 3]], " if frozen else ""
    ranks = "ranks(0, 1)\n    " if frozen else ""
    program = parse(
        f"def p(tp: Team[2], {team}x: f32[4], y: f32[4], z: f32[4]):\n"
        f"    {ranks}main: all_reduce(x, x, reduce='sum', team=tp)\n"
        "    main: all_reduce(y, y, reduce='sum', team=tp)\n"
    )
    assert dependencies(program)[1] == ((0,) if frozen else ())
    assert dependencies(program, listed=False)[1] == ()


def test_a_long_program_takes_no_more_for_each_op() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = chain(count)
        return len(program.ops), lambda: dependencies(program)

    assert per_op(work, 400) < 300


def test_who_takes_bytes_over_waits_for_who_held_them() -> None:
    head = '    a = alloc(f32[4], storage="s")\n    b = alloc(f32[2], storage="s", offset={})\n'
    uses = """
    main: copy(y.select(0, 0), a)
    comm: copy(a, z.select(0, 0))
    main: copy(y.select(0, 1)[0:2], b)
    main: copy(b, z.select(0, 1)[0:2])
    side: copy(a, z.select(0, 2))
"""
    over = before(head.format(8) + uses)
    assert over[4] == (2, 3), "after the write and the read of what was there"
    assert over[5] == (4,), "the write has taken the bytes over"
    assert over[6] == (2, 4), "the bytes change hands again"
    beside = before(head.format(16) + uses)
    assert beside[4] == ()
    assert beside[6] == (2,)
    listed = before(head.format(16) + uses, listed=True)
    assert listed[4] == (1,), "no stream waits for its own memory, but it is listed first"


def by_parts(layers: int) -> Program:
    """Equal layers whose buffers have the same bytes, written in parts that each rank has others
    of: no single write covers what was there."""
    lines = ["def layers(tp: Team[2], x: f32[2, 4], y: f32[4, 4]):"]
    for i in range(layers):
        lines += [
            f'    b{i} = alloc(f32[4, 4], storage="s", offset={16 * (i % 2)})',
            f"    main: copy(x, b{i}[tp.rank])",
            f"    comm: copy(x, b{i}[tp.rank + 1])",
            f"    main: copy(b{i}, y)",
        ]
    return parse("\n".join(lines))


def test_equal_layers_in_shared_bytes_take_no_more_for_each_op() -> None:
    def work(layers: int) -> tuple[int, Callable[[], object]]:
        program = by_parts(layers)
        return len(program.ops), lambda: dependencies(program)

    assert per_op(work, 30) < 300


def test_equal_layers_in_shared_bytes_have_no_more_edges_each() -> None:
    one, other = (sum(map(len, dependencies(by_parts(count)))) for count in (20, 40))
    assert other < 2.2 * one


def reached(edges: Sequence[Iterable[int]]) -> list[set[int]]:
    """All ops that come before each, by chains of edges."""
    found: list[set[int]] = []
    for earlier in edges:
        found.append(set().union(*({i} | found[i] for i in earlier)))
    return found


@pytest.mark.parametrize("draw", range(40))
def test_chains_order_all_that_shares_bytes(draw: int, seed: int) -> None:
    """Edges that others imply are left out, and no others: the chains are those of the edges
    between all pairs of accesses."""
    rng = random.Random(f"{seed} {draw}")
    starts = {f"b{i}": rng.randrange(5) for i in range(4)}
    lines = [
        f'    b{i} = alloc(f32[4, 4], storage="s", offset={16 * starts[f"b{i}"]})' for i in range(4)
    ]
    touched: list[tuple[str, bool, int, int]] = []
    for i in range(16):
        name, write = rng.choice([*starts]), rng.random() < 0.7
        low, high = sorted(rng.sample(range(5), 2))
        part, rows = f"[{low}:{high}]", high - low
        if rng.random() < 0.4:
            part, rows, low, high = rng.choice(("[tp.rank]", "[tp.rank + 1]")), 2, 0, 4
        lines.append(f"    z{i} = alloc(f32[{rows}, 4])")
        given, to = f"{name}{part}", f"z{i}"
        ends = f"x[0:{rows}], {given}" if write else f"{given}, {to}"
        lines.append(f"    {rng.choice(('main', 'comm'))}: copy({ends})")
        touched.append((name, write, starts[name] + low, starts[name] + high))
    program = parse("\n".join(["def p(tp: Team[2], x: f32[4, 4]):", *lines]))
    at = [i for i, op in enumerate(program.ops) if isinstance(op, Copy)]
    apart = tuple(
        dataclasses.replace(op, buffer=dataclasses.replace(op.buffer, storage=None, offset=0))
        if isinstance(op, Alloc)
        else op
        for op in program.ops
    )
    edges = [{*earlier} for earlier in dependencies(program.replace(ops=apart), listed=False)]
    pairs = combinations(zip(at, touched, strict=True), 2)
    for (one, (name, writes, start, stop)), (two, (other, rewrites, low, high)) in pairs:
        if name != other and (writes or rewrites) and start < high and low < stop:
            edges[two].add(one)
    assert reached(dependencies(program, listed=False)) == reached(edges), str(program)
