"""Random sets of Programs: one SPMD Program for all ranks, or one of whose ranks was mutilated."""

from __future__ import annotations

import dataclasses
import random

from tests.verify.random_programs import Draw

from interlace.ir import Alloc, Call, Free, Fused, Program


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
        first = next(
            i
            for i, op in enumerate(ops)
            if isinstance(op, Alloc) and op.buffer.name == getattr(ops[at], "buffer", "")
        )
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


def random_set(rng: random.Random, num_steps: int = 5) -> list[Program]:
    """One SPMD Program, or the same ranks as a set with one of them mutilated."""
    program = Draw(rng).program(num_steps)
    if rng.random() < 0.3:
        program = mutilate(program, rng)
    if rng.random() < 0.6:
        return [program]
    programs = [program.instantiate(rank) for rank in program.world]
    k = rng.randrange(len(programs))
    for _ in range(rng.choice((1, 1, 2))):
        programs[k] = mutilate(programs[k], rng)
    return programs
