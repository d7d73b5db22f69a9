"""Schedules that a fold certifies, and others: small schedules of two stages, one rank of each of
which stands for all of it. Each found some damage of the code (mutmut)."""

from __future__ import annotations

import pytest
from tests.verify.test_symmetry import compared

from interlace.ir import parse_set
from interlace.verify import turns as automorphisms
from interlace.verify.regions import Regions
from interlace.verify.report import Symmetry
from interlace.verify.source import lower

STAGES = """
def first(tp: Team[2], pp: Team[[0, 2], [1, 3]], x: f32[4]):
    ranks(0, 1)
    {0}

def second(tp: Team[2], pp: Team[[0, 2], [1, 3]], x: f32[4]):
    ranks(2, 3)
    {1}
"""
FREE = "main: free(g)"
BARRIER = "main: barrier(team=pp)"
SUM = 'main: all_reduce({0}, {0}, reduce="sum", team=pp)'
SHARED = "r = alloc(f32[4], symmetric=pp); main: copy(x, r)"
PUT, SEE = "main: put(x, r, peer=1, team=pp)", "main: copy(r, x)"
SEND, RECV = "main: send({}, peer={}, team=pp)", "main: recv({}, peer={}, team=pp)"
RAISE, AWAIT = "main: notify(s, to=1, team=pp, value={})", "main: expect(s, 0, team=pp, value={})"
TO_PEER = "main: put(x, g, peer=pp.rank + 1)"


def slot(size: int = 4, *lines: str) -> str:
    made = f"g = alloc(f32[{size}], symmetric=pp)"
    return "; ".join([made, "main: copy(x[0:2], g[0:2])", *lines, FREE])


# What two stages do, and what is found: nothing, where one rank of each stands for all of it.
TWO_STAGES: dict[str, tuple[str, str, str]] = {
    "a slot": (slot(), slot(), ""),
    "slots of two sizes": (slot(4), slot(6), "mismatch"),
    "one take less": (f"{slot()}; {slot()}", slot(), "mismatch"),
    "a slot that is kept": (slot()[: -len(FREE) - 2], slot(), "leak"),
    "three takes": ("; ".join([slot()] * 3), "; ".join([slot()] * 3), ""),
    "three takes for peers": (
        "; ".join([slot(4, BARRIER, TO_PEER)] * 3),
        "; ".join([slot(4, BARRIER, TO_PEER)] * 3),
        "",
    ),
    "three takes too early": (
        "; ".join([slot(4, TO_PEER, BARRIER)] * 3),
        "; ".join([slot(4, TO_PEER, BARRIER)] * 3),
        "race",
    ),
    "a message": (SEND.format("x", 1), RECV.format("x", 0), ""),
    "a message for nobody": (SEND.format("x", 1), "main: copy(x, x)", "deadlock mismatch"),
    "a message too many": (
        f"{SEND.format('x', 1)}; {SEND.format('x', 1)}",
        RECV.format("x", 0),
        "deadlock mismatch",
    ),
    "a message and back": (
        f"{SEND.format('x', 1)}; {RECV.format('x', 1)}",
        f"{RECV.format('x', 0)}; {SEND.format('x', 0)}",
        "",
    ),
    "both send first": (
        f"{SEND.format('x', 1)}; {RECV.format('x', 1)}",
        f"{SEND.format('x', 0)}; {RECV.format('x', 0)}",
        "deadlock",
    ),
    "a part by a table": (
        f"r = table(tp, 2, 2); {SEND.format('x.chunk(tp.rank, r)', 1)}",
        RECV.format("x[0:2]", 0),
        "",
    ),
    "a slot of one": (slot(), "main: copy(x, x)", "mismatch"),
    "a slot of the other": ("main: copy(x, x)", slot(), "mismatch"),
    "a collective too many": (f"{BARRIER}; {BARRIER}", BARRIER, "deadlock mismatch"),
    "a collective for one": (BARRIER, "main: copy(x, x)", "deadlock mismatch"),
    "two reductions": (SUM.format("x"), SUM.format("x").replace("sum", "max"), "mismatch"),
    "two sizes": (SUM.format("x"), SUM.format("x[0:2]"), "mismatch"),
    "two queues": (
        f'{SUM.format("x")}; main: barrier(team=pp, backend="gloo")',
        f'{SUM.format("x")}; main: barrier(team=pp, backend="gloo")',
        "",
    ),
    "two queues crosswise": (
        f'{BARRIER}; main: barrier(team=pp, backend="gloo")',
        f'main: barrier(team=pp, backend="gloo"); {BARRIER}',
        "deadlock",
    ),
    "a value that nobody raises": (RAISE.format(1), AWAIT.format(2), "deadlock"),
}

