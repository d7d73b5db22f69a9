"""Faults that the list of ops alone shows, wherever an op is: in a Group, a Fused, the return.

Each of these was missing from the tests when the checker's own code was mutated.
"""

from __future__ import annotations

import pytest

from interlace.errors import ProgramError
from interlace.ir import parse
from interlace.verify import Finding, check

HEAD = "def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n    "


def found(body: str, kind: str) -> Finding:
    """The one finding of that kind."""
    report = check(parse(HEAD + body.replace("; ", "\n    ") + "\n"))
    (finding,) = [each for each in report.errors if each.kind == kind]
    return finding


def test_a_use_before_the_line_that_allocates_is_refused() -> None:
    for op in ("free(t)", 'fused(part(call("aten.neg.out", t, out=y)))'):
        with pytest.raises(ProgramError, match="f, op 1: no buffer named 't' here"):
            found(f"main: copy(x, y); main: {op}; t = alloc(f32[4])", "")


def test_a_result_in_the_arena() -> None:
    finding = found("main: copy(x, y); t = alloc(f32[4]); main: copy(x, t); return t", "result")
    assert finding.message == "the result t lives in the arena, which the next run overwrites"
    assert finding.fix == "allocate t as fresh, or copy it to an output at the end"
    body = "s = alloc(f32[4], symmetric=tp); main: copy(x, y); main: copy(x, s); main: free(s)"
    slot = found(f"{body}; return s", "result")
    assert slot.message.startswith("the result s lives in a communication slot, which")


def test_an_output_of_which_a_part_is_returned_is_written_all_the_same() -> None:
    finding = found("main: copy(x[0:2], y[0:2]); return y[0:2]", "uninitialized")
    assert finding.ops[-1].buffer == "y"
    whole = parse(HEAD + "main: copy(x, y)\n    return y[0:2]\n")
    assert check(whole).sound


def test_a_wait_that_comes_before_its_record_names_the_record() -> None:
    finding = found("main: copy(x, y); main: record(g); side: wait(e); main: record(e)", "event")
    assert [ref.at[1] for ref in finding.ops] == [2, 3]
    assert "e" in finding.message
    alone = found("main: copy(x, y); main: record(g); side: wait(e)", "event")
    assert [ref.at[1] for ref in alone.ops] == [2]


def test_a_second_free_names_the_first() -> None:
    body = "t = alloc(f32[4]); main: copy(x, y); main: free(t); main: free(t)"
    finding = found(body, "double-free")
    assert [ref.at[1] for ref in finding.ops] == [2, 3]
    assert [ref.role for ref in finding.ops] == ["frees it first", "frees it again"]


def test_a_slot_that_is_not_freed_is_named() -> None:
    finding = found("big = alloc(f32[4], symmetric=tp); main: copy(x, y)", "leak")
    assert finding.ops[0].buffer == "big"
    assert "big" in finding.message
    assert "big" in finding.fix


# How a circle is told

CIRCLES: list[tuple[str, str, str, set[str]]] = [
    (
        "main: send(x, peer=tp.rank + 1); main: recv(y, peer=tp.rank + 1)",
        "ranks 0 and 1 wait for each other, in a circle",
        "issue what a peer waits for before what waits for a peer",
        {
            "0: waits for rank 0, line 2, which comes earlier on stream main",
            "0: waits for rank 1, line 3",
            "1: waits for rank 1, line 2, which comes earlier on stream main",
            "1: waits for rank 0, line 3",
        },
    ),
    (
        "main: copy(x, y); side: expect(s, tp.rank + 1); z = empty(f32[4]); side: all_reduce(x, z, "
        'reduce="sum", team=tp); main: all_reduce(x, y, reduce="sum", team=tp); '
        "main: notify(s, to=tp.rank + 1)",
        "ranks 0 and 1 wait for each other, in a circle",
        "issue what a peer waits for before what waits for a peer",
        {
            "1: waits for rank 1, line 6, which comes earlier on stream main",
            "0: waits for rank 0, line 5",
            "1: waits for rank 0, line 6",
            "0: waits for rank 0, line 3, which comes earlier on stream side",
            "0: waits for rank 1, line 7",
        },
    ),
    (
        'a = alloc(f32[4], symmetric=tp, storage="q"); b = alloc(f32[4], symmetric=tp, '
        'storage="q"); c = alloc(f32[4], symmetric=tp, storage="q"); main: copy(x, y); '
        "main: free(a); main: free(b); main: free(c)",
        "rank 0 waits for itself, in a circle",
        "free the buffer that held the slot before this take of it, on every rank",
        {
            "0: waits for rank 0, line 5, which comes earlier on stream main",
            "0: waits for rank 0, line 4, which comes earlier on stream main",
            "0: waits for rank 0, line 6",
        },
    ),
    (
        'main: fused(part(expect(s, tp.rank + 1), call("aten.neg.out", x, out=y)), '
        "part(notify(s, to=tp.rank + 1)))",
        "ranks 0 and 1 wait for each other, in a circle",
        "issue what a peer waits for before what waits for a peer",
        set(),
    ),
]


@pytest.mark.parametrize(("body", "message", "words", "roles"), CIRCLES)
def test_a_circle_names_its_ranks_and_why_each_op_waits(
    body: str, message: str, words: str, roles: set[str]
) -> None:
    finding = found(body, "deadlock")
    assert finding.message == message
    assert finding.fix.startswith(words)
    told = {f"{ref.rank}: {ref.role}" for ref in finding.ops}
    assert len(told) == len(finding.ops)
    if roles:
        assert told <= roles
        assert len(told) >= len(roles) - 1
    assert finding.ranks == tuple(sorted({ref.rank for ref in finding.ops}))


def test_a_slot_of_which_some_ranks_are_missing() -> None:
    program = parse(
        "def f(tp: Team[3], x: f32[4], y: out[f32[4]]):\n"
        "    full = alloc(f32[4], symmetric=tp)\n"
        "    main: copy(x, full)\n"
        "    main: barrier(team=tp)\n"
        "    main: get(full, y, peer=tp.rank + 1)\n"
        "    main: free(full)\n"
    )
    report = check(program.instantiate(1))
    told = [finding.message for finding in report.errors if finding.kind == "mismatch"]
    assert any("no Program of the set runs on rank 0" in message for message in told), report
