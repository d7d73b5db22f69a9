"""Slots of symmetric buffers: as many for 24 layers as for one, in order across ranks."""

from __future__ import annotations

import time
from typing import cast

import pytest
import torch
import torch.distributed as dist
from tests.support.held_back import held_back
from tests.support.pool import Pool

from interlace.comm.cuda.memory import slot_keys
from interlace.cost import default_machine
from interlace.ir import Notify, Program, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor
from interlace.verify import check
from interlace.verify.reuse import shared_places


def backward(layers: int, ranks: int, dtype: str = "bf16", rows: int = 512, dim: int = 1024) -> str:
    """Backward of some layers: gradients and saved shards are gathered, and sums scattered."""
    params = [f"x{i}: {dtype}[{rows}, {dim}]" for i in range(layers)]
    body: list[str] = []
    for i in range(layers):
        body += [
            f"gy{i} = alloc({dtype}[{ranks * rows}, {dim}])",
            f"gh{i} = alloc({dtype}[{ranks * rows}, {dim}])",
            f"gathered{i} = alloc({dtype}[{ranks * rows}, {dim}])",
            f"gx{i} = alloc({dtype}[{ranks * rows}, {dim}])",
            f"dw{i} = empty({dtype}[{dim}, {dim}])",
            f"g{i + 1} = alloc({dtype}[{rows}, {dim}])",
            f"main: all_gather(g{i}, gy{i}, team=tp)",
            f'main: call("aten.mm.out", gy{i}, w, out=gh{i})',
            f"main: all_gather(x{i}, gathered{i}, team=tp)",
            f'main: call("aten.mm.out", gathered{i}.permute(1, 0), gh{i}, out=dw{i})',
            f'main: call("aten.mm.out", gh{i}, v, out=gx{i})',
            f'main: reduce_scatter(gx{i}, g{i + 1}, reduce="sum", team=tp)',
        ]
    head = f"g0: {dtype}[{rows}, {dim}], w: {dtype}[{dim}, {dim}], v: {dtype}[{dim}, {dim}]"
    text = f"def backward(tp: Team[{ranks}], {head}, {', '.join(params)}):\n"
    body[-6] = body[-6].replace("alloc", "empty")
    results = ", ".join((*(f"dw{i}" for i in range(layers)), f"g{layers}"))
    return text + "".join(f"    {line}\n" for line in (*body, f"return {results}"))


def cuda_slots(program: Program) -> dict[str, set[str]]:
    """The slots that CUDA allocates, and the names that the Program gives them."""
    buffers = program.buffers()
    takes = {name: str(b.team) for name, b in buffers.items() if b.kind == "symmetric"}
    keys = slot_keys(takes, buffers, lambda: shared_places([program]))
    found: dict[str, set[str]] = {}
    for name, key in keys.items():
        found.setdefault(key, set()).add(str(buffers[name].storage))
    return found


@pytest.mark.parametrize("strategy", ["auto", "peer"])
def test_slots_of_24_layers_equal_those_of_one(strategy: str) -> None:
    """By the planner's names and in CUDA's memory, in which no take of a run has one of its own."""
    options = Options(strategy=strategy, regions="eager")  # type: ignore[arg-type]
    found: dict[int, set[str]] = {}
    handed: dict[int, int] = {}
    for layers in (1, 2, 24):
        serial = parse(backward(layers, 2))
        program = lower(serial, options, default_machine("h200"))
        assert check(program).sound
        slots = cuda_slots(program)
        assert all(names == {key} for key, names in slots.items())
        found[layers] = set(slots)
        handed[layers] = sum(isinstance(op, Notify) and "_freed" in op.signal for op in program.ops)
    assert found[24] == found[2] == found[1 if strategy == "auto" else 2] <= {"s0", "s1"}
    assert strategy == "peer" or handed[24] > handed[1], "what is gathered ahead orders nothing"


def _run(seed: int) -> list[int]:
    """Each rank's results of a few runs, where it does its part late, against the serial ones."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    serial = parse(backward(6, 2, "f32"))
    options = Options(strategy="auto", regions="eager")
    program = lower(serial, options, default_machine("h200"))
    plain = lower(serial, Options(overlap=False), default_machine("cpu"))
    handed = sum(isinstance(op, Notify) and "_freed" in op.signal for op in program.ops)
    random = torch.Generator().manual_seed(seed + rank)
    groups = {"tp": group}
    with (
        held_back(seed + rank),
        Executor(program, groups=groups).prepare() as overlapped,
        Executor(plain, groups=groups).prepare() as expected,
    ):
        for number in range(4):
            # whole numbers, so that the order of sums does not matter
            shapes = cast("list[tuple[int, int]]", [buffer.shape for buffer in serial.params])
            inputs = [torch.randint(-1, 2, shape, generator=random).float() for shape in shapes]
            for weight in (1, 2):
                turned = torch.randperm(shapes[weight][0], generator=random)
                inputs[weight] = torch.eye(shapes[weight][0])[turned]
            if rank == number % 2:
                time.sleep(0.05)
            found = overlapped.run([x.clone() for x in inputs])
            for one, other in zip(found, expected.run(inputs), strict=True):
                assert torch.equal(one, other), f"seed {seed}, run {number}"
    return [handed]


def test_six_layers_give_the_bits_of_the_serial_program(pool: Pool, seed: int) -> None:
    """With two slots for twelve gathers and sums, also where a rank is late."""
    for (handed,) in pool(2).run(_run, seed, timeout_s=100):
        assert handed > 0
