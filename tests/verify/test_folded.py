"""Schedules that a fold certifies, and others: a table of small schedules for one Program.
Each found some damage of the code (mutmut). test_folded_stages.py has two stages."""

from __future__ import annotations

import pytest
from tests.verify.test_symmetry import compared

from interlace.ir import Program, parse
from interlace.verify import check
from interlace.verify import turns as automorphisms

A, B = (f'{name} = alloc(f32[4], storage="s")' for name in "ab")
PARTS = "; ".join(
    f'{name} = alloc(f32[4], storage="s", offset={at})'
    for name, at in (("a", 0), ("b", 16), ("c", 8))
)
USE_A, USE_B = (f"main: copy(x, {name}); main: copy({name}, y)" for name in "ab")
G, FREE = "g = alloc(f32[4], symmetric=tp); main: copy(x, g)", "main: free(g)"
TP, MESH = "tp: Team[4]", "dp: Team[2], tp: Team[2]"
TWICE = "tp: Team[[0, 1]], ep: Team[[0, 1]]"
PP = "tp: Team[[0, 1], [2, 3]], pp: Team[[0, 2], [1, 3]]"
NOTIFY = "main: notify(s, to=tp.rank + 1, value={}); {}: notify(s, to=tp.rank + 1, value={})"
SIGNAL = "main: notify({0}, to={1}.rank + 1); main: expect({0}, {1}.rank + 1)"

MESH3 = "pp: Team[2], dp: Team[2], tp: Team[3]"
RING = "main: group(send(x, peer={0}.rank + 1), recv(y, peer={0}.rank - 1))"
QUARTERS = "main: copy(x.chunk(all.rank, 4), y.chunk(all.rank, 4))"
NESTED = "tp: Team[[0, 1], [2, 3]], all: Team[[0, 1, 2, 3]]"

ACROSS = (
    "g = alloc(f32[4], symmetric=tp); main: barrier(team=tp); main: put(x, g, peer=tp.rank + 1); "
    "main: barrier(team=tp); main: notify(s, to={0}.rank + 1); side: expect(s, {0}.rank + 1); "
    "side: copy(g, y); side: record(e); main: wait(e)"
)

SLOTS = "; ".join(f'{name} = alloc(f32[4], symmetric=tp, storage="q")' for name in "ab")

# What is folded: the ranks visited, and the teams.
FOLDED: dict[str, tuple[str, str, tuple[tuple[int, ...], str]]] = {
    "one storage after another": (TP, f"{A}; {USE_A}; {B}; {USE_B}", ((0,), "tp")),
    "parts of a storage": (
        TP,
        f"{PARTS}; main: copy(x, a); side: copy(x, b); side: record(e); main: wait(e); "
        "main: copy(x, c)",
        ((0,), "tp"),
    ),
    "a gather in place": (TP, "main: all_gather(x[tp.rank], x, team=tp)", ((0,), "tp")),
    "a team without ends": (MESH, SIGNAL.format("s", "tp"), ((0,), "dp tp")),
    "both": (MESH, "main: barrier(team=tp); main: barrier(team=dp)", ((0,), "dp tp")),
    "a number as a peer": (
        "dp: Team[2], tp: Team[3]",
        f"{G.replace('=tp', '=dp')}; main: barrier(team=dp); main: get(g, y, peer=0, team=dp); "
        f"main: barrier(team=dp); {FREE}",
        ((0, 3), "tp"),
    ),
    "three teams and a ring": (MESH3, RING.format("tp"), ((0,), "pp dp tp")),
    "an uneven table": (
        "tp: Team[3], dp: Team[2]",
        "r = table(tp, 2, 1, 1); main: copy(x, y)",
        ((0, 2, 4), "dp"),
    ),
    "a signal of who has put": (
        MESH,
        f"{ACROSS.format('tp')}; {FREE}",
        ((0,), "dp tp"),
    ),
    "all others": (
        "dp: Team[2], tp: Team[3]",
        "main: notify(s, to=tp.others); main: expect(s, tp.others)",
        ((0,), "dp tp"),
    ),
    "pairs that cross": (
        "tp: Team[[0, 1], [2, 3]], pp: Team[[0, 3], [1, 2]]",
        f"{RING.format('pp')}; {RING.format('tp')}",
        ((0,), "tp pp"),
    ),
    "a team of one": ("tp: Team[1], dp: Team[2]", "main: barrier(team=dp)", ((0,), "dp")),
    "chunks by one team": (
        MESH,
        "main: copy(x.chunk(dp.rank, 2), y.chunk(dp.rank, 2)); main: copy(x[0:2], y[0:2])",
        ((0, 2), "tp"),
    ),
}

