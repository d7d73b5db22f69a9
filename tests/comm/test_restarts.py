"""A job that starts anew over a store that outlives it, as torchrun's does, resumes whatever the
ranks of the attempts before had left there when they ended."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Died, Pool
from torch.testing._internal.distributed import fake_pg

from interlace.comm.rendezvous.board import Board
from interlace.frontend.teams import consent_of_ranks
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

LIMIT_S, KILLED_AFTER_S = 10.0, 0.7

TEXT = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]], z: out[f32[4]]):
    s = alloc(f32[4], symmetric=tp)
    main: copy(x, s)
    main: notify(ready, to=tp.rank + 1)
    main: expect(ready, tp.rank - 1)
    main: get(s, y, peer=tp.rank + 1)
    main: free(s)
    main: all_reduce(x, z, reduce="sum", team=tp, backend="gloo")
"""


def job(port: int, dying: int | None, asks: int, compiles: bool) -> list[float]:
    """One attempt. Rank `dying` ends when it has asked the store that often; a launcher then kills
    the other. Nothing but Interlace uses the store: what torch's own backends leave there can keep
    torch's own from coming back.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    assert fake_pg is not None
    dist.init_process_group(
        "fake", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=world
    )
    if dying is not None and rank != dying:
        timer = threading.Timer(KILLED_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    if rank == dying:
        die_after(asks)
    group: Any = dist.group.WORLD
    try:
        if compiles:
            assert consent_of_ranks(["layer"], [(group, True)], LIMIT_S) == [True]
        options = Options(timeout_s=LIMIT_S)
        executor = Executor(parse(TEXT), groups={"tp": group}, options=options).prepare()
        y, z = executor.run([torch.full((4,), float(rank))])
        return [y[0].item(), z[0].item()]
    finally:
        if dying is not None:
            os._exit(1)


def die_after(asks: int) -> None:
    ask, left = Board.ask, iter(range(asks))

    def counted(self: Board, question: Any) -> Any:
        if next(left, None) is None:
            os._exit(1)
        return ask(self, question)

    Board.ask = counted
    if not asks:
        os._exit(1)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_job_resumes_after_a_rank_died_before_its_first_meeting(pool: Pool, dying: int) -> None:
    resume(pool, [(dying, 0)], compiles=False)


def test_a_job_resumes_wherever_a_rank_died_while_preparing(pool: Pool, seed: int) -> None:
    draw = random.Random(seed)
    resume(pool, [(draw.randrange(2), draw.randrange(1, 60)) for _ in range(2)], compiles=True)


def resume(pool: Pool, deaths: list[tuple[int, int]], compiles: bool) -> None:
    """Attempts in which a rank dies, and one that must go well."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for dying, asks in deaths:
        found = pool(2).run(job, store.port, dying, asks, compiles, may_die={0, 1})
        assert all(isinstance(one, Died) for one in found)
    assert pool(2).run(job, store.port, None, 0, compiles, replace=True) == [[1.0, 1.0], [0.0, 1.0]]
