"""insert_sync: events where they are needed, none where something else orders."""

from __future__ import annotations

import pytest

from interlace.ir import Program, Record, Wait, parse
from interlace.passes.insert_sync import InsertSync, strip_events
from interlace.verify import check

HEAD = "def p(tp: Team[2], x: f32[4, 4], y: f32[4, 4], a: out[f32[4, 4]], b: out[f32[4, 4]]):\n"


def program(*lines: str) -> Program:
    """A Program of these statements."""
    return parse(HEAD + "".join(f"    {line}\n" for line in lines))


def events(result: Program) -> tuple[int, int]:
    """How many Records and Waits there are."""
    records = sum(isinstance(op, Record) for op in result.ops)
    return records, sum(isinstance(op, Wait) for op in result.ops)


def races(result: Program) -> bool:
    """Whether the verifier finds a race. (What these Programs read may never have been written.)"""
    return any(finding.kind == "race" for finding in check(result).findings)


CASES = {
    "one stream needs none": (("main: copy(x, a)", "main: copy(a, b)"), (0, 0)),
    "no dependency needs none": (("main: copy(x, a)", "comm: copy(y, b)"), (0, 0)),
    "two reads need none": (("main: copy(x, a)", "comm: copy(x, b)"), (0, 0)),
    "read after write": (("main: copy(x, a)", "comm: copy(a, b)"), (1, 1)),
    "write after read": (("main: copy(x, a)", "comm: copy(y, x)"), (1, 1)),
    "write after write": (("main: copy(x, a)", "comm: copy(y, a)"), (1, 1)),
    "other rows need none": (("main: copy(x[0:2], a[0:2])", "comm: copy(a[2:4], b[0:2])"), (0, 0)),
    "stream order implies the second": (
        ("main: copy(x, a)", "comm: copy(a, b)", "comm: copy(a, y)"),
        (1, 1),
    ),
    "the later of two implies the earlier": (
        ("main: copy(x, a)", "main: copy(x, b)", 'comm: call("aten.add.out", a, b, out=y)'),
        (1, 1),
    ),
    "one record serves two streams": (
        ("main: copy(x, a)", "comm: copy(a[0:2], b[0:2])", "side: copy(a[2:4], b[2:4])"),
        (1, 2),
    ),
    "a path through a third stream implies the direct one": (
        ("main: copy(x, a)", "comm: copy(a, b)", 'side: call("aten.add.out", a, b, out=y)'),
        (2, 2),
    ),
    "back and forth": (
        ("main: copy(x, a)", "comm: copy(a, b)", "main: copy(b, x)", "comm: copy(x, y)"),
        (3, 3),
    ),
    "the host's wait orders what comes after": (
        ("main: copy(x, a)", "main: host_sync()", "comm: copy(a, b)"),
        (0, 0),
    ),
    "random numbers keep their order": (
        (
            'main: call("aten.rand_like.default", x, out=(r := f32[4, 4]), rng=True)',
            'comm: call("aten.rand_like.default", x, out=(s := f32[4, 4]), rng=True)',
        ),
        (1, 1),
    ),
}


@pytest.mark.parametrize(("lines", "count"), CASES.values(), ids=CASES)
def test_fewest_events(lines: tuple[str, ...], count: tuple[int, int]) -> None:
    before = program(*lines)
    after = InsertSync().run(before)
    assert events(after) == count, str(after)
    assert strip_events(after) == before
    assert not races(after)
    assert races(before) == (count != (0, 0)), "the events are what keeps the races away"


def test_a_wait_stands_before_its_op_and_a_record_after_its_source() -> None:
    after = InsertSync().run(
        program("main: copy(x, a)", "main: copy(x, y)", "comm: copy(y, b)", "comm: copy(a, x)")
    )
    text = [str(type(op).__name__) for op in after.ops]
    assert text == ["Copy", "Copy", "Record", "Wait", "Copy", "Copy"]


def test_signals_need_no_event() -> None:
    before = parse(
        "def p(tp: Team[2], x: f32[2, 4], y: out[f32[4, 4]]):\n"
        "    full = alloc(f32[4, 4], symmetric=tp)\n"
        "    main: copy(x, full[tp.rank])\n"
        "    main: notify(ready, to=tp.rank + 1)\n"
        "    comm: expect(ready, tp.rank + 1)\n"
        "    comm: get(full[tp.rank + 1], peer=tp.rank + 1)\n"
        "    main: copy(full, y)\n"
        "    main: free(full)\n"
    )
    after = InsertSync().run(before)
    assert check(after).sound
    # main's alloc before comm's first use, and comm's rows before main's copy
    assert events(after) == (2, 2), str(after)