# What is not: the kinds of what is found, on any rank.
FOUND: dict[str, tuple[str, str, str]] = {
    "launched in a circle": (
        TP,
        "main: send(x, peer=tp.rank + 1); side: recv(y, peer=tp.rank - 1)",
        "launch-order",
    ),
    "a storage that another took": (
        TP,
        f"{A}; {USE_A}; {B}; {USE_B}; main: copy(a, y)",
        "uninitialized",
    ),
    "two of a storage at once": (TP, f"{A}; {USE_A}; {B}; side: copy(x, b)", "race"),
    "at once with a part": (
        TP,
        f"{A}; {B}; main: record(e); side: wait(e); third: copy(x, a); third: record(f); "
        "main: wait(f); main: copy(x[0:2], b[0:2]); side: copy(x[2:4], b[2:4])",
        "race",
    ),
    "the same in another order": (
        TP,
        f"{A}; {B}; main: record(e); side: wait(e); third: copy(x, a); third: record(f); "
        "main: wait(f); side: copy(x[2:4], b[2:4]); main: copy(x[0:2], b[0:2])",
        "race",
    ),
    "a part of the first on another stream": (
        TP,
        f"{A}; main: record(e); side: wait(e); side: copy(x[0:2], a[0:2]); "
        f"main: copy(x[2:4], a[2:4]); {B}; main: copy(x, b)",
        "race",
    ),
    "a part of the first on a stream that goes on": (
        TP,
        f"{A}; {B}; main: record(e); side: wait(e); main: copy(x[2:4], a[2:4]); "
        "side: copy(x[0:2], a[0:2]); side: copy(x, b)",
        "race",
    ),
    "freed at once, and not used": (
        TP,
        f"{A}; main: record(e); side: wait(e); side: free(a); {B}; main: copy(x, b); main: free(b)",
        "race",
    ),
    "a byte freed at once, and not used": (
        TP,
        'a = alloc(u8[1], storage="s"); main: record(e); side: wait(e); side: free(a); '
        f"{B}; main: copy(x, b); main: free(b)",
        "race",
    ),
    "freed at once": (
        TP,
        f"{A}; main: copy(x, a); main: record(e); side: wait(e); side: free(a); {B}; "
        "main: copy(x, b); main: free(b)",
        "race",
    ),
    "a part at once": (
        TP,
        f"{PARTS}; main: copy(x, a); side: copy(x, b); main: copy(x, c)",
        "race",
    ),
    "a gather of a neighbour's part": (
        TP,
        "main: all_gather(x[tp.rank + 1], x, team=tp)",
        "in-place",
    ),
    "two backends": (
        TP,
        'main: group(send(x, peer=tp.rank + 1, backend="gloo"), recv(y, peer=tp.rank - 1))',
        "mismatch",
    ),
    "a signal that does not grow": (
        TP,
        f"{NOTIFY.format(1, 'main', 1)}; main: expect(s, tp.rank - 1)",
        "signal",
    ),
    "a signal in no order": (
        TP,
        f"{NOTIFY.format(1, 'side', 2)}; main: expect(s, tp.rank - 1, value=2)",
        "signal",
    ),
    "a signal of who knows of another pair": (
        MESH,
        f"{ACROSS.format('dp')}; {FREE}",
        "race",
    ),
    "a third take that waits for itself": (
        TP,
        f'{SLOTS}; c = alloc(f32[4], symmetric=tp, storage="q", stream="side"); '
        "side: notify(go, to=tp.rank + 1); main: expect(go, tp.rank - 1); main: free(a); "
        "main: free(b); side: free(c)",
        "deadlock",
    ),
    "a signal for nobody": (TP, "main: notify(s, to=tp.rank + 1)", "unexpected-notify"),
}


def of_one(head: str, body: str) -> list[Program]:
    lines = "".join(f"    {line}\n" for line in body.split("; "))
    return [parse(f"def f({head}, x: f32[4], y: f32[4]):\n{lines}")]


@pytest.mark.parametrize(("head", "body", "folded"), FOLDED.values(), ids=FOLDED)
def test_what_is_folded(head: str, body: str, folded: tuple[tuple[int, ...], str]) -> None:
    symmetry = compared(of_one(head, body)).symmetry
    assert symmetry is not None
    assert (symmetry.visited, " ".join(symmetry.folded)) == folded


@pytest.mark.parametrize(("head", "body", "kinds"), FOUND.values(), ids=FOUND)
def test_what_is_not_certified(head: str, body: str, kinds: str) -> None:
    report = compared(of_one(head, body))
    assert report.symmetry is None
    assert {found.kind for found in report.findings} == {*kinds.split()}


# What is sound, and looked at on all ranks.
WHOLE = {
    "a turn of pairs is none of all": (NESTED, "main: barrier(team=tp); main: barrier(team=all)"),
    "nor that of all one of pairs": (NESTED, RING.format("all")),
    "a pair the other way round": (
        "tp: Team[[0, 1], [3, 2]], all: Team[[0, 1, 2, 3]]",
        RING.format("all"),
    ),
    "a team of some ranks": ("tp: Team[4], sub: Team[[0, 1]]", "main: barrier(team=tp)"),
    "a pair across pairs": ("tp: Team[[0, 1], [2, 3]], sub: Team[[0, 2]]", "main: copy(x, y)"),
    "a root by the rank in another team": (
        MESH,
        "main: broadcast(x, x, root=dp.rank, team=tp)",
    ),
    "a root of all, which a turn of pairs moves": (
        "tp: Team[[0, 2], [1, 3]], all: Team[[0, 1, 2, 3]]",
        "main: broadcast(x, x, root=0, team=all); main: barrier(team=tp)",
    ),
    "quarters and a half": (NESTED, f"{QUARTERS}; main: copy(x[0:2], y[0:2])"),
    "one rank": ("tp: Team[1]", "main: copy(x, y)"),
}


@pytest.mark.parametrize(("head", "body"), WHOLE.values(), ids=WHOLE)
def test_what_is_sound_and_not_folded(head: str, body: str) -> None:
    report = compared(of_one(head, body))
    assert report.sound
    assert report.symmetry is None


@pytest.mark.parametrize(("ranks", "visited"), [(4, 1), (5, 5)])
def test_too_many_ranks(ranks: int, visited: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automorphisms, "MOST", 4)
    assert check(of_one(f"tp: Team[{ranks}]", RING.format("tp"))).num_visited == visited
