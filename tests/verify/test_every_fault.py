"""Every fault is told, once and with its own words, also where another one could hide it.

Each of these was missing from the tests when the checker's own code was mutated.
"""

from __future__ import annotations

from collections import Counter

import pytest

from interlace.ir import parse
from interlace.verify import Finding, Report, check, sweep

HEAD = "def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n    "
TWO = "def f(tp: Team[2], x: f32[4], y: out[f32[4]], z: out[f32[4]]):\n    "
FOUR = HEAD.replace("Team[2]", "Team[4]")
MATRIX = "def f(tp: Team[2], x: f32[4, 4], y: out[f32[4, 4]]):\n    "


def checked(body: str, head: str = HEAD) -> Report:
    return check(parse(head + body.replace("; ", "\n    ") + "\n"))


def kinds(report: Report) -> dict[str, int]:
    return dict(Counter(finding.kind for finding in report.findings))


def of_kind(report: Report, kind: str) -> Finding:
    (finding,) = [each for each in report.findings if each.kind == kind]
    return finding


# Accesses


@pytest.mark.parametrize(
    ("first", "second"), [("0:2", "2:4"), ("2:4", "0:2")], ids=["left", "right"]
)
def test_a_write_between_the_columns_of_another_does_not_stand_for_it(
    first: str, second: str
) -> None:
    """The second does not touch what the first writes, though their hulls meet."""
    report = checked(
        "t = empty(f32[4, 4]); main: record(e); side: wait(e); "
        f"main: copy(x[:, {first}], t[:, {first}]); side: copy(x[:, {second}], t[:, {second}]); "
        f"side: copy(t[:, {first}], y[:, {first}]); side: copy(t[:, {second}], y[:, {second}])",
        MATRIX,
    )
    assert kinds(report) == {"race": 1}
    assert [op.at[1] for op in report.errors[0].ops] == [3, 5]


@pytest.mark.parametrize("early", ["main", "side"])
def test_of_two_races_in_a_buffer_neither_is_told_as_a_read_of_nothing(early: str) -> None:
    writes = "main: copy(x[0:2], t[0:2]); main: copy(x[2:4], t[2:4])"
    reads = "side: copy(t[0:2], y[0:2]); side: copy(t[2:4], y[2:4])"
    order = (writes, reads) if early == "main" else (reads, writes)
    assert kinds(checked(f"t = empty(f32[4]); {'; '.join(order)}")) == {"race": 2}


def test_what_a_buffer_loses_to_another_away_from_the_start_of_their_storage() -> None:
    body = (
        't = alloc(f32[4], storage="s", offset=64); u = alloc(f32[2], storage="s", offset=64); '
        "main: copy(x, t); main: copy(x[0:2], u); "
    )
    assert checked(body + "main: copy(t[2:4], y[0:2]); main: copy(u, y[2:4])").sound
    report = checked(body + "main: copy(t[0:2], y[0:2]); main: copy(u, y[2:4])")
    assert kinds(report) == {"uninitialized": 1}
    message = "t is read after its bytes were overwritten through another buffer"
    assert report.errors[0].message == message


def test_a_read_of_what_nothing_wrote_is_not_told_as_overwritten() -> None:
    finding = of_kind(checked("t = empty(f32[4]); main: copy(t, y)"), "uninitialized")
    assert finding.message.startswith("t is read, and nothing wrote")


def test_whose_copy_of_a_slot_is_raced_for() -> None:
    report = checked(
        "t = alloc(f32[4], symmetric=tp); main: copy(x, t); "
        "main: get(t, y, peer=tp.rank + 1); main: free(t)"
    )
    roles = {(op.rank, op.role) for op in of_kind(report, "race").ops}
    assert roles in ({(0, "writes t"), (1, "reads t of rank 0")},
                     {(1, "writes t"), (0, "reads t of rank 1")})  # fmt: skip


# Deadlocks


