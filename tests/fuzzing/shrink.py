"""Makes a set of Programs on which checker and oracle disagree as small as it can, by leaving out.

    case = shrink(Case(programs, runs=3), persists)
    print(case.num_ops)

What is left out: runs, ops (many at first, then one, two, or what ranks do together), members of a
`fused` or a `group`, and at last results, parameters, tables and teams that nothing names. An SPMD
Program becomes a set of one Program for each rank where that lets more be left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from interlace.ir.ops import Collective, Fused, Group, Op
from interlace.ir.program import Program

MAX_OPS = 8
"""As small as a case is meant to become."""
MAX_TRIED = 4_000


class Case(NamedTuple):
    """A set of Programs, and the runs in which it is explored."""

    programs: tuple[Program, ...]
    runs: int

    @property
    def num_ops(self) -> int:
        """Ops in all lists, each member of a `fused` or a `group` for itself."""
        return sum(_weight(op) for program in self.programs for op in program.ops)

    @property
    def size(self) -> tuple[int, int, int]:
        """The size to reduce: ops, runs, and declarations."""
        declared = sum(
            len(p.params) + len(p.teams) + len(p.tables) + len(p.results or ())
            for p in self.programs
        )
        return self.num_ops, self.runs, declared


def shrink(case: Case, persists: Callable[[Case], bool], most: int = MAX_TRIED) -> Case:
    """The smallest case found, after `most` tries at most, of which `persists` still holds."""
    left = [most]

    def tried(one: Case) -> bool:
        left[0] -= 1
        return left[0] >= 0 and persists(one)

    small = _least(case, tried)
    if small.num_ops > MAX_OPS and any(program.rank is None for program in small.programs):
        ranks = tuple(p.instantiate(rank) for p in small.programs for rank in p.world)
        apart = Case(ranks, small.runs)
        if tried(apart):
            small = min(small, _least(apart, tried), key=lambda one: one.size)
    return small


def _least(case: Case, tried: Callable[[Case], bool]) -> Case:
    """Takes steps until none is left."""
    while True:
        for one in _smaller(case):
            if one.size < case.size and tried(one):
                case = one
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Smaller cases, those that leave most out first."""
    for runs in range(1, case.runs):
        yield case._replace(runs=runs)
    spots = [(k, i) for k, program in enumerate(case.programs) for i in range(len(program.ops))]
    length = len(spots) // 2
    while length > 1:
        for start in range(0, len(spots), length):
            yield _without(case, spots[start : start + length])
        length //= 2
    for together in _alike(case):
        yield _without(case, together)
    for spot in spots:
        yield _without(case, [spot])
    for k, i in spots:
        for op in _lesser(case.programs[k].ops[i]):
            yield _with(case, k, i, op)
    for pair in combinations(spots, 2):
        yield _without(case, pair)
    yield from _undeclared(case)


def _without(case: Case, spots: Sequence[tuple[int, int]]) -> Case:
    gone = {*spots}
    programs = [
        program.replace(ops=tuple(op for i, op in enumerate(program.ops) if (k, i) not in gone))
        for k, program in enumerate(case.programs)
    ]
    return case._replace(programs=tuple(programs))


def _with(case: Case, k: int, i: int, ops: Sequence[Op]) -> Case:
    programs = list(case.programs)
    old = programs[k].ops
    programs[k] = programs[k].replace(ops=(*old[:i], *ops, *old[i + 1 :]))
    return case._replace(programs=tuple(programs))


def _alike(case: Case) -> Iterator[list[tuple[int, int]]]:
    """Yields ops that ranks do together: the k-th op of a sort in each list."""
    found: defaultdict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    for k, program in enumerate(case.programs):
        count: defaultdict[tuple[object, ...], int] = defaultdict(int)
        for i, op in enumerate(program.ops):
            sort = (type(op), *(getattr(op, name, None) for name in ("kind", "event", "signal")))
            if isinstance(op, Collective):
                sort = (Collective, op.team, op.backend)
            found[*sort, count[sort]].append((k, i))
            count[sort] += 1
    for spots in found.values():
        if len(spots) > 1:
            yield spots
            yield from map(list, combinations(spots, 2))


def _lesser(op: Op) -> Iterator[list[Op]]:
    """Ops that do less than a `fused` or a `group`."""
    if isinstance(op, Group):
        for k in range(len(op.ops)):
            kept = (*op.ops[:k], *op.ops[k + 1 :])
            if kept:
                yield [replace(op, ops=kept)]
    if isinstance(op, Fused):
        if len(op.parts) == 1:
            yield [*op.members]
        for k, part in enumerate(op.parts):
            for i in range(len(part)):
                less = (*part[:i], *part[i + 1 :])
                parts = (*op.parts[:k], *([less] if less else []), *op.parts[k + 1 :])
                if parts:
                    yield [replace(op, parts=parts)]


def _weight(op: Op) -> int:
    if isinstance(op, Group):
        return len(op.ops)
    return max(1, len(op.members)) if isinstance(op, Fused) else 1


def _undeclared(case: Case) -> Iterator[Case]:
    """Without something that is declared, in all Programs alike."""
    for field in ("results", "params", "tables", "teams"):
        most = max(len(getattr(program, field) or ()) for program in case.programs)
        for k in reversed(range(most)):
            yield case._replace(programs=tuple(_lacking(p, field, k) for p in case.programs))


def _lacking(program: Program, field: str, k: int) -> Program:
    has: tuple[object, ...] | None = getattr(program, field)
    if has is None:
        return program
    ranks = {"ranks": program.world} if field == "teams" else {}
    return program.replace(**{field: (*has[:k], *has[k + 1 :])}, **ranks)
