"""The oracle against semantics.md: each rule, what it orders and what it does not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.fuzzing.oracle.machine import (
    OracleMachine,
    OracleMemory,
    OracleVerdict,
    conflicts,
    explore,
)
from tests.fuzzing.oracle.script import Clause, Script
from tests.fuzzing.sets import random_set

from interlace.ir import Program, parse, parse_set, print_set


def spmd(*lines: str, runs: int = 1, world: int = 2, params: str = "") -> OracleVerdict:
    """The oracle's verdict where all ranks do the same; x is read, y (as large) is written."""
    head = f"def f(tp: Team[{world}], x: f32[4], y: out[f32[4]]{params}):"
    return explore(parse("\n".join((head, *(f"    {line}" for line in lines)))), runs=runs)


def each(*ranks: str, runs: int = 1, declared: str = "") -> OracleVerdict:
    """The oracle's verdict where each rank has its own lines (apart by `;`), with a slot `s`."""
    world = list(range(len(ranks)))
    texts: list[str] = []
    for rank, text in enumerate(ranks):
        head = f"def rank_{rank}(tp: Team[{world}], x: f32[4], y: out[f32[4]]):"
        lines = [f"ranks({rank})", *filter(None, (declared,)), "s = alloc(f32[4], symmetric=tp)"]
        lines += ["a = alloc(f32[4])", "b = alloc(f32[4])", "wide = alloc(f32[12])"]
        lines += [*filter(None, map(str.strip, text.split(";"))), "main: free(s)"]
        texts.append("\n".join((head, *(f"    {line}" for line in lines))))
    return explore(parse_set("\n\n\n".join(texts)), runs=runs)


# A collective on each rank by itself

ALL = ("all_gather(x, wide, team=tp)", 'all_reduce(x, a, reduce="sum", team=tp)')
ALL += ('reduce_scatter(wide, a, reduce="sum", team=tp)', "barrier(team=tp)")
ALL += ("all_to_all(wide, wide, team=tp)",)
FROM_ROOT = ("broadcast(x, a, root=1, team=tp)", "scatter(wide, a, root=1, team=tp)")
TO_ROOT = ("gather(x, wide, root=1, team=tp)", 'reduce(x, a, reduce="sum", root=1, team=tp)')


@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("collective", ALL + FROM_ROOT + TO_ROOT)
def test_what_precedes_it_on_a_contributor_has_happened_on_who_needs_it(
    collective: str, before: int, after: int
) -> None:
    """Rank `before` puts into the slot of rank `after` ahead of it, which reads it then."""
    if before == after:
        return
    texts = [f"main: {collective}"] * 3
    texts[before] = f"main: put(x, s, peer={after}, team=tp); main: {collective}"
    texts[after] = f"main: {collective}; main: copy(s, y)"
    ordered = collective in ALL or (before if collective in FROM_ROOT else after) == 1
    assert each(*texts).race != ordered


@pytest.mark.parametrize("collective", ALL + FROM_ROOT + TO_ROOT)
def test_what_follows_it_on_one_rank_is_before_nothing_on_another(collective: str) -> None:
    for k in range(3):
        put = f"main: {collective}; main: put(x, s, peer={(k + 1) % 3}, team=tp)"
        read = f"main: copy(s, y); main: {collective}"
        texts = [f"main: {collective}"] * 3
        texts[k], texts[(k + 1) % 3] = put, read
        contributes = collective not in FROM_ROOT or (k + 1) % 3 == 1
        needs = collective not in TO_ROOT or k == 1
        assert each(*texts).race == (not (contributes and needs))


def test_the_end_on_a_peer_says_nothing_of_mine() -> None:
    begin = ("a = alloc(f32[4])", 'comm: all_reduce(x, a, reduce="sum", team=tp)')
    signal = ("comm: notify(done, to=tp.others)", "main: expect(done, tp.rank + 1)")
    event = ("comm: record(e)", "main: wait(e)")
    assert spmd(*begin, *signal, "main: copy(a, y)").race
    assert not spmd(*begin, *event, "main: copy(a, y)").race
    assert spmd(*begin, "main: copy(a, y)").race


