"""Messages about bytes that nothing wrote: which rows, and which ops come too late."""

from __future__ import annotations

import pytest

from interlace.ir import parse, parse_set
from interlace.verify import Finding, check
from interlace.verify.accesses import unwritten


def found(body: str, teams: str = "") -> Finding:
    """The first read of what nothing wrote."""
    lines = "".join(f"    {line.strip()}\n" for line in body.splitlines())
    head = f"def f({teams}x: f32[2, 12], v: f32[12], y: out[f32[4, 4]]):\n"
    report = check(parse(head + lines))
    return next(one for one in report.errors if one.kind == "uninitialized")


def fill(*views: str) -> str:
    return "".join(f"main: call('aten.full.out', (1,), 1, out={view})\n" for view in views)


READ = 'main: call("aten.sum.out", {}, out=y)'
ALL = READ.format("t")
T = "t = alloc(f32[4, 4])\n"
WORDS = {
    "elements": (
        "t = alloc(f32[8])\n" + fill("t[0:2]", "t[4:5]") + ALL, "elements 2 to 3 and 5 to 7",
    ),
    "one element": ("t = alloc(f32[8])\n" + fill("t[0:2]", "t[3:8]") + ALL, "element 2"),
    "a row": (T + fill("t[0:1]", "t[2:4]") + ALL, "row 1"),
    "two rows": (T + fill("t[1:2]", "t[3:4]") + ALL, "rows 0 and 2"),
    "four rows": (
        "t = alloc(f32[8, 2])\n" + fill("t[1:2]", "t[3:4]", "t[5:6]", "t[7:8]") + ALL,
        "rows 0, 2, 4 and 6",
    ),
    "five rows": (
        "t = alloc(f32[9, 2])\n" + fill("t[1:2]", "t[3:4]", "t[5:6]", "t[7:8]") + ALL,
        "rows 0, 2, 4, 6 and more",
    ),
    "elements of a row": (
        "t = alloc(f32[2, 2, 2])\n" + fill("t[0:1]", "t[1:2].slice(2, 0, 1)") + ALL,
        "part of row 1",
    ),
    "a run over rows": (
        "t = alloc(f32[3, 4])\n" + fill("t.view(12)[0:2]", "t.view(12)[10:12]") + ALL,
        "part of rows 0 to 2",
    ),
    "five parts": (
        "t = alloc(f32[5, 6])\n" + fill(*(f"t[{i}:{i + 1}].slice(1, {i}, 6)" for i in range(1, 5)))
        + fill("t[0:1].slice(1, 0, 5)") + "main: copy(v[0:1].view(1, 1), t[4:5].slice(1, 0, 1))\n"
        + ALL,
        "part of rows 0 to 4",
    ),
    "a column, written in part": (
        T + fill("t[0:1].slice(1, 0, 1)", "t[2:3]") + READ.format("t.slice(1, 0, 1)"),
        "part of rows 1 and 3",
    ),
    "a row, of which a column is written": (
        T + fill("t.slice(1, 0, 1)") + READ.format("t[3:4]"), "part of row 3",
    ),
    "a buffer with gaps": (
        "t = alloc(f32[2, 2].strides(3, 1))\n" + fill("t[0:1]") + ALL, "elements 3 to 4",
    ),
    "a number": ("t = alloc(f32[()])\n" + ALL, "element 0"),
    "beside a buffer of another shape": (
        "t = alloc(f32[4])\n" + fill("t[0:1]") + 'main: call("aten.mul.out", x, t, out=y)',
        "elements 1 to 3",
    ),
    "beside the same bytes of another buffer": (
        't = alloc(f32[12])\nmain: call("aten.add.out", x[0:1].view(12), t, out=y)',
        "elements 0 to 11",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "what"), WORDS.values(), ids=WORDS)
def test_what_nothing_wrote(body: str, what: str) -> None:
    finding = found(body)
    assert finding.message == f"t is read, and nothing wrote {what} of t before"
    assert "too late" not in finding.fix


def test_rows_by_a_table_are_those_of_the_rank() -> None:
    body = "rows = table(tp, 2, 3)\nt = alloc(f32[rows[tp.rank], 2])\n" + fill("t[0:1]") + ALL
    finding = found(body, "tp: Team[2], ")
    assert finding.message == "t is read, and nothing wrote row 1 of t before"


def test_what_the_root_alone_gets() -> None:
    body = "t = alloc(f32[24])\nmain: gather(v, t, root=0, team=tp)\n" + ALL
    finding = found(body, "tp: Team[2], ")
    assert finding.ranks == (1,)
    assert finding.message == "t is read, and nothing wrote elements 0 to 23 of t before"


def test_members_of_one_op_write_when_they_end() -> None:
    group = "main: group(send(v[0:4], peer=tp.rank + 1), recv(t[0:1], peer=tp.rank + 1))\n"
    finding = found(T + group + fill("t[1:2]") + ALL, "tp: Team[2], ")
    assert finding.message == "t is read, and nothing wrote rows 2 to 3 of t before"
    assert "too late" not in finding.fix
    part = 'part(call("aten.full.out", (1,), 1, out=t[0:1]), call("aten.sum.out", t, out=y))'
    finding = found(f"{T}main: fused({part})\n")
    assert finding.message == "t is read, and nothing wrote rows 1 to 3 of t before"


LATE = T + fill("t.slice(1, 0, 1)") + READ.format("t.slice(1, 0, 2)") + "\n"
LATE += fill("t[2:4]", "t.slice(1, 2, 4)", "t[0:1]", "t.slice(1, 1, 2)")


def test_ops_that_come_too_late() -> None:
    """The second of them writes other columns."""
    finding = found(LATE)
    assert finding.message == "t is read, and nothing wrote part of rows 0 to 3 of t before"
    late = ", ".join(f"line {line} on rank 0" for line in (5, 7, 8))
    assert finding.fix.endswith(f"before line 4 (too late for that: {late})")


def test_where_runs_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes some of what is read is told."""
    monkeypatch.setattr(unwritten, "byte_runs", lambda box: None)
    finding = found(LATE)
    assert finding.message == "t is read, and nothing wrote some bytes of t before"
    late = ", ".join(f"line {line} on rank 0" for line in (5, 7, 8))
    assert finding.fix.endswith(f"before line 4 (too late for that: {late})")


def test_ops_of_two_programs_that_come_too_late() -> None:
    text = """
def first(tp: Team[[0, 1, 2]], y: out[f32[4]]):
    ranks(0)
    s = alloc(f32[4], symmetric=tp)
    main: copy(s, y)
    main: barrier(team=tp)
    main: barrier(team=tp)
    main: free(s)
"""
    text += "".join(
        f"""

def rank_{rank}(tp: Team[[0, 1, 2]], x: f32[2]):
    ranks({rank})
    s = alloc(f32[4], symmetric=tp)
    main: barrier(team=tp)
    main: put(x, s[{rank * 2 - 2}:{rank * 2}], peer=0)
    main: barrier(team=tp)
    main: free(s)
"""
        for rank in (1, 2)
    )
    (finding,) = check(parse_set(text)).errors
    assert finding.message == "s is read, and nothing wrote elements 0 to 3 of s before"
    assert finding.fix.endswith("(too late for that: line 15 on rank 1, line 24 on rank 2)")
