"""Reads the fix of a finding as a person would, and edits the text of the Programs to the letter.

It shares nothing with `interlace.verify.fixes`: a sentence goes in and the lines of a file change.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator

from tests.fuzzing.sets import random_set

from interlace.errors import ProgramError
from interlace.ir import Expect, Notify, Op, Program, Record, Wait, parse_set, print_set, validate
from interlace.verify import Finding, check

RANK = r"(?: on ranks? (?P<rank>\d+)(?: to \d+|, \d+)*)?"
CLAUSES = (
    re.compile(rf"(?P<side>after|before) line (?P<at>\d+){RANK} add `(?P<new>[^`]*)`"),
    re.compile(rf"(?P<side>at the end){RANK} add `(?P<new>[^`]*)`"),
)


def clauses(fix: str) -> Iterator[dict[str, str | None]]:
    """The changes that a sentence asks for."""
    at = 0
    while at < len(fix):
        found = next((m for clause in CLAUSES if (m := clause.match(fix, at))), None)
        assert found is not None, f"not understood: {fix[at:]!r} of {fix!r}"
        yield found.groupdict()
        at = found.end()
        assert fix[at : at + 2] in (", ", ""), fix[at:]
        at += 2


def literally(text: str, fix: str) -> str:
    """The text of a file with a fix applied to its lines."""
    lines = text.splitlines()
    defs = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    spans = {op.lineno: op.end_lineno or op.lineno for one in defs for op in one.body}
    before: dict[int, list[str]] = {}
    after: dict[int, list[str]] = {}
    for clause in clauses(fix):
        put, at = f"    {clause['new']}", clause.get("at")
        if at is not None:
            (after if clause["side"] == "after" else before).setdefault(int(at), []).append(put)
            continue
        last = defs[_which(defs, clause.get("rank"))].body[-1]
        where = before if isinstance(last, ast.Return) else after
        where.setdefault(last.lineno, []).append(put)
    edited: list[str] = []
    number = 1
    while number <= len(lines):
        stop = spans[number] if number in before or number in after else number
        edited += [*before.get(number, []), *lines[number - 1 : stop], *after.get(number, [])]
        number = stop + 1
    return "\n".join(edited) + "\n"


def _which(defs: list[ast.FunctionDef], rank: str | None) -> int:
    """The Program that a rank runs."""
    if len(defs) == 1 or rank is None:
        return 0
    own = [
        k
        for k, one in enumerate(defs)
        for stmt in one.body
        if ast.unparse(stmt).replace(" ", "") == f"rank({rank})"
    ]
    assert len(own) == 1, rank
    return own[0]


def single(programs: list[Program]) -> tuple[str, Finding] | None:
    """The text of Programs and what is wrong with them, if that is one thing."""
    report = check(programs)
    if len(report.errors) != 1 or report.num_left_out:
        return None
    text = print_set(programs)
    (finding,) = check(parse_set(text, file="drawn.ilc")).errors
    return text, finding


def faulty(rng: random.Random) -> Iterator[list[Program]]:
    """Programs drawn by chance; and where they are sound, these without one edge."""
    programs = random_set(rng, rng.randint(2, 8))
    yield programs
    if not check(programs).sound:
        return
    for k, program in enumerate(programs):
        for op in program.ops:
            if isinstance(op, Wait | Expect | Record):
                gone = [other for other in program.ops if _same_edge(op, other)]
                ops = tuple(other for other in program.ops if other not in gone)
                yield [*programs[:k], program.replace(ops=ops), *programs[k + 1 :]]


def _same_edge(one: Op, other: Op) -> bool:
    if isinstance(one, Expect):
        return isinstance(other, Expect | Notify) and other.signal == one.signal
    return other is one


def fixed(text: str, fix: str) -> list[Program]:
    """The Programs of a text with a fix applied, well-formed if they were so before."""
    programs = list(parse_set(literally(text, fix), file="fixed.ilc"))
    for old, new in zip(parse_set(text), programs, strict=True):
        if _well_formed(old):
            validate(new)
    return programs


def _well_formed(program: Program) -> bool:
    try:
        validate(program)
    except ProgramError:
        return False
    return True
