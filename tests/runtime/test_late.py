"""Ranks that come late to what all do together, or not at all, or cannot go on: the next time all
meet again."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import (
    Outcome,
    attempt,
    executor_of,
    inputs_of,
    prepared,
    program_of,
    world_group,
)
from tests.runtime.test_teams import MESH
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.comm import team_of
from interlace.comm.rendezvous.board import Board
from interlace.comm.resets import reset_teams
from interlace.ir import Op, parse
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime import executor as executor_file
from interlace.runtime.engine import EngineContext
from interlace.runtime.host.engine import CpuEngine
from interlace.runtime.prepare.agreement import _collect

LIMIT_S = 0.6


def miss_one(absent: int, seed: int) -> list[Outcome]:
    """A prepare that `absent` does not come to, since it failed before, and two that all come to.

    The others do not come at the same time: one that is late finds that another has given up.
    """
    me, program = dist.get_rank(), program_of("get", dist.get_world_size())
    found: list[Outcome] = []

    def one(limit: float) -> bool:
        with executor_of(program, timeout_s=limit).prepare() as executor:
            (y,) = executor.run(inputs_of(program, me, seed))
            return torch.equal(y, executor.run(inputs_of(program, me, seed))[0])

    for number in range(3):
        if number == 0 and me == absent:
            found.append(("absent", "", 0.0))
        else:
            time.sleep(1.5 * LIMIT_S if number == 0 and me == (absent + 1) % 3 else 0)
            found.append(attempt(lambda n=number: one(20 if n else LIMIT_S)))
        dist.barrier()
    return found


def test_a_rank_that_missed_a_prepare_comes_to_the_next(pool: Pool, seed: int) -> None:
    for again in range(2):  # the second time counts began apart, if they ever did
        absent = (seed + again) % 3
        results = pool(3).run(miss_one, absent, seed)
        for rank, (missed, *after) in enumerate(results):
            if rank != absent:
                assert missed[0] == "AgreementError"
                late = rf"ranks? [\d, and]*\b{absent}\b[\d, and]* did not come to prepare Program"
                assert re.search(f"{late} 'gather_matmul_get'", missed[1]), missed[1]
                assert missed[2] < LIMIT_S + 1
            assert [outcome[:2] for outcome in after] == [("result", "True")] * 2, after


def miss_one_of_two_teams(absent: int, seed: int) -> list[Outcome]:
    """The same in a mesh: those who share no team with `absent` do not go on without it either."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
    program, me = parse(MESH.format("peer")), dist.get_rank()
    found: list[Outcome] = []
    for number in range(3):
        dist.barrier()
        if number == 0 and me == absent:
            found.append(("absent", "", 0.0))
        else:
            limit = 20 if number else 2 * LIMIT_S
            executor = Executor(program, groups=groups, options=Options(timeout_s=limit))
            inputs = inputs_of(program, me, seed)
            found.append(attempt(lambda e=executor, i=inputs: len(e.prepare().run(i))))
            executor.close()
    return found


def test_all_teams_of_a_mesh_wait_or_none(pool: Pool, seed: int) -> None:
    absent = seed % 4
    for rank, (missed, *after) in enumerate(pool(4).run(miss_one_of_two_teams, absent, seed)):
        assert missed[0] == ("absent" if rank == absent else "AgreementError")
        late = rf"ranks? [\d, and]*\b{absent}\b[\d, and]* did not come"
        assert rank == absent or re.search(late, missed[1]), missed[1]
        assert [outcome[:2] for outcome in after] == [("result", "2")] * 2, after


def reset_late(late: int, seed: int) -> tuple[list[Outcome], Outcome]:
    """After a failure one rank comes to reset() when the others have given up more than once."""
    armed, me = True, dist.get_rank()

    def fail(rank: int, index: int, op: Op) -> None:
        if armed and rank == 0:
            raise ValueError("the planted fault")

    executor = prepared("pipeline", before_op=fail, timeout_s=5)
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


BAD_OP = """
def bad(tp: Team[2], x: f32[4], y: out[f32[4]]):
    slot = alloc(f32[4], symmetric=tp)
    main: copy(x, slot)
    main: call("{}", slot, out=y)
    main: free(slot)
"""


