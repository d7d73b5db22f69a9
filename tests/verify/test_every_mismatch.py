"""Every disagreement of ranks is told, once and with its own words: what the mutants of
`verify/matching.py` showed to be missing from the tests."""

from __future__ import annotations

import re

import pytest

from interlace.ir import parse
from interlace.verify import Finding, check

IN = "x: f32[4], y: out[f32[4]]"
TABLES = "rows = table(tp, 2, 3, 4); own = table(tp, 6, 9, 12); other = table(tp, 2, 3, 5); "
CUT = "x: f32[9, 2], y: out[f32[own[tp.rank], 2]]"
MERGED = "x: f32[own[tp.rank], 2], y: out[f32[9, 2]]"
UNEVEN = TABLES + "main: all_to_all(x, y, team=tp, splits=rows)"


def found(*ranks: tuple[str, str], kind: str = "mismatch", teams: str = "") -> list[Finding]:
    """The findings of that kind, if each rank of a team has these parameters and these ops; ranks
    that have the same run one text."""
    size = len(ranks) if len(ranks) > 1 else 2
    head = teams or f"tp: Team[{size}]"
    programs = [
        parse(f"def f({head}, {params}):\n    " + body.replace("; ", "\n    ") + "\n")
        for params, body in ranks
    ]
    if len(ranks) > 1:
        programs = [program.instantiate(rank) for rank, program in enumerate(programs)]
    return [each for each in check(programs).findings if each.kind == kind]


def told(finding: Finding) -> tuple[str, list[tuple[int, str]]]:
    """The message after the colon, and each rank's role."""
    what = finding.message.partition(": ")[2]
    return what, [(op.rank, op.role) for op in finding.ops]


# Uneven parts


@pytest.mark.parametrize("params", [CUT, MERGED], ids=["cut", "merged"])
def test_uneven_parts_of_an_all_to_all_are_on_one_side(params: str) -> None:
    assert found(*[(params, UNEVEN)] * 3) == []


def test_the_side_that_is_cut() -> None:
    (finding,) = found((MERGED, UNEVEN), (MERGED, UNEVEN), (CUT, UNEVEN))
    assert told(finding) == (
        "its members disagree on the cut side",
        [(0, "has cut side destination"), (2, "has cut side source")],
    )


def test_tables_of_uneven_parts() -> None:
    other = UNEVEN.replace("splits=rows", "splits=other").replace("6, 9, 12", "6, 9, 15")
    cut = "x: f32[10, 2], y: out[f32[own[tp.rank], 2]]"
    (finding,) = found((CUT, UNEVEN), (CUT, UNEVEN), (cut, other))
    assert told(finding)[0] == "its members disagree on the splits"


COUNTS = "c: i64[2], "


def test_counts_that_are_data() -> None:
    """Ranks may have different numbers of rows; all take counts, or none."""
    by_counts = "main: all_to_all(x, y, sent=c, received=c, team=tp)"
    rows = [(f"{COUNTS}x: f32[{n}, 2], y: out[f32[{8 - n}, 2]]", by_counts) for n in (3, 5)]
    assert found(*rows) == []
    even = f"{COUNTS}x: f32[4, 2], y: out[f32[4, 2]]", "main: all_to_all(x, y, team=tp)"
    (finding,) = found(rows[0], even)
    assert told(finding)[0] == "its members disagree on the splits"
    assert [role for _, role in told(finding)[1]] == ["has splits data", "has splits even"]
    wide = f"{COUNTS}x: f32[4, 3], y: out[f32[4, 3]]", by_counts
    (finding,) = found(rows[0], wide)
    assert told(finding)[0] == "its members disagree on the source shape"


# One fault does not hide another, nor is it told twice


def test_only_the_first_collective_of_a_team_that_disagrees() -> None:
    bodies = [f'main: all_reduce(x, y, reduce="{r}", team=tp)' for r in ("sum", "max")]
    (finding,) = found(*((IN, f"{body}; {body}") for body in bodies))
    assert finding.message.startswith("collective 1 of team tp")
    assert finding.ranks == (0, 1)
    assert [op.role for op in finding.ops] == ["has reduction sum", "has reduction max"]


