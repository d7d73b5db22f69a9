"""Ranks that come late to what all do together, or not at all: the next time all meet again."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, inputs_of, prepared, program_of, world_group
from tests.runtime.test_teams import MESH
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.comm.teams import reset_teams
from interlace.ir import Op, parse
from interlace.options import Options
from interlace.runtime import Executor

LIMIT_S = 0.6


def miss_one(absent: int, seed: int) -> list[Outcome]:
    """A prepare that `absent` does not come to, since it failed before, and two that all come to.

    The others do not come at the same time: one that is late finds that another has given up.
    """
    me, program = dist.get_rank(), program_of("get", dist.get_world_size())
    found: list[Outcome] = []

    def one() -> bool:
        groups, options = {"tp": world_group()}, Options(time_out_s=LIMIT_S)
        with Executor(program, groups=groups, options=options).prepare() as executor:
            (y,) = executor.run(inputs_of(program, me, seed))
            return torch.equal(y, executor.run(inputs_of(program, me, seed))[0])

    for number in range(3):
        if number == 0 and me == absent:
            found.append(("absent", "", 0.0))
        else:
            time.sleep(1.5 * LIMIT_S if number == 0 and me == (absent + 1) % 3 else 0)
            found.append(attempt(one))
        dist.barrier()
    return found


def test_a_rank_that_missed_a_prepare_comes_to_the_next(pool: Pool, seed: int) -> None:
    for again in range(2):  # the second time counts began apart, if they ever did
        absent = (seed + again) % 3
        results = pool(3).run(miss_one, absent, seed)
        for rank, (missed, *after) in enumerate(results):
            if rank != absent:
                assert missed[0] == "AgreementError"
                assert "did not come to prepare Program 'gather_matmul_get'" in missed[1]
                assert missed[2] < LIMIT_S + 1
            assert [outcome[:2] for outcome in after] == [("result", "True")] * 2, after


def miss_one_of_two_teams(absent: int, seed: int) -> list[Outcome]:
    """The same in a mesh: those who share no team with `absent` do not go on without it either."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
    program, me = parse(MESH.format("peer")), dist.get_rank()
    found: list[Outcome] = []
    for number in range(3):
        if number == 0 and me == absent:
            found.append(("absent", "", 0.0))
        else:
            executor = Executor(program, groups=groups, options=Options(time_out_s=LIMIT_S))
            inputs = inputs_of(program, me, seed)
            found.append(attempt(lambda e=executor, i=inputs: len(e.prepare().run(i))))
            executor.close()
        dist.barrier()
    return found


def test_all_teams_of_a_mesh_wait_or_none(pool: Pool, seed: int) -> None:
    absent = seed % 4
    for rank, (missed, *after) in enumerate(pool(4).run(miss_one_of_two_teams, absent, seed)):
        assert missed[0] == ("absent" if rank == absent else "AgreementError")
        assert rank == absent or f"rank {absent} did not come" in missed[1]
        assert [outcome[:2] for outcome in after] == [("result", "2")] * 2, after


def reset_late(late: int, seed: int) -> tuple[list[Outcome], Outcome]:
    """After a failure one rank comes to reset() when the others have given up more than once."""
    armed, me = True, dist.get_rank()

    def fail(rank: int, index: int, op: Op) -> None:
        if armed and rank == 0:
            raise ValueError("the planted fault")

    executor = prepared("pipeline", before_op=fail, time_out_s=5)
    inputs = inputs_of(executor.program, me, seed)
    assert attempt(lambda: executor.run(inputs))[0] != "result"
    armed, tries = False, []
    time.sleep(3.5 * LIMIT_S if me == late else 0)
    while len(tries) < 20 and (not tries or tries[-1][0] != "result"):
        tries.append(attempt(lambda: reset_teams(LIMIT_S)))
    run = attempt(lambda: len(executor.run(inputs)))
    executor.close()
    return tries, run


def test_a_rank_that_comes_late_to_a_reset_meets_the_others(pool: Pool, seed: int) -> None:
    late = seed % 3
    results = pool(3).run(reset_late, late, seed)
    for rank, (tries, run) in enumerate(results):
        assert tries[-1][0] == "result"
        assert run[:2] == ("result", "1")
        if rank != late:
            assert len(tries) > 2, "it had given up by then"
            assert {outcome[0] for outcome in tries[:-1]} == {"AgreementError"}
            assert all(f"rank {late} did not come" in text for _, text, _ in tries[:2])
