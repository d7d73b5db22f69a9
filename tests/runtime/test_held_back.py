"""Programs that the verifier accepts, run where each rank gets its part of a collective late.

python -m tests.runtime.test_held_back 10000         # as many runs as one has patience for
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import world_group
from tests.support.held_back import held_back
from tests.support.interpreter import Deadlock, LifetimeFault, run_ranks
from tests.support.pool import Pool
from tests.verify.random_programs import Draw

from interlace.ir import (
    Buffer,
    Call,
    Collective,
    DType,
    Fused,
    Group,
    Op,
    Program,
    Recv,
    Send,
    parse,
)
from interlace.options import Options
from interlace.runtime import Executor
from interlace.verify import check

RUNS = 10
"""Of each Program, in a row."""

# What stands between a collective and what a rank does next, without and with what orders the two.
SIGNALLED = """
def signalled(tp: Team[2], x: f32[{n}], y: out[f32[{n}]]):
    a = alloc(f32[{n}])
    comm: all_reduce(x, a, reduce="sum", team=tp)
    comm: notify(done, to=tp.others)
    {}
    main: expect(done, tp.rank + 1)
    {}
    main: copy(a, y)
"""
FETCHED = """
def fetched(tp: Team[2], x: f32[{n}], y: out[f32[{n}]]):
    full = alloc(f32[2, {n}], symmetric=tp)
    main: all_gather(x.view(1, {n}), full, team=tp)
    {}
    main: get(full[tp.rank].view({n}), peer=tp.rank + 1, dst=y)
    main: free(full)
"""
MESSAGE = """
def message(tp: Team[2], x: f32[{n}], y: out[f32[{n}]]):
    a = alloc(f32[{n}])
    comm: group(send(x, peer=tp.rank + 1), recv(a, peer=tp.rank + 1))
    comm: notify(done, to=tp.others)
    {}
    main: expect(done, tp.rank + 1)
    {}
    main: copy(a, y)
"""
EVENT = ("comm: record(e)", "main: wait(e)")
CASES = [
    pytest.param(SIGNALLED, ("", ""), EVENT, id="a peer's collective ended, mine may not have"),
    pytest.param(MESSAGE, ("", ""), EVENT, id="a peer's message ended, mine may not have"),
    pytest.param(FETCHED, ("",), ("main: barrier(team=tp)",), id="mine ended, a peer's may not"),
]


def written(text: str, lines: Sequence[str], n: int = 1024) -> Program:
    return parse(text.replace("{n}", str(n)).format(*lines).strip())


def given(program: Program, rank: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    shapes = [b.shape for b in program.instantiate(rank).params if b.kind == "input"]
    return [torch.randint(-3, 4, [int(n) for n in shape], generator=generator).float()  # pyright: ignore[reportArgumentType]
            for shape in shapes]  # fmt: skip


def wrong_runs(program: Program, backend: str, seed: int, runs: int) -> int:
    """How many of the runs gave this rank something else than the interpreter gives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = 0
    options = Options(transport=backend, time_out_s=20.0)
    groups = {team.name: world_group() for team in program.teams}
    with held_back(seed * 8 + rank), Executor(program, groups=groups, options=options) as executor:
        executor.prepare()
        for turn in range(runs):
            inputs = [given(program, each, seed + turn) for each in range(world)]
            found = executor.run([x.clone() for x in inputs[rank]])
            wanted = run_ranks(program, inputs)[rank]
            wrong += not all(map(torch.equal, found, wanted))
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "peer"])
@pytest.mark.parametrize(("text", "without", "with_"), CASES)
def test_what_the_verifier_wants_between_the_two_is_needed(
    pool: Pool, text: str, without: Sequence[str], with_: Sequence[str], backend: str, seed: int
) -> None:
    assert check(written(text, without)).kinds() == {"race"}
    assert check(written(text, with_)).sound
    assert pool(2).run(wrong_runs, written(text, with_), backend, seed, 40) == [0, 0]


