"""The memory that is counted from a Program is what its run on the CPU holds."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Model, parallelise, world_mesh
from tests.fuzzing.draw import Draw
from tests.support.pool import Pool
from tests.support.serial_programs import serial_program
from tests.support.storages import storage_levels

from interlace.cost.memory import rank_memory, run_memory
from interlace.errors import ProgramError
from interlace.frontend.binding import Bound
from interlace.ir import Collective, Free, Program, parse
from interlace.options import Options
from interlace.passes.plan_memory import PlanMemory
from interlace.runtime import Executor
from interlace.verify import check

WITHIN = 0.01
OPTIONS = Options(in_order=True, transport="peer")
"""One stream, and no thread of gloo: what is freed on another thread the profiler does not see."""


def drawn(rng: random.Random) -> tuple[Program, list[torch.Tensor]]:
    """A random Program of one rank, and its inputs: what passes make of a serial one that gives up
    some of its inputs, or one of the fuzzer's, with elements of one byte that torch computes on."""
    if rng.random() < 0.5:
        program, (inputs,) = serial_program(rng, 1, rng.randrange(2, 14), fences=False)
        freed = [b.name for b in program.params if b.kind == "input" and rng.random() < 0.6]
        ops = (*program.ops, *(Free(buffer=name) for name in freed))
        return PlanMemory().run(program.replace(ops=ops)), inputs
    while True:
        with contextlib.suppress(ProgramError):  # a chunk that one rank does not have
            text = str(Draw(rng, size=1).program(num_steps=rng.randrange(2, 12)))
            text = re.sub(r'"aten.bernoulli.out"(.*), rng=True', r'"aten.neg.out"\1', text)
            program = parse(re.sub(r"(?<!Team)\[1\]", "[0]", text.replace("i16", "i8")))
            params = [buffer for buffer in program.params if buffer.kind == "input"]
            shapes = [[int(str(dim)) for dim in b.shape] for b in params]
            if runs_here(program) and "as_strided" not in text:  # an output of another shape
                return program, [torch.ones(shape, dtype=torch.int8) for shape in shapes]


def runs_here(program: Program) -> bool:
    """True if it is sound one op after another, of one group, and all ends on the thread of
    the run."""
    apart = len(program.teams) > 1 or any(op.ordering().messages for op in program.ops)
    apart = apart or any(isinstance(op, Collective) and op.backend == "gloo" for op in program.ops)
    return not apart and check(program, in_order=True).sound


def compared(seed: int, count: int) -> list[tuple[int, int, str]]:
    """The counted and the measured peak of so many random Programs."""
    rng, found = random.Random(seed), list[tuple[int, int, str]]()
    for _ in range(count):
        program, inputs = drawn(rng)
        assert dist.group.WORLD is not None
        groups = {team.name: dist.group.WORLD for team in program.teams}
        with Executor(program, groups=groups, options=OPTIONS).prepare() as executor:
            executor.run([tensor.clone() for tensor in inputs])  # now the arena is there
            measured = max(storage_levels(executor, inputs))
        found.append((run_memory(program).peak, measured, str(program)))
    return found


def test_of_random_programs(pool: Pool) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    (found,) = pool(1).run(compared, seed, 200)
    for counted, measured, text in found:
        assert abs(counted - measured) <= WITHIN * counted, f"{counted}, {measured} of\n{text}"


def layers_compared(layers: int) -> list[tuple[str, int, int]]:
    """The counted and the measured peak of the forward and the backward of so many layers."""
    torch.manual_seed(0)
    options = {"strategy": "peer", "transport": "peer", "in_order": True, "timeout_s": 40.0}
    model = parallelise(Model(layers), world_mesh())
    step: Any = torch.compile(model, backend="interlace", options=options)
    taken: dict[str, tuple[Bound, list[torch.Tensor]]] = {}
    run = Bound.run

    def noted(self: Bound, args: Any, *rest: Any) -> list[Any] | None:
        taken[self.kind] = self, [args[place].clone() for place in self.imported.inputs]
        return run(self, args, *rest)

    with mock.patch.object(Bound, "run", noted):
        step(torch.randint(32, (2, 8))).float().square().mean().backward()
    found: list[tuple[str, int, int]] = []
    for kind, (bound, inputs) in taken.items():
        counted = rank_memory(bound.program, dist.get_rank()).peak
        found.append((kind, counted, max(storage_levels(bound.executor, inputs))))
    return found


@pytest.mark.parametrize("layers", [1, 4])
def test_of_layers(pool: Pool, layers: int) -> None:
    for found in pool(2).run(layers_compared, layers):
        assert [kind for kind, *_ in found] == ["forward", "backward"]
        for kind, counted, measured in found:
            assert abs(counted - measured) <= WITHIN * counted, f"{kind}: {counted}, {measured}"
