"""Programs that the verifier accepts, run where each rank gets its part of a collective late."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.fuzzing.draw import Draw
from tests.runtime.programs import world_group
from tests.support.held_back import held_back
from tests.support.interpreter import Deadlock, LifetimeFault, run_ranks
from tests.support.pool import Pool

from interlace.ir import (
    Buffer,
    Call,
    Collective,
    DType,
    Group,
    Op,
    Program,
    Recv,
    Send,
    Team,
    parse,
)
from interlace.options import Backend, Options
from interlace.runtime import Executor
from interlace.verify import Report, check

RUNS = 10
"""Of each Program, in a row."""

# What stands between a collective and what a rank does next, without and with what orders the two.
SIGNALLED = """
def signalled(tp: Team[2], x: f32[{n}], y: out[f32[{n}]]):
    a = alloc(f32[{n}])
    comm: {op}
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
EVENT, BARRIER = ("comm: record(e)", "main: wait(e)"), ("main: barrier(team=tp)",)
OPS = {
    "all_reduce": 'all_reduce(x, a, reduce="sum", team=tp)',
    "all_gather": "all_gather(x[0:{h}], a, team=tp)",
    "all_to_all": "all_to_all(x, a, team=tp)",
    "broadcast": "broadcast(x, a, root=0, team=tp)",
    "message": "group(send(x, peer=tp.rank + 1), recv(a, peer=tp.rank + 1))",
}
FORMS = {kind: (SIGNALLED.replace("{op}", op), ("", ""), EVENT) for kind, op in OPS.items()}
FORMS |= {"fetched": (FETCHED, ("",), BARRIER)}
CASES = [pytest.param(*form, id=name) for name, form in FORMS.items()]


def written(text: str, lines: Sequence[str], n: int = 1024) -> Program:
    return parse(text.replace("{n}", str(n)).replace("{h}", str(n // 2)).format(*lines).strip())


def given(program: Program, rank: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    shapes = [b.shape for b in program.instantiate(rank).params if b.kind == "input"]
    return [torch.randint(-3, 4, [int(n) for n in shape], generator=generator).float()  # pyright: ignore[reportArgumentType]
            for shape in shapes]  # fmt: skip


@functools.cache
def _group(ranks: tuple[int, ...]) -> Any:
    return dist.new_group(ranks)


def groups_of(program: Program) -> dict[str, Any]:
    """A group of each team that this rank is in; all ranks call it for all Programs."""
    found: dict[str, Any] = {}
    for team in program.teams:
        for ranks in team.groups or (tuple(range(team.size)),):
            group = world_group() if team.name == "tp" and not team.groups else _group(ranks)
            if dist.get_rank() in ranks:
                found[team.name] = group
    return found


def wrong_runs(
    program: Program, backend: Backend, seed: int, runs: int, groups: dict[str, Any] | None = None,
    proved: bool = True,
) -> int:  # fmt: skip
    """How many of the runs gave this rank something else than the interpreter gives.

    What is not `proved` is run although it is unsound.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = 0
    options = Options(transport=backend, timeout_s=20.0)
    groups = groups or {team.name: world_group() for team in program.teams}
    with contextlib.ExitStack() as stack:
        if not proved:
            stack.enter_context(mock.patch.object(Report, "raise_if_unsound"))
        stack.enter_context(held_back(seed * 8 + rank))
        executor = Executor(program, groups=groups, options=options)
        stack.enter_context(executor).prepare()
        for turn in range(runs):
            inputs = [given(program, each, seed + turn) for each in range(world)]
            found = [x.clone() for x in executor.run([x.clone() for x in inputs[rank]])]
            wanted = run_ranks(program, inputs)[rank]
            wrong += not all(map(torch.equal, found, wanted))
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "peer"])
@pytest.mark.parametrize(("text", "without", "with_"), CASES)
def test_what_the_verifier_wants_between_the_two_is_needed(
    pool: Pool, text: str, without: Sequence[str], with_: Sequence[str], backend: str, seed: int
) -> None:
    """Refused, and wrong when it is run all the same; mended, accepted and never wrong."""
    lacking, mended = written(text, without), written(text, with_)
    assert check(lacking).kinds() == {"race"}
    assert sum(pool(2).run(wrong_runs, lacking, backend, seed, 40, None, False)) > 0
    assert check(mended).sound
    assert pool(2).run(wrong_runs, mended, backend, seed, 40) == [0, 0]


@pytest.mark.parametrize(("text", "without", "with_"), CASES)
def test_a_run_without_it_goes_wrong_here(
    text: str, without: Sequence[str], with_: Sequence[str]
) -> None:
    """By the reference: memory under way is poison there."""
    program = written(text, without, n=4)
    inputs = [given(program, rank, 0) for rank in (0, 1)]
    for lines, lacking in ((without, True), (with_, False)):
        found = [
            result[-1][:2].isnan().any().item()
            for seed in range(60)
            for result in run_ranks(written(text, lines, n=4), inputs, seed=seed)
        ]
        assert any(found) == lacking


def accepted(rng: random.Random, world: int) -> Program:
    """A random Program that the verifier accepts and in which ranks meet, in f32 and exact."""
    while True:
        mesh = world == 4 and rng.random() < 0.5
        draw = Draw(rng, 2 if mesh else world)
        program = _on_processes(_exact(draw.program(rng.randint(2, 6))), mesh)
        meet = any(isinstance(op, Collective | Send | Recv | Group) for op in program.ops)
        drawn = any(isinstance(op, Call) and op.rng for op in program.ops)
        if meet and not drawn and check(program).sound and _runs(program, world):
            return program


def _on_processes(program: Program, mesh: bool) -> Program:
    """With teams that have process groups: `tp` and `aux` are the same ranks in one order, or the
    rows and the columns of a mesh of two by two."""
    pairs = {"tp": ((0, 1), (2, 3)), "aux": ((0, 2), (1, 3))}
    teams = tuple(
        Team(team.name, team.size, pairs[team.name]) if mesh
        else Team(team.name, team.size, (tuple(range(team.size)),) if team.groups else None)
        for team in program.teams
    )  # fmt: skip
    return program.replace(teams=teams)


def _runs(program: Program, world: int) -> bool:
    """Whether shapes fit and the reference knows all of it; what it finds wrong is an error."""
    box = program.boxes(0)
    for op in program.ops:
        for call in op.steps:
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
    world = dist.get_world_size()
    _group.cache_clear()  # those of before may have been of another world
    rng, wrong = random.Random(seed), list[str]()
    for _ in range(programs):
        program = accepted(rng, world)
        backend = rng.choice(("gloo", "peer"))
        if count := wrong_runs(program, backend, rng.getrandbits(20), RUNS, groups_of(program)):
            wrong.append(f"{backend}: {count} of {RUNS} wrong\n{program}")
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_programs_that_are_accepted(pool: Pool, world: int, seed: int) -> None:
    assert pool(world).run(many, seed, 10) == [[]] * world


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_random_programs_that_are_accepted(pool: Pool, world: int, seed: int) -> None:
    assert pool(world).run(many, seed, 300, timeout_s=1700) == [[]] * world
