"""The persistent GEMM whose rows leave for their owners as they are made, own rows last.

    part k = 0..W-2   stage[c] = x[c] @ w, each tile raises counters[c]     c = (rank + 1 + k) % W
    part k = W-1      y = sum of slots[s] over the ranks s in order, where slots[rank] is the own
                      x[rank] @ w, rounded like the others, and the rest came from peers

The sum is in fp32 and rounded once. The gates of the slots are awaited in the epilogue of the own
tiles, as late as can be. A chunk's rows may be split in SUBS ranges, each with a counter and in
order, so that copies start earlier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.device import (
    add_bias,
    halve,
    load_weight,
    now,
    place,
    raise_counter,
    store_rows,
    wait_gate,
)


@triton.jit
def sum_tile(
    own, slots, slot_stride, row, rows, column, columns, rank,
    SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The sum over all ranks, in rank order and in fp32, of one tile of the slots; `own` is ours."""
    row += now()
    column = tl.multiple_of(column + now(), 16)
    inside = (row + tl.arange(0, M) < rows)[:, None] & (column + tl.arange(0, N) < columns)[None, :]
    at = tl.arange(0, M)[:, None] * columns + tl.arange(0, N)[None, :]
    slots += row.to(tl.int64) * columns + column
    own = own.to(tl.float32)
    other = tl.load(slots + at, mask=inside & (rank != 0), other=0.0).to(tl.float32)
    total = tl.where(rank == 0, own, other)
    for s in tl.static_range(1, SIZE):
        slots += slot_stride
        other = tl.load(slots + at, mask=inside & (rank != s), other=0.0).to(tl.float32)
        total += tl.where(rank == s, own, other)
    return total


@triton.jit
def finish_tile(
    own, slots, slot_stride, y, y2, row, rows, column, columns, rank,
    SIZE: tl.constexpr, SECOND: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sums one tile over the ranks and stores it, in `y2` as well if that is asked for."""
    if SIZE > 1:
        own = sum_tile(
            own, slots, slot_stride, row, rows, column, columns, rank, SIZE, M, N
        ).to(y.dtype.element_ty)  # fmt: skip
    store_rows(y, own, row, rows, column, columns, M, N)
    if SECOND:
        store_rows(y2, own, row, rows, column, columns, M, N)


@triton.jit
def scatter_kernel(
    x_desc,
    w_desc,
    stage_desc,
    stage,
    slots,
    y,
    y2,
    bias,
    gates,
    expected,
    counters,
    slot_stride,
    rows,
    columns,
    inner,
    rank,
    SIZE: tl.constexpr,
    SUBS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SECOND: tl.constexpr,
    RAISE_OWN: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    m_tiles = tl.cdiv(rows, BM) // SUBS
    n_tiles = tl.cdiv(columns, BN)
    k_tiles = tl.cdiv(inner, BK)
    per_sub = m_tiles * n_tiles
    per_part = per_sub * SUBS
    others = per_part * (SIZE - 1)
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    for tile in tl.range(first, others, programs, flatten=FLATTEN):
        part = tile // per_part
        chunk = (rank + 1 + part) % SIZE
        inside = tile - part * per_part
        sub = inside // per_sub
        m, n = place(inside - sub * per_sub, m_tiles, n_tiles, GROUP_M)
        row = (sub * m_tiles + m) * BM
        column = n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(k_tiles):
            a = x_desc.load([chunk * rows + row, k * BK])
            b = load_weight(w_desc, k * BK, column, TRANSPOSED)
            acc = tl.dot(a, b, acc)
        if BIAS:
            acc = add_bias(acc, bias, column, columns, BN)
        made = acc.to(y.dtype.element_ty)
        if STORE_TMA:
            if HALVES:
                left, right = halve(made, BM, BN)
                stage_desc.store([chunk * rows + row, column], left)
                stage_desc.store([chunk * rows + row, column + BN // 2], right)
            else:
                stage_desc.store([chunk * rows + row, column], made)
        else:
            to = stage + (chunk * rows).to(tl.int64) * columns
            store_rows(to, made, row, rows, column, columns, BM, BN)
        raise_counter(counters + chunk * SUBS + sub, STORE_TMA)

    # A second loop, since the epilogue is another one. It goes on where this block left off.
    done = tl.cdiv(tl.maximum(others - first, 0), programs)
    for tile in tl.range(first + done * programs - others, per_part, programs, flatten=FLATTEN):
        sub = tile // per_sub
        m, n = place(tile - sub * per_sub, m_tiles, n_tiles, GROUP_M)
        row = (sub * m_tiles + m) * BM
        column = n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(k_tiles):
            a = x_desc.load([rank * rows + row, k * BK])
            b = load_weight(w_desc, k * BK, column, TRANSPOSED)
            acc = tl.dot(a, b, acc)
        if BIAS:
            acc = add_bias(acc, bias, column, columns, BN)
        own = acc.to(y.dtype.element_ty)
        ready = row
        if GATED:
            for k in tl.static_range(1, SIZE):
                ready += wait_gate(gates + (rank + k) % SIZE, expected)
        left, right = halve(own, BM, BN)
        one, two = halve(left, BM, BN // 2)
        three, four = halve(right, BM, BN // 2)
        quarter: tl.constexpr = BN // 4
        finish_tile(
            one, slots, slot_stride, y, y2, ready, rows, column, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        finish_tile(
            two, slots, slot_stride, y, y2, ready, rows, column + quarter, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        finish_tile(
            three, slots, slot_stride, y, y2, ready, rows, column + 2 * quarter, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        finish_tile(
            four, slots, slot_stride, y, y2, ready, rows, column + 3 * quarter, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        if RAISE_OWN:
            raise_counter(counters + rank * SUBS + sub, False)
