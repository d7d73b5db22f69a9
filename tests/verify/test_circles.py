"""Search for a deadlock's circle, and its report, where `test_lists` and `test_every_fault` have
no schedule for it: slots, messages of a rank to itself, several circles in one knot."""

from __future__ import annotations

import pytest

from interlace.ir import parse_set
from interlace.verify import Report, check

HEAD = "x: f32[4], y: out[f32[4]], z: out[f32[4]]"
SLOTS = "; ".join(f'{name} = alloc(f32[4], symmetric=tp, storage="q")' for name in "ab")


def checked(*bodies: str, team: str = "Team[2]") -> Report:
    """Checks one body for all ranks, or one for each."""
    text = ""
    for rank, body in enumerate(bodies):
        lines = ([f"rank({rank})"] if len(bodies) > 1 else []) + body.split("; ")
        text += f"def r{rank}(tp: {team}, {HEAD}):\n    " + "\n    ".join(lines) + "\n\n"
    return check(parse_set(text))


def told(report: Report) -> list[tuple[int, int, str]]:
    """The links of the first circle, from its least rank and line: rank, line, why."""
    first = next(found for found in report.errors if found.kind == "deadlock")
    links = [(op.rank, op.line, op.role.removeprefix("waits for ")) for op in first.ops]
    at = links.index(min(links))
    return links[at:] + links[:at]


def test_a_slot_that_comes_back_with_a_free_of_a_peer() -> None:
    report = checked(
        f'{SLOTS}; c = alloc(f32[4], symmetric=tp, storage="q", stream="side"); '
        "side: notify(go, to=tp.rank + 1); main: copy(x, y); main: copy(x, z); "
        "main: expect(go, tp.rank + 1); main: free(a); main: free(b); side: free(c)"
    )
    assert told(report) == [
        (0, 8, "rank 1, line 5"),
        (1, 5, "rank 1, line 4, which comes earlier on stream side"),
        (1, 4, "rank 0, line 9"),
        (0, 9, "rank 0, line 8, which comes earlier on stream main"),
    ]


def test_a_message_of_a_rank_to_itself() -> None:
    later = checked(
        "main: copy(x, z); main: expect(s, tp.rank + 1); main: send(x, peer=tp.rank); "
        "side: recv(y, peer=tp.rank); side: notify(s, to=tp.rank + 1)"
    )
    assert (0, 5, "rank 0, line 4") in told(later)


def test_a_meeting_that_one_member_has_come_to() -> None:
    """Rank 0 has: it is no part of the circle."""
    meets = 'main: copy(x, z); main: all_reduce(x, y, reduce="sum")'
    report = checked(
        meets,
        f"{meets}; main: notify(s, to=2)",
        f"main: expect(s, 1); {meets}",
        team="Team[3]",
    )
    assert {rank for rank, _, _ in told(report)} == {1, 2}


REDUCE = 'main: all_reduce(x, y, reduce="sum", team=tp)'

NEVER: list[tuple[tuple[str, ...], str, list[tuple[int, int, str]]]] = [
    (
        (f"{REDUCE}; {REDUCE}", f"{REDUCE}; main: copy(x, z)", f"{REDUCE}; {REDUCE}"),
        "Team[3]",
        [
            (rank, line, "rank 1 to issue a collective of team tp: it issues 1 in a run, and this "
             "rank 2")
            for rank, line in ((0, 4), (2, 14))
        ],
    ),
    (
        ("main: send(x, peer=1); main: send(x, peer=1)", "main: recv(y, peer=0)"),
        "Team[2]",
        [(0, 4, "rank 1 to receive message 2 of team tp from rank 0 to rank 1, which it never "
          "does")],
    ),
    (
        ("main: send(x, peer=1)", "main: recv(y, peer=0); main: recv(y, peer=0)"),
        "Team[2]",
        [(1, 8, "rank 0 to send message 2 of team tp from rank 0 to rank 1, which it never does")],
    ),
    (
        ("main: copy(x, y); main: notify(s, to=tp.rank + 1, value=2); "
         "main: expect(s, tp.rank + 1, value=3)",),
        "Team[2]",
        [(0, 4, "rank 1 to raise signal s to 3, and it raises it to 2 at most")],
    ),
    (
        ("main: copy(x, y); main: expect(s, tp.rank + 1)",),
        "Team[2]",
        [(0, 3, "rank 1 to raise signal s to 1, and it never raises it")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("bodies", "team", "wanted"), NEVER)
def test_what_never_comes_is_named(
    bodies: tuple[str, ...], team: str, wanted: list[tuple[int, int, str]]
) -> None:
    found = [each for each in checked(*bodies, team=team).errors if each.kind == "deadlock"]
    assert [each.message for each in found] == [
        f"an op waits forever, for {why}" for _, _, why in wanted
    ]
    assert [
        (op.rank, op.line, op.role.removeprefix("waits for "))
        for op in (each.ops[0] for each in found)
    ] == wanted
