"""Each rule of the model on its own: what it orders, and what it does not. The oracle agrees."""

from __future__ import annotations

import pytest
from tests.fuzzing import compare
from tests.verify.orders import shuffled

from interlace.errors import ProgramError, TeamError
from interlace.ir import parse, parse_set
from interlace.verify import check
from interlace.verify.build import GraphBuilder
from interlace.verify.regions import Regions
from interlace.verify.source import lower


def kinds(body: str, head: str = "x: f32[4], y: out[f32[4]]", **options: object) -> frozenset[str]:
    """The kinds of error in a Program on a team of two."""
    lines = "".join(f"    {line.strip()}\n" for line in body.strip().splitlines())
    text = f"def f(tp: Team[2], {head}):\n{lines}"
    plain, full = check(parse(text)), check(parse(text), fold=False)
    assert plain.kinds() == full.kinds()
    assert not compare([parse(text)], runs=3).disagreements, text
    for seed in range(6):
        with shuffled(seed):
            assert check(parse(text)).kinds() == plain.kinds(), seed
    return check(parse(text), **options).kinds()  # pyright: ignore[reportArgumentType]


NEW = "t = empty(f32[4])\n"
SHARED = 'a = alloc(f32[4], storage="s")\n b = alloc(f32[4], storage="s")\n'
LATE = "side: record(s)\n" * 6
"""The checker visits what can start early first: this makes a stream come late."""

