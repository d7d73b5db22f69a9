"""Registered parameters on real GPUs: peers map the allocations that callers' tensors are in."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import transport, world_group
from tests.support.pool import Ranks
from tests.support.registered import REGISTERED, ROWS, TEXTS, K, N, drawn

from interlace.comm import team_of
from interlace.errors import BackendError, InterlaceError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

RUNS = 9


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


def whole(seed: int) -> torch.Tensor:
    """The shards of all ranks."""
    return torch.cat([on_gpu(rank, seed, ROWS, K) for rank in range(dist.get_world_size())])


def read(seed: int, options: dict[str, Any]) -> list[str]:
    """Peers get the caller's own tensor, which is written right before a run and right after."""
    rank, own = dist.get_rank(), random.Random(seed + dist.get_rank())
    x, found, wanted = torch.empty(ROWS, K, device="cuda"), [], []
    with prepared("gather_matmul", x, **options) as executor:
        for run in range(RUNS):
            w = on_gpu(0, seed - run, K, N)
            wanted.append(whole(seed + run) @ w)
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(2_000_000))
            x.copy_(on_gpu(rank, seed + run, ROWS, K))
            (y,) = executor.run([x, w])
            x.fill_(torch.nan)
            found.append(y.clone())
        executor.synchronize()
    torch.cuda.synchronize()
    pairs = enumerate(zip(found, wanted, strict=True))
    return [f"run {run} differs" for run, (y, right) in pairs if not torch.equal(y, right)]


def write(seed: int, options: dict[str, Any]) -> list[str]:
    """Peers put into the caller's own output, which is what a run gives back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = random.Random(seed + rank)
    y, found, wrong = torch.full((world * ROWS, K), 5.0, device="cuda"), [], []
    with prepared("gather_put", y, **options) as executor:
        if not y.eq(5.0).all():
            wrong.append("prepare() left something in a registered output")
        for run in range(RUNS):
            x = on_gpu(rank, seed + run, ROWS, K)
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(2_000_000))
            y.fill_(torch.nan)
            (back,) = executor.run([x], [y] if run % 2 else None)
            if back.data_ptr() != y.data_ptr():
                wrong.append(f"run {run} gives another tensor than the registered one")
            found.append(y.clone())
        executor.synchronize()
    torch.cuda.synchronize()
    pairs = enumerate(found)
    return wrong + [f"run {r} differs" for r, z in pairs if not torch.equal(z, whole(seed + r))]


def update(seed: int, options: dict[str, Any]) -> list[str]:
    """A flat buffer of parameters in the midst of a larger tensor, written by all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arena = torch.full((3, world * ROWS, K), 7.0, device="cuda")
    flat = arena[1]
    flat.copy_(on_gpu(99, seed, world * ROWS, K))
    wanted, wrong = flat.clone(), list[str]()
    with prepared("update", flat, **options) as executor:
        if not torch.equal(flat, wanted):
            wrong.append("prepare() left something in a registered input")
        for run in range(RUNS):
            executor.run([flat, on_gpu(rank, seed + run, ROWS, K)])
            wanted += whole(seed + run)
            executor.synchronize()
            if not torch.equal(flat, wanted):
                wrong.append(f"run {run} differs")
    if not arena[0].eq(7).all() or not arena[2].eq(7).all():
        wrong.append("what lies around the parameter was written")
    return wrong


KINDS = {"read": read, "write": write, "update": update}


@pytest.mark.parametrize("mode", ["streams", "in-order", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_is_right_bit_by_bit(gpus: Ranks, kind: str, mode: str, seed: int) -> None:
    options = {"in_order": mode == "in-order", "graph": mode == "graph"}
    for wrong in gpus.run(KINDS[kind], seed, options, timeout_s=90):
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
        if not torch.equal(y, whole(seed + number) @ w):
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


def give_another(seed: int, graph: bool) -> list[str]:
    """Rank 0 gives another tensor; every rank hears it, and after a reset all goes on."""
    rank, told = dist.get_rank(), list[str]()
    x, w = on_gpu(rank, seed, ROWS, K), on_gpu(0, seed, K, N)
    with prepared("gather_matmul", x, graph=graph) as executor:
        executor.run([x, w])
        executor.synchronize()
        dist.barrier()
        try:
            executor.run([x.clone() if rank == 0 else x, w])
            executor.synchronize()
            told.append("nothing")
        except InterlaceError as error:
            told.append(f"{type(error).__name__}: {error}")
        executor.reset()
        (y,) = executor.run([x, w])
        executor.synchronize()
        told.append("equal" if torch.equal(y, whole(seed) @ w) else "differs")
    return told


@pytest.mark.parametrize("graph", [False, True], ids=["streams", "graph"])
def test_another_tensor_stops_all_ranks_until_a_reset(gpus: Ranks, graph: bool, seed: int) -> None:
    first, *others = gpus.run(give_another, seed, graph, timeout_s=90, replace=True)
    assert first[0].startswith("ExecutorError: input 0 ('x') of gather_matmul is registered")
    for told in others:
        assert told[0].startswith("PeerError")
        # The first name of these ranks stands in messages: `dp`, if other tests came before.
        assert re.search(r"rank 0 of team (tp|dp) stopped: input 0 \('x'\)", told[0])
    assert {told[1] for told in (first, *others)} == {"equal"}


def of_another_kind(where: str) -> str:
    """Rank 0's tensor lies where no peer can reach it."""
    x = torch.zeros(ROWS, K, device="cuda")
    if dist.get_rank() == 0 and where == "expandable":
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            x = torch.zeros(1 << 24, device="cuda")[: ROWS * K].view(ROWS, K)
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    if dist.get_rank() == 0 and where == "cpu":
        x = x.cpu()
    with pytest.raises(InterlaceError) as caught:
        prepared("gather_matmul", x)
    if where == "expandable":
        assert isinstance(caught.value, BackendError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "said"), [("cpu", "is on cpu"), ("expandable", "expandable_segments:False")]
)
def test_memory_that_cannot_be_shared(gpus: Ranks, where: str, said: str) -> None:
    for told in gpus.run(of_another_kind, where, timeout_s=60, replace=True):
        assert said in told