def test_my_end_says_nothing_of_a_peers_destination() -> None:
    begin = ("full = alloc(f32[8], symmetric=tp)", "main: all_gather(x, full, team=tp)")
    get = ("main: get(full[tp.rank + 1], y, peer=tp.rank + 1)", "main: free(full)")
    signal = ("main: notify(here, to=tp.others)", "main: expect(here, tp.rank + 1)")
    assert spmd(*begin, *get).race
    assert not spmd(*begin, "main: barrier(team=tp)", *get).race
    assert not spmd(*begin, *signal, *get).race
    assert spmd(*begin, "main: broadcast(x, y, root=0, team=tp)", *get).race
    mine = "main: get(full[tp.rank], y, peer=tp.rank)"
    assert not spmd(*begin, mine, "main: free(full)").race


def test_my_end_says_nothing_of_a_peers_source() -> None:
    begin = "main: copy(x, s); main: all_gather(s, wide[0:8], team=tp)"
    put = "main: put(x, s, peer=1, team=tp)"
    assert each(f"{begin}; {put}", begin).race
    assert not each(f"{begin}; main: copy(x, s)", begin).race


def test_only_the_root_uses_what_is_of_the_root() -> None:
    """Others may be given a source or a destination as well, and do nothing with it."""
    for collective, other in (
        ("broadcast(b, a, root=0, team=tp)", "copy(x, b)"),
        ("scatter(wide, a, root=0, team=tp)", "copy(x, wide[0:4])"),
        ("gather(x, wide, root=0, team=tp)", "copy(x, wide[0:4])"),
        ('reduce(b, a, reduce="sum", root=0, team=tp)', "copy(x, a)"),
    ):
        both = f"main: {collective}; comm: {other}"
        assert not each(f"main: {collective}", both).race, collective
        assert each(both, f"main: {collective}").race, collective


def test_a_member_without_elements_contributes_or_needs_nothing() -> None:
    table = "rows = table(tp, 4, 0)"
    for collective, rank in (
        ("all_gather({part}, a, splits=rows, team=tp)", 1),
        ("gather({part}, a, root=0, splits=rows, team=tp)", 1),
        ("scatter(a, {part}, root=0, splits=rows, team=tp)", 0),
        ('reduce_scatter(a, {part}, reduce="sum", splits=rows, team=tp)', 0),
    ):
        mine = "main: " + collective.format(part="b")
        empty = "main: " + collective.format(part="b[0:0]")
        put, read = f"main: put(x, s, peer={1 - rank}, team=tp)", "main: copy(s, y)"
        texts = {rank: [put], 1 - rank: [read]}
        texts[0].insert(0 if rank else 1, mine)
        texts[1].insert(1 if rank else 0, empty)
        assert each(*map(";".join, (texts[0], texts[1])), declared=table).race, collective
        texts[1][texts[1].index(empty)] = mine
        assert not each(*map(";".join, (texts[0], texts[1])), declared=table).race, collective


def test_the_next_of_one_queue_begins_at_the_end_of_the_one_before() -> None:
    first = 'comm: all_reduce(x, a, reduce="sum", team=tp)'
    alloc, read = "a = alloc(f32[4])", "main: copy(a, y)"
    assert not spmd(alloc, first, "main: barrier(team=tp)", read).race
    assert spmd(alloc, first, 'main: barrier(team=tp, backend="gloo")', read).race
    assert spmd(alloc, "main: barrier(team=tp)", first, read).race


def test_any_member_may_wait_for_all_of_them() -> None:
    here, there = "main: notify(s1, to=1, team=tp)", "main: expect(s1, 0, team=tp)"
    root_first = "main: broadcast(x, a, root=0, team=tp)"
    verdict = each(f"{root_first}; {here}", f"{there}; {root_first}")
    assert verdict.deadlock
    assert not verdict.race
    assert not each(f"{here}; {root_first}", f"{there}; {root_first}").deadlock
    assert each("main: barrier(team=tp)", "main: copy(x, y)").deadlock
    twice = "main: barrier(team=tp); comm: broadcast(x, a, root=0, team=tp)"
    assert not each(twice, twice).deadlock


# Messages


def test_a_receive_ends_after_the_send_began_and_nothing_more() -> None:
    send, receive = "main: send(x, peer=1, team=tp)", "main: recv(a, peer=0, team=tp)"
    put, read = "main: put(x, s, peer={}, team=tp)", "main: copy(s, y)"
    assert not each(f"{put.format(1)}; {send}", f"{receive}; {read}").race
    assert each(f"{send}; {read}", f"{put.format(0)}; {receive}").race
    assert each(f"{send}; {put.format(1)}", f"{receive}; {read}").race