# (what the body shows, body, kinds of error); the rules themselves are in tests/golden/rules.txt
RULES: list[tuple[str, str, set[str]]] = [
    ("collectives of one queue are in order over streams",
     "main: all_reduce(y, y, reduce=\"sum\", team=tp)\n"
     "comm: all_reduce(y, y, reduce=\"sum\", team=tp)", {"uninitialized"}),
    ("a peer's message has ended, mine may not have",
     "t = alloc(f32[4])\n comm: group(send(x, peer=tp.rank + 1), recv(t, peer=tp.rank + 1))\n"
     "comm: notify(n, to=tp.others)\n main: expect(n, tp.rank + 1)\n main: copy(t, y)", {"race"}),
    ("a peer may be in its collective already, and write there",
     "s = alloc(f32[8], symmetric=tp)\n main: put(x, s[0:4], peer=tp.rank + 1)\n"
     "main: all_gather(x, s, team=tp)\n main: copy(x, y)\n main: free(s)", {"race"}),
    ("a broadcast's root may wait for all",
     "main: expect(n, tp.rank + 1)\n main: broadcast(x, y, root=0, team=tp)\n"
     "main: notify(n, to=tp.others)", {"deadlock"}),
    ("a send waits for its receive",
     "main: send(x, peer=tp.rank + 1)\n comm: recv(y, peer=tp.rank + 1)", set()),
    ("a write over a part of an earlier one hides only that part",
     "main: copy(x, y)\n main: record(e)\n comm: wait(e)\n comm: copy(x[0:2], y[0:2])\n"
     + LATE + "side: copy(x[2:4], y[2:4])", {"race"}),
    ("a write over a part of an earlier read hides only that part",
     "main: copy(x, y)\n main: record(e)\n comm: wait(e)\n"
     "comm: call(\"aten.zeros.out\", (2,), out=x[0:2])\n"
     + LATE + "side: call(\"aten.zeros.out\", (2,), out=x[2:4])", {"race"}),
    ("a column hides nothing between its rows",
     "t = alloc(f32[4, 2])\n main: copy(x, y)\n"
     "main: call(\"aten.zeros.out\", (3, 2), out=t[0:3])\n"
     "main: record(e)\n comm: wait(e)\n comm: copy(x, t.select(1, 0))\n"
     + LATE + "side: copy(x[0:2], t[0:2].select(1, 1))", {"race"}),
    ("a part hides nothing before it",
     "main: copy(x, y)\n main: record(e)\n comm: wait(e)\n comm: copy(x[1:4], y[1:4])\n"
     + LATE + "side: copy(x[0:1], y[0:1])", {"race"}),
    ("the part that was not lost",
     "a = alloc(f32[4], storage=\"s\")\n b = alloc(f32[4], storage=\"s\", offset=8)\n"
     "main: copy(x, a)\n main: copy(x, b)\n main: copy(x, y)\n main: copy(a[0:2], y[0:2])", set()),
    ("a free takes nothing from what holds its bytes by then",
     "a = alloc(f32[4], storage=\"s\")\n b = alloc(f32[4], storage=\"s\", offset=8)\n"
     "main: copy(x, a)\n main: copy(a, y)\n main: copy(x, b)\n main: free(a)\n main: copy(b, y)",
     set()),
    ("reads of what a write that comes beside them may have written", NEW
     + "main: copy(t, y)\n main: copy(t, y)\n" + LATE + "side: copy(x, t)", {"race"}),
    ("and a write behind such a read does not hide it", NEW
     + "main: copy(t, y)\n main: copy(x, t)\n" + LATE + "side: copy(x, t)", {"race"}),
    ("what a write beside a read may have written, when another write is the one that races", NEW
     + "main: call(\"aten.neg_.default\", t, out=t, mutates=True)\n main: copy(x, t)\n"
     + LATE + "side: copy(t, y)", {"race"}),
    ("a free beside a read writes nothing that it could read",
     "s = alloc(f32[4], symmetric=tp)\n main: copy(s, y)\n comm: free(s)",
     {"race", "uninitialized"}),
    ("a write that comes when a free has covered what it raced with",
     "a = alloc(f32[4], storage=\"s\", offset=8)\n b = alloc(f32[4], storage=\"s\")\n"
     "main: copy(a[0:2], y[0:2])\n main: free(b)\n" + LATE + "side: copy(x, b)\n main: copy(x, y)",
     {"race"}),
    ("a write into the gaps of what was read stands for none of it",
     "c = alloc(f32[1], storage=\"s\", offset=8)\n t = alloc(f32[2, 4], storage=\"s\")\n"
     "z = empty(f32[2, 2])\n main: copy(t.slice(1, 0, 2), z)\n"
     "main: copy(x[0:1], t.select(0, 0)[2:3])\n side: copy(x[0:1], c)\n main: copy(x, y)",
     {"race"}),
    ("a write beside a free brings nothing back",
     "t = alloc(f32[4], storage=\"s\")\n c = alloc(f32[4], storage=\"s\")\n"
     "main: copy(x, y)\n main: copy(x, t)\n main: record(e)\n side: wait(e)\n"
     "side: copy(x[2:4], t[2:4])\n side: record(g)\n main: free(t)\n main: wait(g)\n"
     "main: copy(x, c)\n main: copy(t[0:2], y[0:2])", {"race", "use-after-free"}),
    ("a free that does not await such a slot",
     "main: expect(n, tp.rank + 1)\n s = alloc(f32[4], symmetric=tp)\n side: free(s)\n"
     "main: copy(x, y)", {"deadlock", "race"}),
    ("a read behind two writes in no order",
     SHARED + "main: copy(x, b)\n" + LATE + "side: copy(x, a)\n side: record(e)\n"
     "main: wait(e)\n main: copy(b, y)", {"race"}),
    ("a storage is handed on too early",
     SHARED + "main: copy(x, b)\n main: record(e)\n side: wait(e)\n side: copy(x, a)\n"
     "side: free(a)\n main: copy(b, y)", {"race"}),
    ("a strided write beside what another buffer holds between its bytes",
     "a = alloc(f32[1], storage=\"s\", offset=8)\n b = alloc(f32[4, 2], storage=\"s\")\n"
     "main: copy(x[0:1], a)\n main: copy(x[0:1], b[1:2].select(1, 0))\n"
     + LATE + "side: copy(x, b.select(1, 1))\n main: copy(x, y)", {"race"}),
    ("what is sent to oneself was written before",
     NEW + "u = empty(f32[4])\n main: group(recv(u, peer=tp.rank), send(t, peer=tp.rank))\n"
     "main: copy(x, y)", {"uninitialized"}),
    ("what is sent to oneself is no place to receive it",
     NEW + "main: copy(x, t)\n main: group(recv(t, peer=tp.rank), send(t, peer=tp.rank))\n"
     "main: copy(x, y)", {"race"}),
    ("and on two streams",
     NEW + "u = empty(f32[4])\n main: recv(u, peer=tp.rank)\n comm: send(t, peer=tp.rank)\n"
     "main: copy(x, y)", {"uninitialized"}),
    ("a use that does not await a slot which a deadlock keeps from being taken",
     "main: expect(n, tp.rank + 1)\n s = alloc(f32[4], symmetric=tp)\n side: copy(x, s)\n"
     "main: free(s)\n main: copy(x, y)", {"deadlock", "race"}),
    ("but its ends wait for each other where a library has them meet",
     "main: copy(x, y)\n main: recv(y[0:0], peer=tp.rank + 1)\n"
     "main: send(x[0:0], peer=tp.rank + 1)", {"deadlock"}),
    ("notifies of which one never runs are in no order",
     "main: copy(x, y)\n main: expect(n, tp.rank + 1, value=1)\n"
     "main: notify(n, to=tp.rank + 1, value=1)\n side: notify(n, to=tp.rank + 1, value=2)",
     {"deadlock", "signal"}),
    ("a wait for nothing keeps nothing from being looked at",
     "main: wait(e)\n main: copy(x, y)\n side: copy(x, y)", {"event", "race"}),
    ("what a rank knew before another's broadcast, it knows after it",
     "t = alloc(f32[4])\n side: copy(x, t)\n side: record(e)\n main: wait(e)\n"
     "main: broadcast(x, y, root=0, team=tp)\n main: copy(t, y)", set()),
    ("a part that is written again after it was lost",
     f"{SHARED} main: copy(x, a)\n main: copy(x, b)\n main: copy(x[0:2], a[0:2])\n"
     "main: copy(a[0:2], y[0:2])\n main: copy(x[2:4], y[2:4])", set()),
    ("the first byte alone is lost",
     "a = alloc(i8[4], storage=\"s\")\n b = alloc(i8[1], storage=\"s\")\n"
     "main: call(\"aten.full.out\", (4,), 1, out=a)\n"
     "main: call(\"aten.full.out\", (1,), 1, out=b)\n"
     "main: call(\"aten.add.out\", x, a, out=y)", {"uninitialized"}),
    ("what was never written, beside what was lost",
     "a = alloc(f32[4], storage=\"s\")\n b = alloc(f32[1], storage=\"s\")\n"
     "main: copy(x[0:2], a[0:2])\n main: copy(x[0:1], b)\n main: copy(a[2:4], y[0:2])\n"
     "main: copy(x[2:4], y[2:4])", {"uninitialized"}),
    ("the part that was written and lost",
     "a = alloc(f32[4], storage=\"s\")\n b = alloc(f32[1], storage=\"s\")\n"
     "main: copy(x[0:2], a[0:2])\n main: copy(x[0:1], b)\n main: copy(a[0:2], y[0:2])\n"
     "main: copy(x[2:4], y[2:4])", {"uninitialized"}),
    ("columns in a storage that another buffer uses too",
     "t = alloc(f32[2, 2], storage=\"s\")\n b = alloc(f32[2], storage=\"s\", offset=16)\n"
     "main: copy(x[0:2].view(2, 1), t.slice(1, 0, 1))\n"
     "comm: copy(x[0:2].view(2, 1), t.slice(1, 1, 2))\n main: copy(x[0:2], b)\n"
     "main: copy(x, y)", set()),
    ("other parts of two buffers, the same of their storage",
     "a = alloc(f32[4], storage=\"s\")\n b = alloc(f32[4], storage=\"s\", offset=8)\n"
     "main: copy(x[2:4], a[2:4])\n comm: copy(x[0:2], b[0:2])\n main: copy(x, y)", {"race"}),
    ("a part between the elements of a column stands for no other buffer there",
     "a = alloc(f32[2, 3], storage=\"s\")\n b = alloc(f32[2], storage=\"s\", offset=8)\n"
     "comm: copy(x[0:2], b)\n comm: record(e)\n main: wait(e)\n"
     f"main: copy(x[0:2], a.view(6)[2:4])\n {LATE}"
     "side: copy(x[0:2].view(2, 1), a.slice(1, 1, 2))\n"
     "main: copy(x, y)", {"race"}),
]  # fmt: skip