def test_the_same_line_agrees_in_one_team_and_not_in_another() -> None:
    teams = "tp: Team[[0, 1], [2, 3], [4, 5]], pp: Team[[0, 2, 4], [1, 5, 3]]"
    findings = found((IN, "main: broadcast(x, y, root=pp.rank, team=tp)"), teams=teams)
    assert [told(finding)[0] for finding in findings] == ["its members disagree on the root"] * 2
    assert [finding.ranks for finding in findings] == [(2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("send", "recv", "what"),
    [("x, peer=1", "h, peer=0", "element type"),
     ('x, peer=1, backend="gloo"', 'y, peer=0, backend="nccl"', "backend")],
)  # fmt: skip
def test_what_the_ends_of_a_message_disagree_on(send: str, recv: str, what: str) -> None:
    params = f"{IN}, h: out[i32[4]]"
    (finding,) = found((params, f"main: send({send})"), (params, f"main: recv({recv})"))
    assert told(finding)[0] == f"its ends disagree on the {what}"
    assert finding.ops[0].role.startswith(f"sends {what} ")


def test_messages_without_another_end() -> None:
    several = found(
        (IN, "main: send(x, peer=1); main: send(x, peer=1); side: recv(y, peer=1)"),
        (IN, "main: recv(y, peer=0); side: send(x, peer=0); side: send(x, peer=0)"),
    )
    assert [[op.role for op in each.ops] for each in several] == [["has no other end"]] * 2
    ring = "def f(tp: Team[3], x: f32[4], y: out[f32[4]]):\n    main: send(x, peer=tp.rank + 1)\n"
    report = check(parse(ring + "    main: copy(x, y)\n"))
    assert [finding.kind for finding in report.errors].count("mismatch") == 1, "one for all ranks"


def test_members_that_name_different_backends() -> None:
    body = 'main: all_reduce(x, y, reduce="sum", team=tp, backend="{}"); main: barrier(team=pp)'
    findings = found(
        (IN, body.format("gloo")),
        (IN, body.format("nccl")),
        teams="tp: Team[2], pp: Team[[0, 1]]",
    )
    assert len(findings) == 2
    for finding in findings:
        assert re.search("1 collective of team tp on backend (gloo|nccl) in a", finding.message)


# Signals


@pytest.mark.parametrize("ordered", [True, False])
def test_notifies_that_never_come_may_be_in_order_all_the_same(ordered: bool) -> None:
    event = "main: record(e); side: wait(e); " if ordered else "side: expect(never, tp.rank + 1); "
    body = (
        "main: expect(never, tp.rank + 1); main: notify(s, to=tp.rank + 1, value=1); "
        f"{event}side: notify(s, to=tp.rank + 1, value=2); main: copy(x, y)"
    )
    assert len(found((IN, body), kind="signal")) == (not ordered)


def test_values_that_do_not_grow_beside_those_in_no_order() -> None:
    down = "main: notify(s, to=tp.rank + 1, value=2); side: notify(s, to=tp.rank + 1, value=1)"
    (finding,) = found(
        (IN, f"{down}; main: copy(x, y); main: expect(s, tp.rank + 1)"), kind="signal"
    )
    assert finding.message == "signal s from rank 0 to rank 1 does not grow"
    assert finding.words == "give the later notify a larger value"
    ordered = "main: notify(s, to=tp.rank + 1, value=1); main: notify(s, to=tp.rank + 1, value=2)"
    body = f"{ordered}; side: notify(s, to=tp.rank + 1, value=3); main: copy(x, y)"
    (finding,) = found((IN, f"{body}; main: expect(s, tp.rank + 1)"), kind="signal")
    assert [op.role for op in finding.ops] == ["raises it to 2", "raises it to 3"]