def test_the_end_of_a_send_gives_its_source_back() -> None:
    receive = "main: recv(b, peer=0, team=tp)"
    assert not each("main: send(a, peer=1, team=tp); main: copy(x, a)", receive).race
    assert each("main: send(a, peer=1, team=tp); comm: copy(x, a)", receive).race
    assert each("main: copy(x, y)", f"{receive}; comm: copy(x, b)").race


def test_the_first_receive_is_of_the_first_send() -> None:
    put, send = "main: put(x, s, peer=1, team=tp)", "main: send(x, peer=1, team=tp)"
    receive, read = "main: recv(a, peer=0, team=tp)", "main: copy(s, y)"
    assert each(f"{send}; {put}; {send}", f"{receive}; {read}; {receive}").race
    assert not each(f"{send}; {put}; {send}", f"{receive}; {receive}; {read}").race
    other = 'main: send(x, peer=1, team=tp, backend="gloo")'
    assert each(f"{other}; {put}; {send}", f"{receive}; {read}").deadlock


def test_a_send_may_wait_for_its_receive() -> None:
    send, receive = "{}: send(x, peer=tp.rank + 1)", "{}: recv(y, peer=tp.rank + 1)"
    assert spmd(send.format("main"), receive.format("main")).deadlock
    assert not spmd(send.format("main"), receive.format("comm")).deadlock
    assert not spmd("main: group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))").deadlock
    assert each("main: send(x, peer=1, team=tp)", "main: copy(x, y)").deadlock
    assert each("main: copy(x, y)", "main: recv(y, peer=0, team=tp)").deadlock
    ring = ("main: send(x, peer=tp.rank + 1)", "main: recv(y, peer=tp.rank - 1)")
    assert spmd(*ring, world=3).deadlock


def test_a_message_to_oneself() -> None:
    send, receive = "main: send(x, peer=tp.rank)", "{}: recv(y, peer=tp.rank)"
    assert spmd(send, receive.format("main")).deadlock
    two = spmd(send, receive.format("comm"))
    assert not two.deadlock
    assert not two.race
    assert not spmd("main: group(send(x, peer=tp.rank), recv(y, peer=tp.rank))").deadlock
    assert spmd("main: group(send(y, peer=tp.rank), recv(y, peer=tp.rank))").race


def test_a_group_is_done_when_all_in_it_are() -> None:
    group = "comm: group(send(x, peer=tp.rank + 1), recv(a, peer=tp.rank - 1))"
    lines = ("a = alloc(f32[4])", group, "comm: record(e)", "main: wait(e)", "main: copy(a, y)")
    assert not spmd(*lines).race
    assert spmd(*lines[:2], lines[4]).race
    assert spmd("a = alloc(f32[4])", "main: copy(x, y)", group.replace("(x", "(a")).race
    receives = ", ".join(["recv(y, peer=tp.rank - 1)", "send(x, peer=tp.rank + 1)"] * 2)
    assert spmd(f"main: group({receives})").race
    both = "main: group(send(x, peer=1, team=tp), recv(a, peer=1, team=tp))"
    here, there = "main: notify(go, to=1, team=tp)", "main: expect(go, 0, team=tp)"
    answers = "main: send(x, peer=0, team=tp); main: recv(a, peer=0, team=tp)"
    assert not each(both, answers).deadlock
    assert each(f"{both}; {here}", f"{there}; {answers}").deadlock


# Streams, events, hosts


def test_streams_and_events() -> None:
    lines = ("a = alloc(f32[4])", "comm: copy(x, a)", "comm: record(e)", "main: wait(e)")
    assert not spmd(*lines, "main: copy(a, y)").race
    assert spmd(*lines[:3], "main: copy(a, y)").race
    assert spmd(*lines, "comm: copy(x, a)", "comm: record(e)", "main: copy(a, y)").race
    again = (lines[0], lines[2], lines[3], *lines[1:3], "main: copy(a, y)")
    assert spmd(*again).race, "the wait means the first record"
    assert not spmd("main: copy(x, y)", "main: copy(x, y)", runs=2).race


def test_a_host_waits_and_issues_nothing_more() -> None:
    lines = ("a = alloc(f32[4])", "comm: copy(x, a)", "comm: host_sync()", "main: copy(a, y)")
    assert not spmd(*lines).race
    assert spmd(lines[0], lines[1], "main: host_sync()", lines[3]).race
    assert spmd(lines[0], lines[1], lines[3], lines[2]).race