def test_each_op_that_waits_for_what_never_comes() -> None:
    """The second expect of main is behind the first; the one of side is not."""
    lines = ["main: expect(s, tp.rank + 1)", "main: expect(u, tp.rank + 1)",
             "side: expect(v, tp.rank + 1)", "third: copy(x, y)"]  # fmt: skip
    programs = [parse(HEAD + "\n    ".join(lines) + "\n")]
    report = check(programs)
    assert kinds(report) == {"deadlock": 2}
    assert {finding.ops[0].at[1] for finding in report.errors} == {0, 2}
    for finding in report.errors:
        assert finding.ranks == (0, 1)
        assert finding.words.startswith(f"add what line {finding.ops[0].line} waits for: ")


@pytest.mark.parametrize("count", [2, 4, 6])
def test_each_circle_up_to_four(count: int) -> None:
    circles = [
        f"c{i}: expect(s{i}, tp.rank + 1); c{i}: notify(s{i}, to=tp.rank + 1)" for i in range(count)
    ]
    report = checked("main: copy(x, y); " + "; ".join(circles))
    assert kinds(report) == {"deadlock": min(count, 4)}


FUSED = "main: fused(part(expect(s, tp.rank + 1){0}), part(notify(s, to=tp.rank + 1)))"
NEG = ', call("aten.neg.out", x, out=y)'


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("main: expect(s, tp.rank + 1); main: record(e); side: wait(e); "
         "side: notify(s, to=tp.rank + 1); third: copy(x, y)", {2, 3, 4, 5}),
        ("main: expect(s, tp.rank + 1); main: host_sync(); side: notify(s, to=tp.rank + 1); "
         "side: copy(x, y)", {2, 3, 4}),
        (FUSED.format(NEG), {2}),
        (FUSED.format(NEG).replace("part(notify", "part(expect").replace("to=", "")
         + "; main: notify(s, to=tp.rank + 1)", {2, 3}),
    ],
    ids=["event", "host", "parts", "a fused op"],
)  # fmt: skip
def test_a_circle_through_what_orders_ops(body: str, lines: set[int]) -> None:
    finding = of_kind(checked(body), "deadlock")
    assert {op.line for op in finding.ops} == lines
    assert len(finding.ops) == len({(op.rank, op.role) for op in finding.ops})


def test_a_remark_on_launches_names_what_is_launched_first() -> None:
    finding = of_kind(
        checked("main: send(x, peer=tp.rank + 1); side: recv(y, peer=tp.rank - 1)"), "launch-order"
    )
    assert {op.role for op in finding.ops} == {"is launched first"}
    assert finding.ranks == (0, 1)


def test_a_use_that_peers_await_before_its_slot_is_taken() -> None:
    """The take awaits, by way of the peer, what follows the use."""
    report = checked(
        "main: copy(x, y); third: expect(go, tp.rank + 1); third: notify(back, to=tp.rank + 1); "
        'side: expect(back, tp.rank + 1); a = alloc(f32[4], symmetric=tp, stream="side"); '
        "main: copy(x, a); main: notify(go, to=tp.rank + 1); main: record(e); side: wait(e); "
        "side: free(a)"
    )
    assert kinds(report) == {"use-before-alloc": 1}
    assert [op.at[1] for op in report.errors[0].ops] == [4, 5]


def test_no_remark_on_launches_where_ops_never_come() -> None:
    report = checked(
        "main: expect(never, tp.rank + 1); main: send(x, peer=tp.rank + 1); "
        "side: recv(y, peer=tp.rank - 1)"
    )
    assert kinds(report) == {"deadlock": 1}


SHARED = 't = alloc(f32[4], storage="s"); u = alloc(f32[4], storage="s"); '


def test_a_free_stands_for_the_uses_before_it() -> None:
    """An op that races with them races with the Free, and is reported once."""
    later = "side: copy(x, y); " * 6 + "side: copy(x, u); side: copy(u, y)"
    report = checked(f"{SHARED}main: copy(x, t); main: free(t); {later}")
    assert kinds(report) == {"race": 2}
    assert all(finding.ops[0].text == "main: free(t)" for finding in report.errors)


# Limits


def test_after_so_many_faults_accesses_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "; ".join(f"s{number}: copy(x, y)" for number in range(4))
    assert kinds(checked(body)) == {"race": 6}
    monkeypatch.setattr(sweep, "MAX_FAULTS", 3)
    assert kinds(checked(body)) == {"race": 3}
