"""A link of known speed between ranks on a CPU: what moves bytes waits for as long as that takes.

with slow_link(0.2e9):                       # bytes a second, into or out of one rank
    optimizer = LayerWise(muon, model, mesh)
ddp.register_comm_hook(None, slow_all_reduce(0.2e9))
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from interlace.cost.machine import link_bytes
from interlace.ir import Collective, Group, Op, Program, Recv, Send, View
from interlace.optim import bucket_runs
from interlace.runtime import Executor


@contextlib.contextmanager
def slow_link(bandwidth: float) -> Iterator[None]:
    """The Executors of buckets that are made inside have such a link; 0: the link as it is."""

    def make(program: Program, **given: Any) -> Executor:
        def wait(rank: int, index: int, op: Op) -> None:
            time.sleep(moved_bytes(program, rank, op) / bandwidth)

        return Executor(program, before_op=wait, **given)

    if not bandwidth:
        yield
        return
    with mock.patch.object(bucket_runs, "Executor", make):
        yield


def moved_bytes(program: Program, rank: int, op: Op) -> float:
    """Bytes through the busiest link of an op on the Program's one buffer."""
    where, buffer = program.where(rank), program.params[0]

    def nbytes(view: View | None) -> int:
        return 0 if view is None else int(view.box(buffer, where).nbytes)

    match op:
        case Collective():
            ranks = len(where.members[op.team].ranks)
            return link_bytes(op.kind, max(nbytes(op.src), nbytes(op.dst)), ranks)
        case Group():
            sent = sum(nbytes(each.src) for each in op.ops if isinstance(each, Send))
            return max(sent, sum(nbytes(each.dst) for each in op.ops if isinstance(each, Recv)))
        case _:
            return 0.0


def slow_all_reduce(bandwidth: float) -> Callable[[object, Any], Any]:
    """A communication hook of DistributedDataParallel: the mean over ranks by such a link."""

    def reduced(flat: torch.Tensor) -> Any:
        size = dist.get_world_size()
        seconds = link_bytes("all_reduce", flat.nbytes, size) / bandwidth

        def late(future: torch.futures.Future[Any]) -> Any:
            time.sleep(seconds)
            return future.value()[0]

        work: Any = dist.all_reduce(flat.div_(size), async_op=True)
        return work.get_future().then(late)

    return lambda _, bucket: reduced(bucket.buffer())  # torch reads annotations, but no texts
