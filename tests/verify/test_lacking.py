"""Collectives that some ranks of a team lack, or issue otherwise: messages and fixes."""

from __future__ import annotations

import pytest

from interlace.ir import Program, parse_set
from interlace.verify import Finding, check
from interlace.verify.edits import apply

TEAMS = "tp: Team[[0, 1, 2]], pp: Team[[0, 1, 2]], me: Team[[2]]"
HEAD = f"({TEAMS}, x: f32[2], y: out[f32[6]], z: f32[6], s: f32[2]):\n    ranks("


def programs(most: str, last: str) -> tuple[Program, ...]:
    """The Programs of ranks 0 and 1, and of rank 2."""
    texts = [
        f"def {name}{HEAD}{ranks})\n" + "".join(f"    main: {op}\n" for op in body.split("; "))
        for name, ranks, body in (("most", "0, 1", most), ("last", "2", last))
    ]
    return tuple(parse_set("\n\n".join(texts).replace("main: comm:", "comm:")))


def first(most: str, last: str) -> Finding:
    report = check(programs(most, last))
    return next(finding for finding in report.errors if finding.kind == "mismatch")


NEG, MEET, COPY = 'call("aten.neg.out", z, out=y)', "barrier(team=tp)", "copy(z, y)"
ZERO, ONE = (f"broadcast(x, s, root={root}, team=tp)" for root in (0, 1))
GATHER, EACH = "all_gather(x, y, team=tp)", "all_to_all(z, y, team=tp)"
SUM, MAX = (f'all_reduce(x, s, reduce="{name}", team=tp)' for name in ("sum", "max"))
ABS = NEG.replace("neg", "abs")
OWN = 'all_reduce(x, s, reduce="sum", team=me)'
LATER = f"comm: {MEET}; comm: {ZERO}; comm: {ONE}"

