"""Random serial Programs, scheduled: still sound, still the same results, in any interleaving."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.support.interpreter import run_ranks
from tests.support.serial_programs import serial_program

from interlace.ir import Alloc, Collective, Free, Program, Record, Wait, parse, validate
from interlace.passes.form_regions import FormRegions
from interlace.passes.insert_sync import InsertSync
from interlace.passes.plan_memory import PlanMemory
from interlace.passes.schedule import Schedule
from interlace.verify import check

COUNT = 60


def scheduled(program: Program, rng: random.Random) -> Program:
    """The Program after the passes of this room, with options that vary."""
    window = rng.choice((1, 3, 8, 64))
    passes = [Schedule(window=window), PlanMemory(reuse=rng.random() < 0.9), InsertSync()]
    if rng.random() < 0.5:
        passes.insert(0, FormRegions())
    for item in passes:
        program = item.run(program)
        validate(program)
    return program


def same(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> bool:
    """Whether every result of every rank is equal, bit for bit."""
    return all(
        torch.equal(a, b)
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    )


@pytest.mark.parametrize("world", [2, 3])
def test_scheduled_programs_are_sound_and_equal(world: int, seed: int) -> None:
    for number in range(seed, seed + COUNT):
        rng = random.Random(number)
        serial, inputs = serial_program(rng, world, rng.randrange(1, 10))
        program = scheduled(serial, rng)
        report = check(program)
        assert report.sound, f"seed {number}:\n{serial}\n{program}\n{report}"
        assert check(program, in_order=True).sound, f"seed {number}"
        expected = run_ranks(serial, [[t.clone() for t in each] for each in inputs], in_order=True)
        ways: list[dict[str, Any]] = [{"in_order": True}, {"seed": number}, {"seed": number + 1}]
        for how in ways:
            got = run_ranks(program, [[t.clone() for t in each] for each in inputs], **how)
            assert same(expected, got), f"seed {number} {how}:\n{serial}\n{program}"


def test_every_event_is_needed(seed: int) -> None:
    """No Wait can go: without it the verifier finds something.

    But what waits for other ranks may happen to order the same, of which the pass makes no use:
    collectives, which come in turn, and slots taken again, once all ranks have freed them.
    """
    needed = idle = 0
    for number in range(seed, seed + 12):
        rng = random.Random(number)
        serial, _ = serial_program(rng, 2, 5, fences=False)
        program = scheduled(serial, rng)
        buffers = program.buffers()
        recorded: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, op in enumerate(program.ops):
            if isinstance(op, Record):
                recorded[op.event] = last.get(op.stream, index)
            elif not isinstance(op, Alloc):
                last[op.stream] = index
        for index, op in enumerate(program.ops):
            if not isinstance(op, Wait):
                continue
            without = program.replace(ops=program.ops[:index] + program.ops[index + 1 :])
            if not check(without).sound:
                needed += 1
                continue
            idle += 1
            between = program.ops[recorded[op.event] : index]
            waits_for_ranks = any(
                isinstance(item, Collective)
                or (isinstance(item, Alloc) and item.buffer.kind == "symmetric")
                for item in between
            )
            following = next(op for op in program.ops[index:] if not isinstance(op, Wait))
            hands_over = (
                isinstance(following, Free) and buffers[following.buffer].kind == "symmetric"
            ) or (isinstance(following, Alloc) and following.buffer.kind == "symmetric")
            assert waits_for_ranks or hands_over, f"seed {number}: op {index} is idle\n{program}"
    assert needed > 4 * idle


def test_running_twice_changes_nothing(seed: int) -> None:
    for number in range(seed, seed + 10):
        rng = random.Random(number)
        serial, _ = serial_program(rng, 2, 8)
        program = scheduled(serial, rng)
        assert InsertSync().run(program) == program, f"seed {number}"
        again = InsertSync().run(PlanMemory().run(PlanMemory().run(program)))
        assert again == InsertSync().run(PlanMemory().run(program)), f"seed {number}"
        assert parse(str(program)) == program, f"seed {number}"
