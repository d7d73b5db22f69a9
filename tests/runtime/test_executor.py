"""Programs run as the reference interpreter says, on real processes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import TEXTS, inputs_of, prepared, program_of
from tests.support.interpreter import run_ranks
from tests.support.pool import Pool

from interlace.errors import UnsupportedError
from interlace.ir import Op, parse
from interlace.ir.ops import Ordering
from interlace.runtime import Executor
from interlace.runtime.prepare.plan import Plan
from interlace.verify import check

RUNS = 6
"""Of each Program: on its streams, and in order from half of them on."""


def run_kind(kind: str, seed: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    with prepared(kind) as streams, prepared(kind, in_order=True) as in_order:
        for run in range(RUNS):
            executor = in_order if run >= RUNS // 2 else streams
            (y,) = executor.run(inputs_of(executor.program, dist.get_rank(), seed + run))
            found.append(y)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", TEXTS)
def test_program_equals_the_interpreter(pool: Pool, kind: str, world: int, seed: int) -> None:
    results = pool(world).run(run_kind, kind, seed)
    program = program_of(kind, world)
    for run in range(RUNS):
        inputs = [inputs_of(program, rank, seed + run) for rank in range(world)]
        wanted = run_ranks(program, inputs, in_order=True)
        for rank in range(world):
            (y,) = wanted[rank]
            assert isinstance(y, torch.Tensor)
            assert torch.equal(results[rank][run], y)


def test_a_view_without_elements_of_what_is_not_there_yet() -> None:
    """Nothing orders the two, and nothing needs to: it touches no bytes."""
    text = """
def f(x: f32[4], y: out[f32[4]]):
    main: call("aten.neg.default", x, out=(t := f32[4]))
    side: copy(t[0:0], y[0:0])
    main: copy(t, y)
"""
    program = parse(text.strip())
    assert check(program).sound
    with Executor(program) as executor:
        executor.prepare()
        for _ in range(20):
            (y,) = executor.run([torch.ones(4)])
            assert torch.equal(y, torch.full((4,), -1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shout(Op):
    """An op that meets its peers, and that nothing else knows."""

    def ordering(self) -> Ordering:
        return Ordering(meets=("tp", None))


def test_an_op_that_meets_peers_without_a_transport_is_refused() -> None:
    """And not left out without a word."""
    text = "def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n    main: copy(x, y)\n"
    program = parse(text)
    made = program.replace(ops=(*program.ops, Shout()))
    with pytest.raises(UnsupportedError, match=r"op 1 \(Shout\) meets peers"):
        Plan(made, made.instantiate(0), lambda *_: "gloo")
