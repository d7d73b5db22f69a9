"""The persistent GEMM whose rows leave for their owners as they are made.

    part k = 0..W-2   stage[c] = x[c] @ w, and tiles raise counters[c]     c = (rank + 1 + k) % W
    part k = W-1      own = x[rank] @ w, likewise

The rows of a part are cut in SUBS ranges, one after another and each with a counter, so that copies
start early and what arrives last is little. Where the own rows are summed range by range while the
rest is made, their ranges come between those of part W-2, once LEAD of these are made:

    ... p0 p1 own0 p2 own1 p3 own2 own3        SUBS = 4, LEAD = 2; LEAD = SUBS: no own one between

An all-reduce goes slab by slab (LEAD = 0): the same range of every part, then the next range; the
rows of a slab lie together in x and in the stage, those of a part in its ranges of all slabs.

All tiles end alike, with a store, so that one loop of tiles and k-steps (`flatten`) keeps loads
under way throughout. The counter of a tile is raised at k-step LATE of the block's next one, when
its stores have long been performed: waiting for them at once costs 2 us a tile. There are no more
blocks than tiles, and none waits for anything: peers wait for these tiles.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.gemm.device import (
    add_bias,
    halve,
    load_weight,
    place,
    raise_counter,
    settle,
    store_rows,
)


@triton.jit
def turn_of(turn, SIZE: tl.constexpr, SUBS: tl.constexpr, LEAD: tl.constexpr):
    """The part and the range whose tiles have that turn."""
    part = turn // SUBS
    sub = turn % SUBS
    if LEAD == 0:
        part = turn % SIZE
        sub = turn // SIZE
    elif LEAD < SUBS:
        late = turn - (SIZE - 2) * SUBS - LEAD
        if late >= 0:
            if late < 2 * (SUBS - LEAD):
                part = SIZE - 1 - late % 2
                sub = late // 2 + late % 2 * LEAD
    return part, sub


@triton.jit
def above(chunk, sub, rows, SIZE: tl.constexpr, SUBS: tl.constexpr, LEAD: tl.constexpr):
    """How far the rows of a range of a part lie in x and in the stage behind those in the part."""
    apart = chunk * rows
    if LEAD == 0:
        apart = (sub * (SIZE - 1) + chunk) * (rows // SUBS)
    return apart


@triton.jit
def publish(
    counters, tile, per_turn,
    SIZE: tl.constexpr, RANK: tl.constexpr, SUBS: tl.constexpr, LEAD: tl.constexpr,
    BY_TMA: tl.constexpr,
):  # fmt: skip
    """Settles a tile's stores and raises the counter of its range."""
    settle(BY_TMA)
    part, sub = turn_of(tile // per_turn, SIZE, SUBS, LEAD)
    raise_counter(counters + (RANK + 1 + part) % SIZE * SUBS + sub)


@triton.jit
def scatter_kernel(
    x_desc,
    w_desc,
    stage_desc,
    own_desc,
    stage,
    own,
    bias,
    counters,
    rows,
    columns,
    inner,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    SUBS: tl.constexpr,
    LEAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    LATE: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    m_tiles = tl.cdiv(rows, BM)
    n_tiles = tl.cdiv(columns, BN)
    k_tiles = tl.cdiv(inner, BK)
    height = m_tiles // SUBS
    per_turn = height * n_tiles
    tiles = per_turn * SUBS * SIZE
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    # Not the last k-step if there are more: the compiler puts the epilogue before this branch.
    late = tl.maximum(min(LATE, k_tiles - 2), 0)
    for tile in tl.range(first, tiles, programs, flatten=FLATTEN):
        turn = tile // per_turn
        part, sub = turn_of(turn, SIZE, SUBS, LEAD)
        chunk = (RANK + 1 + part) % SIZE
        m, n = place(tile - turn * per_turn, height, n_tiles, GROUP_M)
        row = (sub * height + m) * BM
        at = above(chunk, sub, rows, SIZE, SUBS, LEAD)
        column = n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(k_tiles):
            a = x_desc.load([at + row, k * BK])
            b = load_weight(w_desc, k * BK, column, TRANSPOSED)
            acc = tl.dot(a, b, acc)
            if (k == late) & (tile != first):
                publish(counters, tile - programs, per_turn, SIZE, RANK, SUBS, LEAD, STORE_TMA)
        if BIAS:
            acc = add_bias(acc, bias, column, columns, BN)
        made = acc.to(stage.dtype.element_ty)
        if STORE_TMA:
            to_desc = stage_desc
            to_row = at + row
            if chunk == RANK:
                to_desc = own_desc
                to_row = row
            if HALVES:
                left, right = halve(made, BM, BN)
                to_desc.store([to_row, column], left)
                to_desc.store([to_row, column + BN // 2], right)
            else:
                to_desc.store([to_row, column], made)
        else:
            to = stage + at.to(tl.int64) * columns
            if chunk == RANK:
                to = own
            store_rows(to, made, row, rows, column, columns, BM, BN)

    last = first + (tl.cdiv(tiles - first, programs) - 1) * programs
    publish(counters, last, per_turn, SIZE, RANK, SUBS, LEAD, STORE_TMA)
