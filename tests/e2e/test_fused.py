"""Training through fused ops: the bits of the same chunks by peer copies, overlapped and in order.

Sequence-parallel feed-forwards in bf16, forward and backward: gathers shared by the matmuls of the
gradients of input and weight, scatters, and programs in which one follows the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from tests.e2e.test_training import Trace, compiled, different, local
from tests.runtime.programs import world_group
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from interlace.float8 import E4M3, Recipe, quantize
from interlace.ir import Fused, FusedKernel, Get, kernels, parse
from interlace.options import Options
from interlace.passes import lower, take_turns
from interlace.passes.strategies import pieces as pieces_file
from interlace.runtime import Executor

DIM = 16


class FeedForwards(nn.Module):
    """Two of them, with biases and a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, hidden), nn.GELU(), nn.Linear(hidden, DIM))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(options: dict[str, Any], steps: int, seed: int) -> tuple[Trace, list[int]]:
    """Losses and gradients, and how many fused ops each Program has."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    model = FeedForwards(8 * world).bfloat16()
    rows = Shard(0)
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "0": ColwiseParallel(input_layouts=rows),
                "2": RowwiseParallel(output_layouts=rows, use_local_output=True),
            },
        )
    trace: Trace = []
    with capture() as captured:
        forward = compiled(model, options)
        for _ in range(steps):
            x = torch.randn(world * 8, DIM).bfloat16()
            mine = x.chunk(world)[mesh.get_local_rank()].clone().requires_grad_()
            loss = forward(mine).float().square().mean()
            loss.backward()
            grads = (mine.grad, *(p.grad for p in model.parameters()))
            trace.append((loss.detach().clone(), *map(local, grads)))
            model.zero_grad()
    fused = [sum(isinstance(op, Fused) for op in p.ops) for p in captured.programs]
    return trace, fused


def compare(steps: int, seed: int) -> tuple[list[list[str]], list[int]]:
    """On one rank: where fused ops differ from copies, as they are and in pieces, overlapped and in
    order."""
    copies, _ = train({"strategy": "peer"}, steps, seed)
    trace, fused = train({"strategy": "fused"}, steps, seed)
    # Own rows in pieces as well, summed while others are made, and puts in turn, as large ones are.
    pieces = {"strategy": "fused"}
    cut = mock.patch.multiple(pieces_file, BESIDE_BYTES=1, TILE_ROWS=1, GROUP_ROWS=1)
    tiles = mock.patch.object(kernels, "TILE_ROWS", 1)
    with cut, tiles, mock.patch.object(take_turns, "TURN_BYTES", 1):
        beside, _ = train(pieces, steps, seed)
        beside_in_order, _ = train({**pieces, "in_order": True}, steps, seed)
    found = (trace, beside, beside_in_order)
    return [different(copies, one) for one in found], fused


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda n: f"{n}-ranks"
)
def test_training_equals_that_by_copies(pool: Pool, ranks: int, seed: int) -> None:
    for wrong, fused in pool(ranks).run(compare, 5, seed, timeout_s=280.0):
        assert wrong == [[], [], []]
        assert len(fused) == 2  # forward and backward
        assert all(fused), fused


ADDMM = """
def f(tp: Team[{size}], x: bf16[{rows}, 16], w: bf16[16, 8], b: bf16[8], y: out[bf16[{rows}, 8]]):
    main: call("aten.addmm.default", b, x, w, out=(t := bf16[{rows}, 8]))
    main: all_reduce(t, y, reduce="sum", team=tp)
"""


def in_slabs(seed: int, fetched: bool) -> list[str]:
    """On one rank: which of some all-reduces in slabs, with a bias, are off, or have other bits in
    order. `fetched`: the last slab as well goes back by copies."""
    size = torch.distributed.get_world_size()
    rows, wrong = 512 * size, list[str]()
    small: dict[str, Any] = {
        "SLAB_FLOPS": 1,
        "SLAB_BYTES": 1,
        "SMALL_BYTES": 0 if fetched else 1 << 20,
    }
    options = Options(strategy="fused")
    with mock.patch.multiple(pieces_file, **small):
        program = lower(parse(ADDMM.format(size=size, rows=rows)), options, chunks=4 * size)
    assert program.sites[0].chunks == 4 * size
    assert sum(isinstance(op, Get) for op in program.ops) == (3 + fetched) * (size - 1)
    made = [
        Executor(program, groups={"tp": world_group()}, device="cpu", options=each).prepare()
        for each in (options, dataclasses.replace(options, in_order=True))
    ]
    for number in range(6):
        torch.manual_seed(seed + number)
        every = [
            [torch.randint(-1, 2, n).bfloat16() for n in ((rows, 16), (16, 8), (8,))]
            for _ in range(size)
        ]
        wanted = torch.stack([x.float() @ w.float() + b.float() for x, w, b in every]).sum(0)
        given = every[torch.distributed.get_rank()]
        for executor, how in zip(made, ("overlapped", "in order"), strict=True):
            (found,) = executor.run(given)
            if not torch.equal(found.float(), wanted):
                wrong.append(f"run {number} {how}")
    for executor in made:
        executor.close()
    return wrong


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4], ids=lambda n: f"{n}-ranks")
def test_all_reduces_in_slabs_are_right(pool: Pool, ranks: int, fetched: bool, seed: int) -> None:
    assert pool(ranks).run(in_slabs, seed, fetched) == [[]] * ranks


PACKED = """
def f(tp: Team[{size}], x: f8e4m3[128, 208], w: f8e4m3[48, 208], b: bf16[48]):
    full = empty(f8e4m3[128 * {size}, 208])
    main: all_gather(x, full, team=tp)
    y = empty(bf16[128 * {size}, 48])
    main: call("interlace.float8_mm.out", full, w.permute(1, 0), {size}, b, True, out=y)
    return y
"""


def packed(seed: int) -> list[str]:
    """On one rank: which of some gathers of packed rows, of another scale on each rank, do not give
    what serial does. All sums are exact."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    wrong, program = list[str](), parse(PACKED.format(size=size))
    ways = {
        "serial": Options(overlap=False),
        "overlapped": Options(strategy="fused"),
        "in order": Options(strategy="fused", in_order=True),
    }
    lowered = {how: lower(program, options) for how, options in ways.items()}
    kernels = [op.kernel for how in lowered for op in lowered[how].ops if isinstance(op, Fused)]
    assert kernels == [FusedKernel(kind="gather_matmul")] * 2
    groups = {"tp": world_group()}
    made = {
        how: Executor(lowered[how], groups=groups, device="cpu", options=options).prepare()
        for how, options in ways.items()
    }
    recipe = Recipe(scale="shard", power_of_two=True)
    for number in range(4):
        torch.manual_seed(seed + size * number + rank)
        x, w = (
            quantize(torch.randint(-3, 4, (rows, 80)).bfloat16() * 2**rank, E4M3, recipe).packed
            for rows in (128, 48)
        )
        given = [x, w, torch.randint(-3, 4, (48,)).bfloat16()]
        found = {how: executor.run(given)[0] for how, executor in made.items()}
        wrong += [f"run {number} {how}" for how in ways if not found[how].equal(found["serial"])]
    for executor in made.values():
        executor.close()
    return wrong


@pytest.mark.parametrize("ranks", [2, 3], ids=lambda n: f"{n}-ranks")
def test_packed_rows_come_with_their_scales(pool: Pool, ranks: int, seed: int) -> None:
    assert pool(ranks).run(packed, seed) == [[]] * ranks