@pytest.mark.parametrize(("text", "without", "with_"), CASES)
def test_a_run_without_it_goes_wrong_here(
    text: str, without: Sequence[str], with_: Sequence[str]
) -> None:
    """By the reference: memory under way is poison there."""
    program = written(text, without, n=4)
    inputs = [given(program, rank, 0) for rank in (0, 1)]
    for lines, lacking in ((without, True), (with_, False)):
        found = [
            result.isnan().any().item()
            for seed in range(60)
            for (result,) in run_ranks(written(text, lines, n=4), inputs, seed=seed)
        ]
        assert any(found) == lacking


def accepted(rng: random.Random, world: int) -> Program:
    """A random Program that the verifier accepts and in which ranks meet, in f32 and exact."""
    while True:
        draw = Draw(rng)
        if draw.size != world:
            continue
        program = _exact(draw.program(rng.randint(2, 6)))
        meet = any(isinstance(op, Collective | Send | Recv | Group) for op in program.ops)
        plain = not any(buffer.registered for buffer in program.params)
        drawn = any(isinstance(op, Call) and op.rng for op in program.ops)
        if meet and plain and not drawn and len(program.teams) == 1 and check(program).sound:
            if _runs(program, world):
                return program


def _runs(program: Program, world: int) -> bool:
    """Whether shapes fit and the reference knows all of it; what it finds wrong is an error."""
    box = program.boxes(0)
    for op in program.ops:
        for call in op.members if isinstance(op, Fused) else (op,):
            if isinstance(call, Call) and call.outs:
                (source, *_), (out, *_) = call.views(), call.outs
                if box(source).sizes != box(out).sizes:
                    return False
    try:
        run_ranks(program, [given(program, rank, 0) for rank in range(world)])
    except (Deadlock, LifetimeFault):
        raise
    except (RuntimeError, AssertionError):
        return False
    return True


def _exact(program: Program) -> Program:
    """The same with f32 for i16 (twice the bytes), and sums and maxima of small integers alone."""

    def change(op: Op) -> Op:
        buffer = getattr(op, "buffer", None)
        if isinstance(buffer, Buffer):
            return dataclasses.replace(op, buffer=wide(buffer))  # pyright: ignore[reportCallIssue]
        if isinstance(op, Call) and op.fresh:
            return dataclasses.replace(op, fresh=tuple(map(wide, op.fresh)))
        if isinstance(op, Collective) and op.reduce in ("avg", "prod"):
            return dataclasses.replace(op, reduce="sum")
        return op

    def wide(buffer: Buffer) -> Buffer:
        return dataclasses.replace(buffer, dtype=DType.f32, offset=2 * buffer.offset)

    return program.replace(
        params=tuple(map(wide, program.params)), ops=tuple(map(change, program.ops))
    )


def many(seed: int, programs: int) -> list[str]:
    """The Programs, as text, of which a run was wrong on this rank; half by gloo, half by peer."""
    rng, wrong = random.Random(seed), list[str]()
    for _ in range(programs):
        program = accepted(rng, dist.get_world_size())
        backend = rng.choice(("gloo", "peer"))
        if count := wrong_runs(program, backend, rng.getrandbits(20), RUNS):
            wrong.append(f"{backend}: {count} of {RUNS} wrong\n{program}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_random_programs_that_are_accepted(pool: Pool, world: int, seed: int) -> None:
    assert pool(world).run(many, seed, 15) == [[]] * world


if __name__ == "__main__":
    runs, start = 0, random.SystemRandom().getrandbits(32)
    print("seed", start, flush=True)
    shared, parts = Pool(), random.Random(start)
    while runs < int(sys.argv[1]):
        size = parts.choice((2, 3))
        for found in shared(size).run(many, parts.getrandbits(32), 50, time_out_s=600):
            assert not found, "\n".join(found)
        runs += 50 * RUNS
    shared.close()
    print(runs, "runs, 0 wrong")