# Between barriers, the first stage puts what the second reads.
ORDERS: dict[str, tuple[str, str, str]] = {
    "a signal": (f"{PUT}; {RAISE.format(1)}", f"{AWAIT.format(1)}; {SEE}", ""),
    "a signal too early": (f"{RAISE.format(1)}; {PUT}", f"{AWAIT.format(1)}; {SEE}", "race"),
    "the second of two": (
        f"{RAISE.format(1)}; {PUT}; {RAISE.format(2)}",
        f"{AWAIT.format(2)}; {SEE}",
        "",
    ),
    "the first of two": (
        f"{RAISE.format(1)}; {PUT}; {RAISE.format(2)}",
        f"{AWAIT.format(1)}; {SEE}; {AWAIT.format(2)}",
        "race",
    ),
    "a message": (f"{PUT}; {SEND.format('x', 1)}", f"{RECV.format('x', 0)}; {SEE}", ""),
    "an empty message": (
        f"{PUT}; {SEND.format('x[0:0]', 1)}",
        f"{RECV.format('x[0:0]', 0)}; {SEE}",
        "race",
    ),
    "into what is put": (f"{PUT}; {SEND.format('x', 1)}", RECV.format("r", 0), "race"),
    "what was sent": (
        SEND.format("r", 1),
        f"{RECV.format('x', 0)}; {PUT.replace('1', '0')}",
        "race",
    ),
    "a sum": (f"{PUT}; {SUM.format('x')}", f"{SUM.format('x')}; {SEE}", ""),
    "an empty sum": (f"{PUT}; {SUM.format('x[0:0]')}", f"{SUM.format('x[0:0]')}; {SEE}", "race"),
}
for root, of_first, of_second in ((0, "", "race"), (1, "race", "")):
    for op, kind in (("broadcast(x, x", of_first), ('reduce(x, x, reduce="sum"', of_second)):
        line = f"main: {op}, root={root}, team=pp)"
        ORDERS[f"{op.split('(')[0]} {root}"] = f"{PUT}; {line}", f"{line}; {SEE}", kind


def seen(first: str, second: str, kinds: str) -> None:
    bodies = [part.replace("; ", "\n    ") for part in (first, second)]
    for pairs in ("[0, 2], [1, 3]", "[0, 3], [1, 2]"):
        text = STAGES.replace("[0, 2], [1, 3]", pairs)
        report = compared([*parse_set(text.format(*bodies))])
        assert {found.kind for found in report.findings} == {*kinds.split()}
        visited = None if report.symmetry is None else report.symmetry.visited
        assert visited == (None if kinds else (0, 2))


@pytest.mark.parametrize(("first", "second", "kinds"), TWO_STAGES.values(), ids=TWO_STAGES)
def test_two_stages(first: str, second: str, kinds: str) -> None:
    seen(first, second, kinds)


@pytest.mark.parametrize(("first", "second", "kinds"), ORDERS.values(), ids=ORDERS)
def test_what_comes_before_what_another_stage_does(first: str, second: str, kinds: str) -> None:
    free = FREE.replace("g", "r")
    one, two = (f"{SHARED}; {BARRIER}; {body}; {BARRIER}; {free}" for body in (first, second))
    seen(one, two, kinds)


def test_some_of_the_ranks() -> None:
    (first, _) = parse_set(STAGES.format("main: copy(x, x)", "main: copy(x, x)"))
    assert automorphisms.Turns.of([lower(first, Regions())]) is None


def test_teams_of_some_ranks_each() -> None:
    text = STAGES.replace(
        "tp: Team[2], pp: Team[[0, 2], [1, 3]]", "a: Team[[0, 1]], b: Team[[2, 3]]"
    )
    bodies = text.format("main: barrier(team=a)", "main: barrier(team=b)")
    symmetry = compared([*parse_set(bodies)]).symmetry
    assert symmetry == Symmetry((0, 2), ("a", "b"))
