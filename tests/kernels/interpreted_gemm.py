"""Runs the Triton kernels in Triton's interpreter, on the CPU; see test_interpreted.py.

The interpreter has no inline assembly, so what waits, settles and orders is replaced by nothing:
one block runs after another here. The order is the business of test_ptx_order.py.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl
from tests.support.interpreting import run
from triton.tools.tensor_descriptor import TensorDescriptor

from interlace.kernels import sum_slots
from interlace.kernels.exchange import sums
from interlace.kernels.gemm import device, gather_kernel, scatter_kernel


@triton.jit
def nothing():
    return 0


@triton.jit
def nothing_to_settle(BY_TMA: tl.constexpr):
    return


@triton.jit
def gate_is_up(gate, expected):
    """It is: the gate's word tells afterwards which value was awaited at most."""
    tl.atomic_max(gate, expected)
    return 0


@triton.jit
def add_one(counter):
    tl.atomic_add(counter, 1)


for module in (device, gather_kernel, scatter_kernel):
    stand_ins = {
        "now": nothing,
        "settle": nothing_to_settle,
        "wait_gate": gate_is_up,
        "raise_counter": add_one,
    }
    for name, stand_in in stand_ins.items():
        if hasattr(module, name):
            setattr(module, name, stand_in)
TILE = {"BM": 16, "BN": 64, "BK": 32, "GROUP_M": 2, "FLATTEN": False}


def described(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def weight_of(w: torch.Tensor, transposed: bool, columns: int) -> TensorDescriptor:
    block = (columns, TILE["BK"]) if transposed else (TILE["BK"], columns)
    return described(w, *block)


def shapes(draw: random.Random) -> dict:
    """A shape, often ragged, and what the kernel is asked for."""
    return {
        "size": draw.choice([1, 2, 3, 4]),
        "rows": draw.choice([16, 32, 48, 64, 20, 7]),
        "inner": draw.choice([32, 64, 72, 8]),
        "columns": draw.choice([64, 128, 72, 136]),
        "transposed": draw.random() < 0.5,
        "bias": draw.random() < 0.5,
        "halves": draw.random() < 0.5,
        "programs": draw.choice([1, 2, 3, 5]),
    }


def operands(size: int, rows: int, inner: int, columns: int, transposed: bool) -> tuple:
    """x for all ranks, the weight as it is stored and as [K, N], and a bias."""
    x = torch.randn(size * rows, inner).half()
    w = torch.randn(*((columns, inner) if transposed else (inner, columns))).half()
    return x, w, (w.t() if transposed else w), torch.randn(columns).half()


def close(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    torch.testing.assert_close(got.float(), wanted.float(), rtol=4e-3, atol=4e-2, msg=str(what))


def check_gather(draw: random.Random) -> None:
    case = shapes(draw)
    size, rows, columns = case["size"], case["rows"], case["columns"]
    x, w, plain, bias = operands(size, rows, case["inner"], columns, case["transposed"])
    rank = draw.randrange(size)
    tail = draw.random() < 0.5
    tiles = rows // TILE["BM"] if rows % TILE["BM"] == 0 else 1
    pieces = max(p for p in draw.choice([(1,), (1, 2, 3, 4)]) if tiles % p == 0)
    gates = torch.zeros(size, dtype=torch.int32)
    y = torch.full((size * rows, columns), float("nan")).half()
    slots = x.clone()
    slots[rank * rows : (rank + 1) * rows] = float("nan")
    half = TILE["BN"] // 2
    gather_kernel.gather_kernel[(case["programs"],)](
        described(x[rank * rows : (rank + 1) * rows].contiguous(), TILE["BM"], TILE["BK"]),
        described(slots, TILE["BM"], TILE["BK"]),
        weight_of(w, case["transposed"], TILE["BN"]),
        described(y, TILE["BM"], TILE["BN"]),
        weight_of(w, case["transposed"], half),
        described(y, TILE["BM"], half),
        y, bias, gates, 9, rows, columns, case["inner"], rank,
        SIZE=size, TRANSPOSED=case["transposed"], BIAS=case["bias"], GATED=size > 1,
        STORE_TMA=size == 1 or rows % TILE["BM"] == 0, HALVES=case["halves"], TAIL=tail,
        PIECES=pieces, **TILE,
    )  # fmt: skip
    wanted = x.float() @ plain.float() + (bias.float() if case["bias"] else 0)
    close(y, wanted, ("gather", case, rank, tail, pieces))
    assert gates.tolist() == [0 if chunk == rank else 9 for chunk in range(size)], (case, pieces)


def check_scatter(draw: random.Random) -> None:
    case = shapes(draw)
    size, rows, columns = case["size"], case["rows"], case["columns"]
    x, w, plain, bias = operands(size, rows, case["inner"], columns, case["transposed"])
    rank = draw.randrange(size)
    m_tiles = -(-rows // TILE["BM"])
    subs = draw.choice([s for s in (1, 2, 3, 4) if m_tiles % s == 0]) if size > 1 else 1
    owns = [1, subs]
    owns += [0] if rows % (subs * TILE["BM"]) == 0 else []
    owns += [subs + 1] if rows % (2 * subs * TILE["BM"]) == 0 else []
    own_parts = draw.choice(owns)
    stage = torch.full((size * rows, columns), float("nan")).half()
    own = torch.full((rows, columns), float("nan")).half()
    counters = torch.zeros(size * subs + 1, dtype=torch.int32)
    block = TILE["BM"], TILE["BN"] // (2 if case["halves"] else 1)
    each = m_tiles * -(-columns // TILE["BN"])
    grid = min(case["programs"], each * size)  # no block without a tile
    scatter_kernel.scatter_kernel[(grid,)](
        described(x, TILE["BM"], TILE["BK"]),
        weight_of(w, case["transposed"], TILE["BN"]),
        described(stage, *block), described(own, *block), stage, own, bias, counters,
        rows, columns, case["inner"],
        SIZE=size, RANK=rank, SUBS=subs, OWN_PARTS=own_parts,
        TRANSPOSED=case["transposed"], BIAS=case["bias"], LATE=1,
        STORE_TMA=rows % TILE["BM"] == 0, HALVES=case["halves"], **TILE,
    )  # fmt: skip
    what = ("scatter", case, rank, subs, own_parts)
    made = x.float() @ plain.float() + (bias.float() if case["bias"] else 0)
    parts = stage.view(size, rows, columns)
    if not own_parts:  # in slabs, which have ranges of all parts
        parts = stage.view(subs, size, rows // subs, columns).transpose(0, 1)
    own = own.view(parts[rank].shape)
    assert bool(parts[rank].isnan().all()), (what, "the own rows go to their own place")
    parts[rank] = own
    close(stage, made, what)
    raised = [each // subs] * (size * subs)
    half = each // subs // 2 if own_parts > subs else 0
    raised[rank * subs + subs - 1] -= half
    assert counters.tolist() == [*raised, half], (what, counters, each)


def check_sums(draw: random.Random) -> None:
    dtype = draw.choice([torch.float16, torch.float32])  # the interpreter cuts bfloat16 off
    block = sums.block(dtype)
    size, count = draw.choice([1, 2, 4]), draw.choice([1, 100, block, 3 * block + 5])
    slots = torch.randn(size, count + 8).to(dtype)[:, :count]
    out = torch.empty(count, dtype=dtype)
    sums.sum_kernel[(-(-count // block),)](
        slots, out, slots.stride(0), count, SIZE=size, BLOCK=block
    )
    assert torch.equal(out, sum_slots(slots)), (size, count, dtype)


if __name__ == "__main__":
    run(check_gather, check_scatter, check_sums)