@pytest.mark.parametrize(("column", "found"), [(3, set[str]()), (5, {"race"})])
def test_many_rows_whose_strides_do_not_divide_each_other(column: int, found: set[str]) -> None:
    """Every tenth element from 0, and every fifteenth from 3: none in common, of 105,000 rows."""
    head = "x: f32[70000, 15], y: f32[105000], z: f32[70000]"
    body = f"main: copy(y, x.view(105000, 10).select(1, 0))\nside: copy(x.select(1, {column}), z)"
    assert kinds(body, head) == found


@pytest.mark.parametrize(("body", "found"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_rule(body: str, found: set[str]) -> None:
    assert kinds(body) == found


REDUCE = 'main: all_reduce(x, y, reduce="sum", team=tp)'


def test_members_of_a_collective_share_one_clock() -> None:
    regions = Regions()
    program = parse(f"def f(tp: Team[4], x: f32[4], y: out[f32[4]]):\n    {REDUCE}\n")
    builder = GraphBuilder([lower(program, regions)], regions)
    graph = builder.build()
    (members,) = builder.meetings.queues.values()
    assert len({id(graph.clocks[at.end]) for (at,) in members.values()}) == 1
    assert len(members) == 4


def test_a_slot_of_a_rank_without_a_program_never_comes_back() -> None:
    body = "a = alloc(f32[4], symmetric=tp)\n    main: copy(x, a)\n    main: free(a)\n"
    report = check(parse(f"def f(tp: Team[[0, 1]], x: f32[4]):\n    ranks(0)\n    {body}"))
    assert report.kinds() == {"mismatch"}
    assert "no Program of the set runs on rank 1, which never frees it" in str(report)


def test_in_order_is_another_program() -> None:
    body = "comm: recv(y, peer=tp.rank + 1)\n main: send(x, peer=tp.rank + 1)"
    assert kinds(body) == frozenset()
    assert kinds(body, in_order=True) == {"deadlock"}


def test_only_the_root_reads_the_source_of_a_broadcast() -> None:
    head = "x: f32[4], y: out[f32[4]]"
    body = """
        t = alloc(f32[4])
        main: broadcast(t, y, root=0, team=tp)
    """
    report = check(parse(f"def f(tp: Team[2], {head}):\n{body}"))
    assert [finding.ranks for finding in report.errors] == [(0,)]


def test_a_set_of_programs_on_the_same_rank() -> None:
    text = "def f(tp: Team[2], x: f32[4]):\n    main: barrier(team=tp)\n"
    with pytest.raises(TeamError, match="rank 0 runs both f and f"):
        check([parse(text), parse(text).instantiate(0)])


def test_a_rank_without_a_program_never_comes() -> None:
    text = "def f(pipe: Team[[0, 1]], x: f32[4]):\n    ranks(0)\n    main: barrier(team=pipe)\n"
    report = check(parse(text))
    assert report.kinds() == {"deadlock"}
    assert "no Program of the set runs there" in str(report)


def test_a_name_that_means_nothing() -> None:
    program = parse("def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n    main: copy(x, y)\n")
    with pytest.raises(ProgramError, match="no buffer named 'x'"):
        check(program.replace(params=program.params[1:]))


def test_stages_of_a_pipeline_that_meet_in_another_order() -> None:
    text = """
def first(pipe: Team[[0, 1]], x: f32[4], y: out[f32[4]]):
    ranks(0)
    main: send(x, peer=1, team=pipe)
    main: recv(y, peer=1, team=pipe)

def second(pipe: Team[[0, 1]], x: f32[4], y: out[f32[4]]):
    ranks(1)
    main: {0}
    main: {1}
"""
    ops = "send(x, peer=0, team=pipe)", "recv(y, peer=0, team=pipe)"
    assert check(parse_set(text.format(*ops[::-1]))).sound
    assert check(parse_set(text.format(*ops))).kinds() == {"deadlock"}


@pytest.mark.parametrize(("one", "two", "sound"), [(3, 1, True), (1, 1, False), (3, 3, False)])
def test_a_table_of_one_name_in_two_programs(one: int, two: int, sound: bool) -> None:
    """On the other stream each rank writes the rows from there on, beside those of its chunk."""
    text = """
def {0}(tp: Team[[0, 1]], x: f32[4], y: out[f32[4]]):
    ranks({1})
    rows = table(tp, {2})
    main: copy(x.chunk(0, rows), y.chunk(0, rows))
    side: copy(x[{3}:4], y[{3}:4])
"""
    first, second = text.format("a", 0, "3, 1", one), text.format("b", 1, "1, 3", two)
    assert check(parse_set(first + second)).sound == sound