# Signals


def test_signals_order_what_stands_before_them() -> None:
    put, read = "main: put(x, s, peer=1, team=tp)", "main: copy(s, y)"
    raised, awaited = "main: notify(go, to=1, team=tp, value={})", "main: expect(go, 0, team=tp{})"
    two = awaited.format(", value=2")
    assert not each(f"{put}; {raised.format(2)}", f"{awaited.format('')}; {read}").race
    assert not each(f"{put}; {raised.format(2)}", f"{two}; {read}").race
    assert each(
        f"{raised.format(1)}; {put}; {raised.format(2)}", f"{awaited.format('')}; {read}"
    ).race
    assert not each(f"{raised.format(1)}; {put}; {raised.format(2)}", f"{two}; {read}").race
    assert each(raised.format(1), two).deadlock
    assert each(put, f"main: expect(go, 1, team=tp); {read}").deadlock, "another writer's"


def test_one_of_two_signals_is_enough() -> None:
    """Then neither of them is before the expect in every order."""
    put, read = "main: put(x, s, peer=1, team=tp)", "main: copy(s, y)"
    first, second = (f"notify(go, to=1, team=tp, value={value})" for value in (1, 2))
    assert each(
        f"comm: {first}; {put}; main: {second}", f"main: expect(go, 0, team=tp); {read}"
    ).race


def test_signals_count_from_the_start_of_the_run() -> None:
    go = ("main: notify(go, to=tp.others)", "main: expect(go, tp.others)")
    put = "main: put(x, z, peer=tp.rank + 1)"
    came = ("main: notify(came, to=tp.others)", "main: expect(came, tp.others)")
    registered = ", z: out[f32[4].registered(tp)]"
    assert not spmd(*go, put, *came, params=registered, runs=3).race
    assert spmd(*go, put, params=registered).race, "the run may end before"
    assert spmd(put, *came, params=registered).race, "the peer's run may begin after"
    last = ("main: expect(came, tp.others)", "main: notify(came, to=tp.others)")
    assert spmd(*last, runs=2).deadlock


# Fused


def test_parts_are_beside_each_other() -> None:
    mine = 'call("aten.neg.out", x, out=a)'
    other = 'call("aten.neg.out", a, out=y)'
    alloc = "a = alloc(f32[4])"
    assert spmd(alloc, f"main: fused(part({mine}), part({other}))").race
    assert not spmd(alloc, f"main: fused(part({mine}, {other}))").race
    assert not spmd(alloc, f"main: fused(part({mine}, record(e)), part(wait(e), {other}))").race
    assert not spmd(alloc, f"main: fused(part({mine}))", "main: copy(a, y)").race
    half = (alloc, f"comm: fused(part({mine}, record(e)), part(expect(go, tp.rank)))")
    go = ("main: wait(e)", "main: copy(a, y)", "main: notify(go, to=tp.rank)")
    verdict = spmd(*half, *go)
    assert not verdict.race
    assert not verdict.deadlock


def test_a_part_that_needs_a_later_part_is_stuck() -> None:
    for parts, stuck in (
        ("part(expect(go, tp.rank)), part(notify(go, to=tp.rank))", True),
        ("part(notify(go, to=tp.rank)), part(expect(go, tp.rank))", False),
    ):
        verdict = spmd(f"main: fused({parts})")
        assert verdict.deadlock == stuck


# Slots, and memory


def test_a_slot_has_two_copies() -> None:
    lines = ("s = alloc(f32[4], symmetric=tp)", "main: put(x, s, peer=tp.rank + 1)")
    lines += ("main: notify(came, to=tp.rank + 1)", "main: expect(came, tp.rank - 1)")
    lines += ("main: copy(s, y)",)
    free = "main: free(s)"
    for runs in (1, 2, 3, 5):
        verdict = spmd(*lines, free, runs=runs)
        assert not verdict.race
        assert not verdict.deadlock
        assert spmd(*lines, runs=runs).deadlock == (runs > 2)
    assert spmd(*lines[:4], free, lines[4], runs=1).use_after_free
    early = (*lines[:4], "comm: copy(x, y)", "comm: free(s)", lines[4])
    assert spmd(*early).race