# What ranks 0 and 1 issue, what rank 2 issues, and the fix.
FIXES: dict[str, tuple[str, str, str]] = {
    "a root": (
        f"{NEG}; {ZERO}",
        f"{NEG}; {ONE}",
        "replace line 10 on rank 2 by `main: broadcast(x, s, root=0, team=tp)`",
    ),
    "a root, after another collective": (
        f"{NEG}; {MEET}; {ZERO}",
        f"{NEG}; {MEET}; {ONE}",
        "replace line 12 on rank 2 by `main: broadcast(x, s, root=0, team=tp)`",
    ),
    "another root, and what it was replaced by": (
        f"{NEG}; {ONE}; {MEET}; {SUM}; {ZERO}",
        f"{NEG}; {ZERO}; {MEET}; {SUM}",
        "replace line 13 on rank 2 by `main: broadcast(x, s, root=1, team=tp)`, after "
        "line 15 on rank 2 add `main: broadcast(x, s, root=0, team=tp)`",
    ),
    "after hundreds of one kind": (
        "; ".join([NEG, *["copy(x, s)"] * 230, MEET]),
        "; ".join([NEG, *["copy(x, s)"] * 230]),
        "after line 469 on rank 2 add `main: barrier(team=tp)`",
    ),
    "a reduction": (
        f"{NEG}; {SUM}",
        f"{NEG}; {MAX}",
        'replace line 10 on rank 2 by `main: all_reduce(x, s, reduce="sum", team=tp)`',
    ),
    "a kind": (
        f"{NEG}; {ZERO}",
        f"{NEG}; {MAX}",
        "replace line 10 on rank 2 by `main: broadcast(x, s, root=0, team=tp)`",
    ),
    "one between others": (
        f"{NEG}; {ZERO}; {MEET}; {ONE}",
        f"{NEG}; {ZERO}; {ONE}",
        "after line 12 on rank 2 add `main: barrier(team=tp)`",
    ),
    "several": (
        f"{NEG}; {ZERO}; {MEET}; {ONE}; {EACH}",
        f"{NEG}; {ONE}; {COPY}",
        "after line 12 on rank 2 add `main: broadcast(x, s, root=0, team=tp)` then "
        "`main: barrier(team=tp)`, after line 13 on rank 2 add `main: all_to_all(z, y, "
        "team=tp)`",
    ),
    "one too many": (
        NEG,
        f"{NEG}; {MEET}",
        "remove line 9 on rank 2",
    ),
    "another team meets before": (
        f"barrier(team=pp); {NEG}; {MEET}",
        f"barrier(team=pp); {NEG}",
        "after line 11 on rank 2 add `main: barrier(team=tp)`",
    ),
    "one in place of two": (
        f"{NEG}; {MEET}; {ZERO}",
        f"{NEG}; {ONE}",
        "remove line 11 on rank 2, after line 10 on rank 2 add `main: barrier(team=tp)` "
        "then `main: broadcast(x, s, root=0, team=tp)`",
    ),
    "another root, and one that lacks": (
        f"{NEG}; {ZERO}; {MEET}; {EACH}",
        f"{NEG}; {ONE}; {MEET}",
        "replace line 12 on rank 2 by `main: broadcast(x, s, root=0, team=tp)`, after "
        "line 13 on rank 2 add `main: all_to_all(z, y, team=tp)`",
    ),
    "after the last that all issue": (
        f"{NEG}; {LATER}",
        f"{NEG}; {MEET}; {ZERO}",
        "after line 13 on rank 2 add `comm: broadcast(x, s, root=1, team=tp)`",
    ),
    "before the next that all issue": (
        f"{COPY}; {MEET}; {ZERO}",
        f"{ZERO}; {COPY}",
        "before line 10 on rank 2 add `main: barrier(team=tp)`",
    ),
    "before the first op": (
        f"{MEET}; {NEG}",
        NEG,
        "before line 9 on rank 2 add `main: barrier(team=tp)`",
    ),
    "after the first op": (
        f"{COPY}; {MEET}",
        f"{COPY}; copy(x, s)",
        "after line 9 on rank 2 add `main: barrier(team=tp)`",
    ),
    "after the same operator": (
        f"{NEG}; {MEET}",
        f"{ABS}; {NEG}; copy(x, s)",
        "after line 10 on rank 2 add `main: barrier(team=tp)`",
    ),
    "after the same event": (
        f"record(e); {MEET}; {COPY}",
        f"record(d); record(e); {COPY}",
        "after line 11 on rank 2 add `main: barrier(team=tp)`",
    ),
    "after the same signal": (
        f"notify(n, to=tp.rank + 1); {MEET}; {COPY}",
        f"notify(m, to=tp.rank + 1); notify(n, to=tp.rank + 1); {COPY}",
        "after line 11 on rank 2 add `main: barrier(team=tp)`",
    ),
    "after the same kind of op": (
        f"{COPY}; {MEET}",
        f"host_sync(); {COPY}; copy(x, s)",
        "after line 10 on rank 2 add `main: barrier(team=tp)`",
    ),
    "after the same kind of collective": (
        f"barrier(team=pp); {MEET}; {COPY}",
        f"{OWN}; barrier(team=pp); {COPY}",
        "after line 11 on rank 2 add `main: barrier(team=tp)`",
    ),
    "the first op moved": (
        f"{GATHER}; {MEET}",
        f"{MEET}; {GATHER}",
        "before line 9 on rank 2 add `main: all_gather(x, y, team=tp)`, remove line 10 on rank 2",
    ),
    "one moved, others added": (
        f"{MEET}; {ONE}; {GATHER}; {ZERO}",
        f"{ZERO}; {GATHER}",
        "before line 11 on rank 2 add `main: barrier(team=tp)` then `main: broadcast(x, "
        "s, root=1, team=tp)` then `main: all_gather(x, y, team=tp)`, remove line 12 on rank 2",
    ),
    "one among hundreds": (
        "; ".join([*[MEET] * 230, ZERO, MEET, COPY]),
        "; ".join([*[MEET] * 231, COPY]),
        "after line 469 on rank 2 add `main: broadcast(x, s, root=0, team=tp)`",
    ),
}


@pytest.mark.parametrize(("most", "last", "fix"), FIXES.values(), ids=FIXES)
def test_what_makes_all_ranks_issue_the_same(most: str, last: str, fix: str) -> None:
    finding = first(most, last)
    assert finding.fix == fix
    assert check(apply(programs(most, last), finding.edits).programs).sound
