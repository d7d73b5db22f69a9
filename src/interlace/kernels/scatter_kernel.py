"""The persistent GEMM whose rows leave for their owners as they are made, own rows last.

    part k = 0..W-2   stage[c] = x[c] @ w, each tile raises counters[c]     c = (rank + 1 + k) % W
    part k = W-1      stage[rank] = x[rank] @ w, and once gates[s] have come for all other s
                      y = sum over s in order of (stage[rank] if s == rank else slots[s])

The sum is in fp32 and rounded once. A chunk's rows may be split in SUBS ranges, each with a counter
and in order, so that copies start earlier.

All tiles end alike, with a store to the stage, so that one loop of tiles and k-steps (`flatten`)
keeps loads under way throughout. The counter of a tile is raised at k-step LATE of the block's next
one, when its stores have long been performed: waiting for them at once costs 2 us a tile. There are
no more blocks than tiles.

Note [Sums under tiles]
    With UNDER an own tile is summed at a k-step of a later one: two blocks share a processor, and
    while one sums the other has the tensor cores; the halves of the grid sum at different k-steps.
    A block looks whether the gates are up but does not wait there: what is left when its tiles are
    done, it sums then, and only then does it wait. Without UNDER all is left till then.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

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
    settle,
    store_rows,
    wait_gate,
)


@triton.jit
def gates_are_up(gates, expected, SIZE: tl.constexpr, RANK: tl.constexpr):
    """Whether all words have come, without waiting: the same answer for all threads."""
    up = True
    for away in tl.static_range(1, SIZE):
        seen = tl.atomic_add(gates + (RANK + away) % SIZE, 0, sem="acquire", scope="sys")
        up = up & ((seen - expected).to(tl.int32) >= 0)
    return up


@triton.jit
def sum_tile(
    stage, slots, slot_stride, y, y2, row, rows, column, columns,
    SIZE: tl.constexpr, RANK: tl.constexpr, SECOND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums a tile over the ranks, STEP rows at a time; the own one lies in the stage."""
    own = stage + (RANK * rows).to(tl.int64) * columns
    at = tl.arange(0, STEP)[:, None] * columns + tl.arange(0, BN)[None, :]
    right = (column + tl.arange(0, BN) < columns)[None, :]
    for _ in tl.static_range(BM // STEP):
        row += now()
        inside = (row + tl.arange(0, STEP) < rows)[:, None] & right
        start = row.to(tl.int64) * columns + column
        loaded = ()
        for s in tl.static_range(SIZE):
            place = own if s == RANK else slots + s * slot_stride
            loaded = loaded + (tl.load(place + start + at, mask=inside, other=0.0),)  # noqa: RUF005
        total = loaded[0].to(tl.float32)
        for s in tl.static_range(1, SIZE):
            total += loaded[s].to(tl.float32)
        made = total.to(y.dtype.element_ty)
        tl.store(y + start + at, made, mask=inside)
        if SECOND:
            tl.store(y2 + start + at, made, mask=inside)
        row += STEP


@triton.jit
def publish(
    counters, tile, per_part, per_sub,
    SIZE: tl.constexpr, RANK: tl.constexpr, SUBS: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """Settles a tile's stores; if it is another rank's, raises the counter of its range."""
    settle(BY_TMA)
    part = tile // per_part
    if part < SIZE - 1:
        sub = (tile - part * per_part) // per_sub
        raise_counter(counters + (RANK + 1 + part) % SIZE * SUBS + sub)


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
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
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
    UNDER: tl.constexpr,
    STEP: tl.constexpr,
    LAST_STEP: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    m_tiles = tl.cdiv(rows, BM) // SUBS
    n_tiles = tl.cdiv(columns, BN)
    k_tiles = tl.cdiv(inner, BK)
    per_sub = m_tiles * n_tiles
    per_part = per_sub * SUBS
    tiles = per_part * SIZE
    others = per_part * (SIZE - 1)
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    # The own tiles of this block are own + i * programs; `summed` of them are done.
    own = first + tl.cdiv(tl.maximum(others - first, 0), programs) * programs
    summed = 0
    # Not the last k-step if there are more: the compiler puts the epilogue before these branches.
    late = tl.maximum(min(LATE, k_tiles - 2), 0)
    sum_at = late + 2
    if first * 2 >= programs:
        sum_at += (k_tiles - late) // 2
    for tile in tl.range(first, tiles, programs, flatten=FLATTEN):
        part = tile // per_part
        chunk = (RANK + 1 + part) % SIZE
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
            if (k == late) & (tile != first):
                publish(counters, tile - programs, per_part, per_sub, SIZE, RANK, SUBS, STORE_TMA)
            if UNDER:
                if (k == sum_at) & (tile > own + summed * programs):
                    up = True
                    if GATED:
                        if summed == 0:
                            up = gates_are_up(gates, expected, SIZE, RANK)
                    if up:
                        which = own + summed * programs - others
                        of_sub = which // per_sub
                        at_m, at_n = place(which - of_sub * per_sub, m_tiles, n_tiles, GROUP_M)
                        sum_tile(
                            stage, slots, slot_stride, y, y2, (of_sub * m_tiles + at_m) * BM, rows,
                            at_n * BN, columns, SIZE, RANK, SECOND, BM, BN, STEP,
                        )  # fmt: skip
                        if RAISE_OWN:
                            settle(False)
                            raise_counter(counters + RANK * SUBS + of_sub)
                        summed += 1
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

    last = first + (tl.cdiv(tiles - first, programs) - 1) * programs
    publish(counters, last, per_part, per_sub, SIZE, RANK, SUBS, STORE_TMA)
    ready = 0
    if GATED:
        if own + summed * programs < tiles:
            for away in tl.static_range(1, SIZE):
                ready += wait_gate(gates + (RANK + away) % SIZE, expected)
    for tile in tl.range(own + summed * programs, tiles, programs):
        which = tile - others
        of_sub = which // per_sub
        m, n = place(which - of_sub * per_sub, m_tiles, n_tiles, GROUP_M)
        sum_tile(
            stage, slots, slot_stride, y, y2, (of_sub * m_tiles + m) * BM + ready, rows,
            n * BN, columns, SIZE, RANK, SECOND, BM, BN, LAST_STEP,
        )  # fmt: skip
        if RAISE_OWN:
            settle(False)
            raise_counter(counters + RANK * SUBS + of_sub)