def test_takes_of_one_storage_take_turns() -> None:
    names = ("a", "b", "c")
    lines = [f'{name} = alloc(f32[4], symmetric=tp, storage="slot")' for name in names]
    frees = [f"main: free({name})" for name in names]
    assert spmd(*lines, *frees).deadlock
    assert not spmd(*lines[:2], *frees[:2], runs=2).deadlock
    assert not spmd(*lines[:2], frees[0], lines[2], *frees[1:]).deadlock


def test_a_use_before_the_take() -> None:
    alloc = 's = alloc(f32[4], symmetric=tp, stream="comm")'
    assert spmd(alloc, "main: copy(x, s)", "main: record(e)", "comm: wait(e)", "comm: free(s)").race
    through = ("main: notify(go, to=tp.rank)", "comm: expect(go, tp.rank)")
    verdict = spmd("comm: expect(go, tp.rank)", alloc, "main: copy(x, s)", through[0])
    assert not verdict.race
    assert verdict.use_before_alloc


@pytest.mark.parametrize(
    ("first", "second", "race"),
    [
        ("copy(x, w[0])", "copy(x, w[1])", False),
        ("copy(x, w[0:4])", "copy(x, w[3:7])", True),
        ("copy(m[:, 0:1], v[:, 0:1])", "copy(m[:, 0:1], v[:, 1:2])", False),
        ("copy(m[:, 0:1], v[:, 0:1])", "copy(m[:, 0:1], v.as_strided((4, 1), (2, 1), 1))", True),
        ("copy(m[:, 0:1], v[:, 0:1])", "copy(v[:, 0:1], m[:, 0:1])", True),
        ("copy(m[:, 0:1], v[:, 0:1])", "copy(v[:, 1:2], m[:, 1:2])", False),
        ("copy(x, p)", "copy(x, q)", True),
        ("copy(x, p)", "copy(x, r)", False),
        ("copy(m[:, 0:1], v[:, 0:1])", "copy(m[:, 0:1], odd[:, 0:1])", True),
        ("copy(x[0:0], w[0:0])", "copy(x, w[0])", False),
        ('call("aten.a", out=p, rng=True)', 'call("aten.a", out=r, rng=True)', True),
    ],
)
def test_bytes_are_compared_exactly_but_between_buffers(
    first: str, second: str, race: bool
) -> None:
    lines = ("w = alloc(f32[8])", 'v = alloc(f32[4, 2], storage="v")', "m = alloc(f32[4, 2])")
    lines += ('odd = alloc(f32[4, 2], storage="v", offset=4)', 'p = alloc(f32[4], storage="s")')
    lines += ('q = alloc(f32[4], storage="s", offset=12)',)
    lines += ('r = alloc(f32[4], storage="s", offset=16)',)
    assert spmd(*lines, f"main: {first}", f"comm: {second}").race == race


@pytest.mark.parametrize("line", ["copy(a[{}], y[{}])", "copy(y[{}], a[{}])"])
@pytest.mark.parametrize("stream", ["main", "side"])
def test_a_view_without_elements_touches_nothing(stream: str, line: str) -> None:
    """Not even what is freed, or read and written beside it."""
    lines = ("a = alloc(f32[4])", "main: copy(x, a)", "main: copy(a, y)", "main: free(a)")
    for part, touches in (("0:0", False), ("0:1", True)):
        verdict = spmd(*lines, f"{stream}: {line.replace('{}', part)}")
        assert (verdict.race or verdict.use_after_free) == touches


def test_a_parameter_may_have_no_elements() -> None:
    """On some rank alone, as what a table deals out may."""
    program = parse(
        """def f(tp: Team[2], x: f32[3, 2], y: out[f32[rows[tp.rank], 2]]):
    rows = table(tp, 3, 0)
    main: reduce_scatter(x, y, reduce="sum", team=tp, splits=rows)"""
    )
    verdict = explore(program)
    assert not {verdict.race, verdict.deadlock, verdict.uninitialized} & {True}


def test_what_nothing_has_written() -> None:
    alloc, write, read = "a = alloc(f32[4])", "main: copy(x, a)", "main: copy(a, y)"
    assert not spmd(alloc, write, read).uninitialized
    assert spmd(alloc, read).uninitialized
    assert spmd(alloc, "main: copy(x[0:2], a[0:2])", read).uninitialized
    assert spmd("main: copy(x[0:2], y[0:2])").uninitialized, "y is returned"
    assert spmd("main: copy(y, y)", "main: copy(x, y)", runs=2).uninitialized
    shared = ('a = alloc(f32[4], storage="s")', write, 'b = alloc(f32[4], storage="s")')
    assert not spmd(*shared, read, "main: copy(x, b)").uninitialized
    assert spmd(*shared, "main: copy(x, b)", read).uninitialized


