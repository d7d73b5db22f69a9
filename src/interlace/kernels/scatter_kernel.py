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
    prefetch_tile,
    raise_counter,
    store_rows,
    wait_gate,
)


@triton.jit
def load_others(
    slots, slot_stride, row, rows, column, columns, rank,
    SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of every slot, as a tuple; this rank's own is not read and comes as zeros."""
    row += now()
    column = tl.multiple_of(column + now(), 16)
    inside = (row + tl.arange(0, M) < rows)[:, None] & (column + tl.arange(0, N) < columns)[None, :]
    at = tl.arange(0, M)[:, None] * columns + tl.arange(0, N)[None, :]
    slots += row.to(tl.int64) * columns + column
    loaded = (tl.load(slots + at, mask=inside & (rank != 0), other=0.0),)
    for s in tl.static_range(1, SIZE):
        slots += slot_stride
        another = tl.load(slots + at, mask=inside & (rank != s), other=0.0)
        loaded = loaded + (another,)  # noqa: RUF005
    return loaded


@triton.jit
def finish_tile(
    own, others, y, y2, row, rows, column, columns, rank,
    SIZE: tl.constexpr, SECOND: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sums one tile over the ranks, in order and in fp32, and stores it, in `y2` too if asked."""
    mine = own.to(tl.float32)
    total = tl.where(rank == 0, mine, others[0].to(tl.float32))
    for s in tl.static_range(1, SIZE):
        total += tl.where(rank == s, mine, others[s].to(tl.float32))
    total = total.to(y.dtype.element_ty)
    store_rows(y, total, row, rows, column, columns, M, N)
    if SECOND:
        store_rows(y2, total, row, rows, column, columns, M, N)


@triton.jit
def raise_for(
    counters, tile, per_part, per_sub, rank,
    SIZE: tl.constexpr, SUBS: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """Raises the counter of the range that this tile of another rank's rows belongs to."""
    part = tile // per_part
    sub = (tile - part * per_part) // per_sub
    raise_counter(counters + (rank + 1 + part) % SIZE * SUBS + sub, BY_TMA)


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
    LATE: tl.constexpr,
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
            if LATE:
                if (k == LATE) & (tile != first):
                    raise_for(
                        counters, tile - programs, per_part, per_sub, rank, SIZE, SUBS, STORE_TMA
                    )
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
        if not LATE:
            raise_for(counters, tile, per_part, per_sub, rank, SIZE, SUBS, STORE_TMA)

    # A second loop, since the epilogue is another one. It goes on where this block left off.
    done = tl.cdiv(tl.maximum(others - first, 0), programs)
    start = first + done * programs - others
    if LATE:
        if done > 0:
            last = first + (done - 1) * programs
            raise_for(counters, last, per_part, per_sub, rank, SIZE, SUBS, STORE_TMA)
    for tile in tl.range(start, per_part, programs, flatten=FLATTEN):
        sub = tile // per_sub
        m, n = place(tile - sub * per_sub, m_tiles, n_tiles, GROUP_M)
        row = (sub * m_tiles + m) * BM
        column = n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(k_tiles):
            a = x_desc.load([rank * rows + row, k * BK])
            b = load_weight(w_desc, k * BK, column, TRANSPOSED)
            acc = tl.dot(a, b, acc)
            if (k % 4 == 0) & (k < 4 * (SIZE - 1)):
                other = (rank + 1 + k // 4) % SIZE
                prefetch_tile(slots + other * slot_stride, row, rows, column, columns, BM, BN)
        if BIAS:
            acc = add_bias(acc, bias, column, columns, BN)
        own = acc.to(y.dtype.element_ty)
        ready = row
        if GATED:
            if tile == start:
                for away in tl.static_range(1, SIZE):
                    ready += wait_gate(gates + (rank + away) % SIZE, expected)
        # By quarters, which fit in registers; with few ranks two of them do, and the next one is
        # loaded while one is summed.
        ahead: tl.constexpr = SIZE <= 4
        quarter: tl.constexpr = BN // 4
        left, right = halve(own, BM, BN)
        q0, q1 = halve(left, BM, BN // 2)
        q2, q3 = halve(right, BM, BN // 2)
        o0 = load_others(slots, slot_stride, ready, rows, column, columns, rank, SIZE, BM, quarter)
        if ahead:
            o1 = load_others(
                slots, slot_stride, ready, rows, column + quarter, columns, rank,
                SIZE, BM, quarter,
            )  # fmt: skip
        finish_tile(
            q0, o0, y, y2, ready, rows, column, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        if not ahead:
            o1 = load_others(
                slots, slot_stride, ready, rows, column + quarter, columns, rank,
                SIZE, BM, quarter,
            )  # fmt: skip
        if ahead:
            o2 = load_others(
                slots,
                slot_stride,
                ready,
                rows,
                column + 2 * quarter,
                columns,
                rank,
                SIZE,
                BM,
                quarter,
            )
        finish_tile(
            q1, o1, y, y2, ready, rows, column + quarter, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        if not ahead:
            o2 = load_others(
                slots,
                slot_stride,
                ready,
                rows,
                column + 2 * quarter,
                columns,
                rank,
                SIZE,
                BM,
                quarter,
            )
        if ahead:
            o3 = load_others(
                slots,
                slot_stride,
                ready,
                rows,
                column + 3 * quarter,
                columns,
                rank,
                SIZE,
                BM,
                quarter,
            )
        finish_tile(
            q2, o2, y, y2, ready, rows, column + 2 * quarter, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        if not ahead:
            o3 = load_others(
                slots,
                slot_stride,
                ready,
                rows,
                column + 3 * quarter,
                columns,
                rank,
                SIZE,
                BM,
                quarter,
            )
        finish_tile(
            q3, o3, y, y2, ready, rows, column + 3 * quarter, columns, rank,
            SIZE, SECOND, BM, quarter,
        )  # fmt: skip
        if RAISE_OWN:
            raise_counter(counters + rank * SUBS + sub, False)