def bind_what_cannot_be() -> tuple[list[Outcome], list[int], Outcome]:
    """Prepares a Program with an operator that there is not, twice; then one that goes well."""
    slots = team_of(world_group(), "tp").slots
    before, held = sum(slots.holders.values()), list[int]()
    bad = executor_of(BAD_OP.format("aten.nonsense.out"), timeout_s=10)
    found = list[Outcome]()
    for _ in range(2):
        found.append(attempt(bad.prepare))
        held.append(sum(slots.holders.values()) - before)
    found.append(attempt(lambda: bad.run([torch.ones(4)])))
    bad.close()
    good = executor_of(BAD_OP.format("aten.neg.out"), timeout_s=10)
    after = attempt(lambda: good.prepare().run([torch.ones(4)])[0].tolist())
    held.append(sum(slots.holders.values()) - before)
    good.close()
    good.close()
    return found, [*held, sum(slots.holders.values()) - before], after


def test_a_prepare_that_cannot_bind_keeps_nothing(pool: Pool) -> None:
    for (*prepares, run), held, after in pool(2).run(bind_what_cannot_be):
        for error, text, _ in prepares:
            assert error == "ProgramError"
            assert "aten.nonsense.out" in text
        assert run[0] == "ExecutorError"
        assert "was not prepared" in run[1]
        assert held == [0, 0, 1, 0]
        assert after[:2] == ("result", "[-1.0, -1.0, -1.0, -1.0]")


class Counted(CpuEngine):
    """Notes how often each is closed; the second one cannot be made."""

    closes: ClassVar[list[int]] = []

    def __init__(self, context: EngineContext) -> None:
        self.number = len(self.closes)
        self.closes.append(0)
        if self.number == 1:
            raise MemoryError("no memory for events")
        super().__init__(context)

    def close(self) -> None:
        self.closes[self.number] += 1
        super().close()


def rebind_that_fails() -> tuple[list[Outcome], list[int]]:
    """After a reset the engine cannot be bound anew at first; each is ended once."""
    Counted.closes.clear()
    counted = Counted, torch.device("cpu")
    with mock.patch.object(executor_file, "engine_for", return_value=counted):
        executor = prepared("pipeline", timeout_s=10)
    inputs = inputs_of(executor.program, dist.get_rank(), 1)
    executor.run(inputs)
    executor.reset()
    with pytest.raises(MemoryError):
        executor.run(inputs)
    assert Counted.closes == [1, 0]
    found = [attempt(lambda: len(executor.run(inputs))) for _ in range(2)]
    executor.close()
    return found, Counted.closes


def test_a_binding_anew_that_fails_is_tried_again(pool: Pool) -> None:
    for found, ends in pool(2).run(rebind_that_fails):
        assert [outcome[:2] for outcome in found] == [("result", "1")] * 2
        assert ends == [1, 0, 1]


def test_a_rank_that_one_team_has_seen_come_is_not_given_up_in_another() -> None:
    """Rank 1 is in both teams. It looks for rank 2 too early, and again when the first team has its
    verdict: rank 0 saw them all."""
    store = dist.HashStore()
    boards = [Board(store, range(3), rank) for rank in range(3)]
    one, two = ["A/1", [0, 1], "A", 1], ["B/1", [1, 2], "B", 1]
    notes = [{"name": "p", "teams": teams} for teams in ([one], [one, two], [two])]
    missed, decided, late = (threading.Event() for _ in range(3))
    decide = boards[0].decide

    def check(keys: list[str]) -> bool:
        there = store.check(keys)
        if keys == ["interlace/B/1/2"] and not there and not missed.is_set():
            missed.set()
            assert decided.wait(10)
        return there

    def decides(topic: str, why: str = "") -> None:
        if topic == "B/1":
            late.wait(10)
        decide(topic, why)
        if topic == "A/1":
            decided.set()

    for rank, place in ((0, "A/1"), (1, "A/1"), (1, "B/1")):
        boards[rank].post(f"{place}/{rank}", notes[rank])
    with (
        mock.patch.object(boards[1], "store", mock.Mock(wraps=store, check=check)),
        mock.patch.object(boards[0], "decide", decides),
        ThreadPoolExecutor(3) as threads,
    ):
        second = threads.submit(_collect, boards[1], 1, notes[1], 30.0)
        assert missed.wait(10)
        boards[2].post("B/1/2", notes[2])
        first = threads.submit(_collect, boards[0], 0, notes[0], 30.0)
        try:
            assert sorted(second.result(20)) == [0, 1, 2]
        finally:
            late.set()
        third = threads.submit(_collect, boards[2], 2, notes[2], 30.0)
        assert sorted(first.result(20)) == sorted(third.result(20)) == [0, 1, 2]