# The machine itself


def masks(clauses: list[Clause]) -> list[int]:
    """Clauses as sets of moves, each the bits of an integer."""
    return [sum(1 << move for move in {*clause}) for clause in clauses]


def moves_of(script: Script, strong: bool = False) -> list[tuple[int, list[int]]]:
    """Each move, and what it awaits."""
    found: list[tuple[int, list[int]]] = []
    for act in script.acts:
        begin, end = act.awaits(strong)
        found.append((1 << act.began, masks(begin)))
        found.append((1 << act.ended, masks(end)))
    return found


def following(moves: list[tuple[int, list[int]]], done: int) -> list[int]:
    """The states that one more move leads to."""
    return [
        done | move
        for move, awaited in moves
        if not done & move and all(done & clause for clause in awaited)
    ]


def every_state(script: Script, strong: bool, limit: int) -> tuple[bool, bool] | None:
    """True if it can get stuck, and True if two conflicting acts can be under way at once."""
    pairs = [
        (1 << a.began | 1 << b.began, 1 << a.ended | 1 << b.ended)
        for a, b, _ in conflicts(script.acts)
    ]
    moves = moves_of(script, strong)
    stuck = race = False
    seen, found = {0}, [0]
    while found:
        done = found.pop()
        race = race or any(done & begun == begun and not done & over for begun, over in pairs)
        states = following(moves, done)
        stuck = stuck or (not states and done.bit_count() < len(moves))
        new = set(states) - seen
        seen |= new
        found += new
        if len(seen) > limit:
            return None
    return stuck, race


def small_sets(seed: int, count: int) -> Iterator[list[Program]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield random_set(rng, rng.randint(1, 3))


def test_it_says_what_a_visit_of_every_state_says(seed: int) -> None:
    met = {"compared": 0, "race": 0, "deadlock": 0}
    for number, programs in enumerate(small_sets(seed, 1000)):
        if number >= 250 and min(met.values()) >= 5:  # some seeds draw few deadlocks
            break
        script = Script(programs, 1)
        if len(script.acts) > 26:
            continue
        strong, weak = (every_state(script, strong, 2_000) for strong in (True, False))
        if strong is None or weak is None:
            continue
        verdict = explore(programs, runs=1)
        shown = f"{verdict}\n{print_set(programs)}"
        assert (verdict.deadlock, verdict.race) == (strong[0], weak[1]), shown
        met["compared"] += 1
        met["race"] += verdict.race
        met["deadlock"] += verdict.deadlock
    print(met)
    assert min(met.values()) >= 5, met


def test_what_a_move_needs_is_what_keeps_it_back(seed: int) -> None:
    """Against a machine that holds back each move in turn."""
    two = parse(
        """def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    main: notify(s, to=tp.others)
    comm: notify(s, to=tp.others, value=2)
    main: expect(s, tp.rank + 1)
    main: copy(x, y)"""
    )
    choices = 0
    for programs in ([two], *small_sets(seed + 2, 40)):
        machine = OracleMachine(Script(programs, 2), strong=False)
        order = machine.go()
        needed = machine.needed(order)
        for held in range(machine.num_moves):
            done = {*machine.go(held)}
            for move in range(machine.num_moves):
                assert (move in done) == (not needed[move] >> held & 1), print_set(programs)
        choices += machine.choice
    assert choices >= 1


def test_memory_is_the_same_in_every_order_of_what_never_races(seed: int) -> None:
    rng = random.Random(seed)
    for programs in small_sets(seed + 1, 60):
        verdict = explore(programs, runs=2)
        if verdict.race:
            continue
        script = Script(programs, 2)
        moves, done, memory = moves_of(script), 0, OracleMemory()
        while states := following(moves, done):
            state = rng.choice(states)
            move = (state ^ done).bit_length() - 1
            done, act = state, script.acts[move // 2]
            (memory.begin if move == act.began else memory.end)(act)
        assert done.bit_count() == len(OracleMachine(script, strong=False).go())
        found = (memory.unwritten, memory.after_free, memory.before_alloc)
        assert found == (verdict.unwritten, verdict.freed, verdict.untaken)
