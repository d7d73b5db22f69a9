"""Registered parameters on real GPUs: peers map the allocations that callers' tensors are in."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import transport, world_group
from tests.support.pool import Ranks
from tests.support.registered import REGISTERED, ROWS, RUNS, TEXTS, K, N, drawn, whole

from interlace.comm import team_of
from interlace.errors import BackendError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

NUM_RUNS = 9


def prepared(kind: str, tensor: torch.Tensor, **options: Any) -> Executor:
    """An Executor of one of the Programs, with its one tensor registered."""
    return Executor(
        parse(TEXTS[kind](dist.get_world_size())),
        groups={"tp": world_group()},
        device="cuda",
        options=Options(timeout_s=20.0, **transport(), **options),
        registered={REGISTERED[kind]: tensor},
    ).prepare()


def on_gpu(rank: int, seed: int, *sizes: int) -> torch.Tensor:
    return drawn(rank, seed, *sizes, device="cuda")


def registered_runs(kind: str, seed: int, options: dict[str, Any]) -> list[str]:
    """Runs of one of the Programs, now and then behind other work of this rank's device."""
    own = random.Random(seed + dist.get_rank())

    def make(kind: str, tensor: torch.Tensor) -> Executor:
        return prepared(kind, tensor, **options)

    def delay() -> None:
        if own.random() < 0.5:
            torch.cuda._sleep(own.randrange(2_000_000))

    wrong = RUNS[kind](make, seed, NUM_RUNS, "cuda", delay)
    torch.cuda.synchronize()
    return wrong


@pytest.mark.parametrize("mode", ["streams", "in-order", "graph"])
@pytest.mark.parametrize("kind", RUNS)
def test_is_right_bit_by_bit(gpus: Ranks, kind: str, mode: str, seed: int) -> None:
    options = {"in_order": mode == "in-order", "graph": mode == "graph"}
    for wrong in gpus.run(registered_runs, kind, seed, options, timeout_s=90):
        assert not wrong, "\n".join(wrong)


def share_allocations(seed: int) -> list[str]:
    """Two tensors of one allocation; then memory that was freed, allocated anew and registered."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), list[str]()
    big = torch.empty(1 << 23, device="cuda")  # 32 MiB: a segment of its own
    one, other = (big[k * ROWS * K :][: ROWS * K].view(ROWS, K) for k in (0, 5))

    def right(executor: Executor, x: torch.Tensor, number: int) -> None:
        w = on_gpu(0, seed, K, N)
        x.copy_(on_gpu(rank, seed + number, ROWS, K))
        (y,) = executor.run([x, w])
        executor.synchronize()
        if not torch.equal(y, whole(seed + number, "cuda") @ w):
            wrong.append(f"number {number} differs")

    first = prepared("gather_matmul", one)
    side = team_of(world_group(), "tp").cuda(one.device, 60.0)
    count = len(side.registry.mapped)
    second = prepared("gather_matmul", other)
    if len(side.registry.mapped) != count:
        wrong.append(f"one allocation is mapped twice: {count} to {len(side.registry.mapped)}")
    for number, (executor, x) in enumerate([(first, one), (second, other), (first, one)]):
        right(executor, x, number)
    first.close()
    right(second, other, 3)
    second.close()
    del big, one, other, x, executor

    def again(number: int) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.empty_cache()  # what was registered before is freed
        new = torch.empty((1 << 23) + number % 2 * (1 << 22), device="cuda")
        mine = new[: ROWS * K].view(ROWS, K)
        with prepared("gather_matmul", mine) as executor:
            right(executor, mine, number)

    for number in range(4, 8):
        again(number)
    if len(side.registry.mapped) > count - (world - 1):
        wrong.append(f"{len(side.registry.mapped)} mappings stay, of memory that is gone")
    return wrong


def test_allocations_are_shared_and_come_and_go(gpus: Ranks, seed: int) -> None:
    for wrong in gpus.run(share_allocations, seed, timeout_s=90):
        assert not wrong, "\n".join(wrong)


def in_an_expandable_segment() -> str:
    """Rank 0's tensor lies where no peer can reach it."""
    x = torch.zeros(ROWS, K, device="cuda")
    if dist.get_rank() == 0:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            x = torch.zeros(1 << 24, device="cuda")[: ROWS * K].view(ROWS, K)
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    with pytest.raises(BackendError) as caught:
        prepared("gather_matmul", x)
    return str(caught.value)


def test_memory_that_cannot_be_shared(gpus: Ranks) -> None:
    for told in gpus.run(in_an_expandable_segment, timeout_s=60, replace=True):
        assert "expandable_segments:False" in told
