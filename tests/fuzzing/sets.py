"""Random sets of Programs: one SPMD Program for all ranks, or one of whose ranks was mutilated.

programs, runs = drawn(seed=7, number=3)    # always the same
"""

from __future__ import annotations

import dataclasses
import random

from tests.fuzzing.wide import PAIR, WideDraw

from interlace.ir import Alloc, Call, Free, Fused, Op, Program

COUNTED = 0.6
"""The share of all-to-alls whose counts are data."""


def mutilate(program: Program, rng: random.Random) -> Program:
    """The Program with one op dropped, moved, repeated, or put on another stream."""
    ops = list(program.ops)
    movable = [i for i, op in enumerate(ops) if not op.declares()]
    if not movable:
        return program
    i = rng.choice(movable)
    kind = rng.random()
    frees = [i for i in movable if isinstance(ops[i], Free)]
    if frees and rng.random() < 0.3:
        at = rng.choice(frees)
        name = ops[at].ordering().frees
        allocs = (i for i, op in enumerate(ops) if isinstance(op, Alloc) and op.buffer.name == name)
        first = next(allocs, -1)  # an input is there from the begin
        ops.insert(rng.randint(first + 1, at), ops.pop(at))
        return program.replace(ops=tuple(ops))
    op = ops[i]
    if isinstance(op, Fused) and kind < 0.6:
        k = rng.randrange(len(op.parts))
        members = list(op.parts[k])
        del members[rng.randrange(len(members))]
        parts = (*op.parts[:k], tuple(members), *op.parts[k + 1 :])
        kept = tuple(filter(None, parts)) if kind < 0.3 else op.parts[::-1]
        ops[i : i + 1] = [dataclasses.replace(op, parts=kept)] if kept else []
    elif kind < 0.4:
        del ops[i]
    elif kind < 0.75 and i + 1 < len(ops) and not ops[i + 1].declares():
        ops[i], ops[i + 1] = ops[i + 1], ops[i]
    elif kind < 0.85 and not isinstance(op, Free | Call):
        ops.insert(i, op)
    elif not isinstance(op, Fused):
        streams = program.streams()
        ops[i] = dataclasses.replace(op, stream=rng.choice(streams))
    return program.replace(ops=tuple(ops))


def random_set(rng: random.Random, num_steps: int = 5, counts: float = COUNTED) -> list[Program]:
    """One SPMD Program, or the same ranks as a set with one of them mutilated."""
    program = WideDraw(rng, counts=counts).program(num_steps)
    if rng.random() < 0.3:
        program = mutilate(program, rng)
    partial = any(team.name == PAIR for team in program.teams)
    if rng.random() < 0.6 and not partial:
        return [program]
    programs = [_on_rank(program, rank) for rank in program.world]
    if partial and rng.random() < 0.6:
        return programs
    k = rng.randrange(len(programs))
    for _ in range(rng.choice((1, 1, 2))):
        programs[k] = mutilate(programs[k], rng)
    return programs


def _on_rank(program: Program, rank: int) -> Program:
    """The Program of one rank, without the ops of a team that it is not in."""
    outside = [team.name for team in program.teams if not _has(team.groups, rank)]
    if outside:
        kept = tuple(op for op in program.ops if not _team(op) & {*outside})
        program = program.replace(ops=kept)
    return program.instantiate(rank)


def _has(groups: tuple[tuple[int, ...], ...] | None, rank: int) -> bool:
    return groups is None or any(rank in group for group in groups)


def _team(op: Op) -> set[str]:
    """The teams that an op, or a member of it, names."""
    members = (op, *getattr(op, "ops", ()), *getattr(op, "members", ()))
    return {str(getattr(member, "team", "")) for member in members}


STEPS = (1, 1, 1, 2, 2, 2, 3, 3, 4, 6)
"""Numbers of steps of a drawn Program: small ones find most, and cost least."""
RUNS = (1, 1, 2, 2, 2, 3)


def drawn(seed: int, number: int, counts: float = COUNTED) -> tuple[list[Program], int]:
    """The set of that number of a campaign, and in how many runs it is to be checked."""
    rng = random.Random(seed << 32 | number)
    return random_set(rng, rng.choice(STEPS), counts), rng.choice(RUNS)
