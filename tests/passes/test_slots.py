"""Slots of symmetric buffers: as many for 24 layers as for one, in order across ranks."""

from __future__ import annotations

import pytest

from interlace.comm.cuda.memory import slot_keys
from interlace.cost import default_machine
from interlace.ir import Notify, Program, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.verify import check
from interlace.verify.reuse import shared_places


def backward(layers: int, ranks: int, rows: int = 512, dim: int = 1024) -> str:
    """Backward of some layers: gradients and saved shards are gathered, and sums scattered."""
    params = [f"x{i}: bf16[{rows}, {dim}]" for i in range(layers)]
    body: list[str] = []
    for i in range(layers):
        body += [
            f"gy{i} = alloc(bf16[{ranks * rows}, {dim}])",
            f"gh{i} = alloc(bf16[{ranks * rows}, {dim}])",
            f"gathered{i} = alloc(bf16[{ranks * rows}, {dim}])",
            f"gx{i} = alloc(bf16[{ranks * rows}, {dim}])",
            f"dw{i} = empty(bf16[{dim}, {dim}])",
            f"g{i + 1} = alloc(bf16[{rows}, {dim}])",
            f"main: all_gather(g{i}, gy{i}, team=tp)",
            f'main: call("aten.mm.out", gy{i}, w, out=gh{i})',
            f"main: all_gather(x{i}, gathered{i}, team=tp)",
            f'main: call("aten.mm.out", gathered{i}.permute(1, 0), gh{i}, out=dw{i})',
            f'main: call("aten.mm.out", gh{i}, v, out=gx{i})',
            f'main: reduce_scatter(gx{i}, g{i + 1}, reduce="sum", team=tp)',
        ]
    head = f"g0: bf16[{rows}, {dim}], w: bf16[{dim}, {dim}], v: bf16[{dim}, {dim}]"
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
