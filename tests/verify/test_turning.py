"""Teams by which the views of a buffer turn with the rank: a table of views, and of slots that two
Programs take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from interlace.ir import parse, parse_set
from interlace.verify.regions import Regions
from interlace.verify.source import lower
from interlace.verify.turns import turning

BOTH = ("dp", "tp")
BY_TP = "{}.chunk(tp.rank, 4)"
BY_DP = "{}.chunk(dp.rank, 2)"

# The shape of a buffer, the views of it, and the teams by which it does not turn (dp: 2, tp: 4).
VIEWS: list[tuple[str, Sequence[str], str]] = [
    ("8", [BY_TP, "{}"], ""),
    ("8", [BY_TP, "{}.chunk(tp.rank + 1, 4)[0:1]"], ""),
    ("8", [BY_TP, "{}.chunk(0, 4)"], "tp"),
    ("8", [BY_TP, "{}[0:4]"], "tp"),
    ("8", [BY_TP, "{}[0:1]"], "tp"),
    ("8", ["{}[0:4].chunk(tp.rank, 4)"], "tp"),
    ("8", ["{}.chunk(tp.rank, 8)"], "tp"),
    ("8", ["{}.chunk(tp.rank, even)"], ""),
    ("8", ["{}.chunk(tp.rank, uneven)"], "tp"),
    ("8", ["{}.chunk(tp.rank, even)", "{}[0:2]"], "tp"),
    ("8", [BY_TP, "{}[0:even[tp.rank]].view(2)"], "tp"),
    ("8", ["{}[0:even[tp.rank]]", "{}"], ""),
    ("8", ["{}.chunk(dp.rank, 2).chunk(tp.rank, 4)", BY_DP], ""),
    ("8", ["{}.chunk(dp.rank, 2).chunk(tp.rank, 4)", "{}.chunk(dp.rank, 2)[0:1]"], "dp tp"),
    ("8", ["{}.chunk(dp.rank, 2).chunk(tp.rank, 4)", BY_TP], "dp tp"),
    ("8", [BY_TP, BY_DP], "dp tp"),
    ("8", [BY_TP, "{}.cast(i32).view(4, 2).chunk(tp.rank, 4)"], "tp"),
    ("8", [BY_TP, "{}.cast(i32).chunk(tp.rank, 4)"], ""),
    ("8", [BY_TP, "{}.as_strided((4,), (2,), 0)"], "tp"),
    ("8", [BY_TP, "{}.view(1, 8).expand(3, 8).chunk(tp.rank, 4, 1)"], "tp"),
    ("8", [BY_TP, "{}.view(1, 8).expand(3, -1).view(24).chunk(tp.rank, 4)"], "tp"),
    ("8", [BY_TP, "{}.view(8).expand(3, 8)[0:1]"], "tp"),
    ("8", [BY_TP, "{}.view(8).expand(3, 8)[:, 0:1]"], "tp"),
    ("8", ["{}.view(8).expand(4, 8).chunk(tp.rank, 4)"], "tp"),
    ("8, 4", ["{}.chunk(tp.rank, 4, 1)", BY_DP], ""),
    ("8, 4", ["{}.chunk(tp.rank, 4, 1)", BY_DP, "{}.select(0, 0)"], "dp"),
    ("8, 4", ["{}.chunk(tp.rank, 4, 1)", BY_DP, "{}.select(1, 0)"], "tp"),
    ("8, 4", ["{}.chunk(tp.rank, 4, 1)", BY_DP, "{}.select(0, 0)[0:1]"], "dp tp"),
    ("8, 4", ["{}.chunk(tp.rank, 4, 1)", BY_DP, "{}[:, 0:1]"], "tp"),
    ("8, 4", [BY_TP, "{}.permute(1, 0)[0:1]"], ""),
    ("8, 4", ["{}.chunk(tp.rank, 4, 1)", "{}.permute(1, 0)[0:1]"], "tp"),
    ("8, 4", ["{}.permute(1, 0).chunk(tp.rank, 4)", "{}[0:1]"], ""),
    ("8", [BY_TP, "{}.view(4, 2).chunk(tp.rank, 4)"], ""),
    ("8", [BY_TP, "{}.view(4, 2)[:, 0:1]"], "tp"),
    ("8", [BY_TP, "{}.view(-1, 2).chunk(tp.rank, 4)"], ""),
    ("8", [BY_DP, "{}.view(2, 2, 2).chunk(dp.rank, 2)"], ""),
    ("8, 4", ["{}.chunk(tp.rank, 4, 1)", "{}.view(32)[0:4]"], "tp"),
    ("8, 4", [BY_TP, "{}.view(32)[0:4]"], "tp"),
    ("8, 4", [BY_TP, "{}.view(32).view(32).chunk(tp.rank, 4)"], ""),
    ("8, 4", ["{}.view(8, 2, 2).chunk(dp.rank, 2, 1)", "{}[0:1]"], ""),
    ("8, 4", ["{}.view(4, 2, 4).chunk(tp.rank, 4)", "{}[:, 0:1]"], ""),
    ("8, 4", ["{}.view(4, 2, 4).chunk(tp.rank, 4, 2)", "{}[0:1]"], ""),
    ("8, 4", ["{}.view(4, 2, 4).chunk(tp.rank, 4, 2)", "{}[:, 0:1]"], "tp"),
    ("8, 4", ["{}.view(4, 8).chunk(dp.rank, 2, 1)"], "dp"),
    ("6, 2", ["{}.view(12).chunk(tp.rank, 4)"], "tp"),
    ("2, 4", [BY_DP, "{}.view(2, 1, 4)[:, 0:1]"], ""),
    ("even[tp.rank], 4", ["{}.view(-1).chunk(tp.rank, 4)"], "tp"),
    ("2, 6", ["{}.view(12).chunk(dp.rank, 2).chunk(dp.rank, 2)"], "dp"),
    ("1, 8", ["{}.view(8, 1).chunk(tp.rank, 4)", "{}.view(8, 1).select(1, 0)"], ""),
    ("even[tp.rank], 4", ["{}.chunk(tp.rank, 4, 1)", "{}[:, 0:1]"], "tp"),
    ("even[tp.rank], 4", ["{}.chunk(dp.rank, 2)", "{}"], ""),
    ("6, 2", ["{}.view(4, 3).chunk(tp.rank, 4)"], "tp"),
]


def stuck(
    shape: str, views: Sequence[str], moving: Sequence[str] = BOTH, others: str = ""
) -> set[str]:
    """Teams by which two buffers with these views do not turn."""
    lines = [f"main: copy({view.format('x')}, {view.format('y')})" for view in views]
    text = (
        f"def f(dp: Team[2], tp: Team[4], a: f32[8], b: f32[8]):\n"
        "    even = table(tp, 2, 2, 2, 2)\n    uneven = table(tp, 1, 3, 1, 3)\n"
        f"    x = alloc(f32[{shape}])\n    y = alloc(f32[{shape}])\n"
    )
    text += "".join(f"    {line}\n" for line in lines) + others
    return {*turning([lower(parse(text), Regions())], moving)}


@pytest.mark.parametrize(("shape", "views", "teams"), VIEWS)
def test_by_which_teams_a_buffer_does_not_turn(
    shape: str, views: Sequence[str], teams: str
) -> None:
    assert stuck(shape, views) == {*teams.split()}


def test_levels_of_teams_that_do_not_move() -> None:
    """Levels below the last moving team, or above the first, do not affect a turn."""
    under = "{}.chunk(tp.rank, 4).chunk(dp.rank, 2)"
    assert stuck("8", [under, "{}.chunk(tp.rank, 4)[0:1]"], ["tp"]) == set()
    assert stuck("8", [under, "{}.chunk(tp.rank, 4)[0:1]"], BOTH) == {"dp", "tp"}
    over = "{}.chunk(dp.rank, 2).chunk(tp.rank, 4)"
    assert stuck("8", [over, "{}.chunk(dp.rank, 2).chunk(0, 4)"], ["tp"]) == {"tp"}
    assert stuck("8", [over, "{}.chunk(dp.rank, 2)"], ["tp"]) == set()
    assert stuck("8", [BY_DP, "{}.chunk(0, 2)"], ["tp"]) == set()
    assert stuck("8", [BY_DP, "{}.chunk(0, 2)"], ["dp"]) == {"dp"}


def test_every_buffer_that_does_not_turn_is_found() -> None:
    """Whatever is seen before it, or after."""
    lines = {
        "dp": ["copy(a.chunk(dp.rank, 2), a.chunk(dp.rank, 2))", "copy(a[0:1], a[0:1])"],
        "tp": ["copy(b.chunk(tp.rank, 8), b.chunk(tp.rank, 8))"],
    }
    for teams in (["dp"], ["tp"], ["dp", "tp"], ["tp", "dp"]):
        for views in ([], ["{}"], [BY_TP]):
            others = "".join(f"    main: {line}\n" for team in teams for line in lines[team])
            assert stuck("8", views, others=others) == {*teams}


SLOTS = """
def first(tp: Team[2], pp: Team[[0, 2], [1, 3]]):
    ranks(0, 1)
    {0}

def second(tp: Team[2], pp: Team[[0, 2], [1, 3]], x: f32[4]):
    ranks(2, 3)
    {1}
"""
WHOLE, HALVES = (
    "main: copy({0}.chunk(0, 2), {0}.chunk(0, 2))",
    "main: copy({0}[tp.rank], {0}[tp.rank])",
)


def take(name: str, shape: str, *lines: str) -> list[str]:
    made = f"{name} = alloc(f32[{shape}], symmetric=pp)"
    return [made, *(line.format(name) for line in lines), f"main: free({name})"]


QUEUE = [f'{name} = alloc(f32[4], symmetric=pp, storage="q")' for name in "ab"]
TAKES: list[tuple[str, list[str], list[str], str]] = [
    ("one take", take("g", "4", HALVES), take("g", "4", WHOLE), "tp"),
    ("alike", take("g", "4", HALVES), take("g", "4", HALVES), ""),
    ("of other shapes", take("g", "4", HALVES), take("g", "2, 2", HALVES), "tp"),
    (
        "the second take",
        take("g", "4", HALVES) + take("g", "4", WHOLE),
        take("g", "4", HALVES) + take("g", "4", HALVES),
        "tp",
    ),
    (
        "another take",
        take("g", "4", HALVES) + take("g", "4", WHOLE),
        take("g", "4", HALVES) + take("g", "4", WHOLE),
        "",
    ),
    (
        "freed in another order",
        [*QUEUE, HALVES.format("a"), "main: free(a)", "main: free(b)"],
        [*QUEUE, WHOLE.format("a"), "main: free(b)", "main: free(a)"],
        "tp",
    ),
    (
        "slots in another order",
        take("g", "4", HALVES) + take("h", "4"),
        take("h", "4") + take("g", "4", WHOLE),
        "tp",
    ),
]


@pytest.mark.parametrize(
    ("first", "second", "teams"), [t[1:] for t in TAKES], ids=[t[0] for t in TAKES]
)
def test_takes_of_a_slot_by_two_programs(first: list[str], second: list[str], teams: str) -> None:
    """Rank 0's view of a take and rank 2's are views of one buffer, for a peer of either."""
    text = SLOTS.format("\n    ".join(first), "\n    ".join(second))
    sources = [lower(p, Regions(), number=k) for k, p in enumerate(parse_set(text))]
    assert turning(sources, ["tp"]) == {*teams.split()}
