"""The persistent GEMM whose rows leave for their owners as they are made.

    part k = 0..W-2   stage[c] = x[c] @ w, and tiles raise counters[c]     c = (rank + 1 + k) % W
    part k = W-1      own = x[rank] @ w, likewise

The rows of a part are cut in SUBS ranges, one after another and each with a counter, so that copies
start early and what arrives last is little. If OWN_PARTS > SUBS, the last range of the own rows is
made in halves, of which the second has a counter behind all others: what is summed last is less.

An all-reduce goes slab by slab (OWN_PARTS = 0): the same range of every part, then the next range;
the rows of a slab lie together in x and in the stage, those of a part in its ranges of all slabs.

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
def scatter_place(
    tile, rows, m_tiles, n_tiles,
    SIZE: tl.constexpr, RANK: tl.constexpr, SUBS: tl.constexpr, OWN_PARTS: tl.constexpr,
    BM: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A tile's chunk, its row there, how far that chunk's rows lie behind in x and in the stage,
    its tile column, and the number of its counter."""
    height = m_tiles // SUBS
    turn = tile // (height * n_tiles)
    inside = tile - turn * (height * n_tiles)
    part = turn // SUBS
    sub = turn % SUBS
    if OWN_PARTS == 0:
        part = turn % SIZE
        sub = turn // SIZE
    chunk = (RANK + 1 + part) % SIZE
    counter = chunk * SUBS + sub
    first = sub * height
    if OWN_PARTS > SUBS:
        if turn == SIZE * SUBS - 1:
            height = height // 2
            if inside >= height * n_tiles:
                inside -= height * n_tiles
                first += height
                counter = SIZE * SUBS
    m, n = place(inside, height, n_tiles, GROUP_M)
    behind = chunk * rows
    if OWN_PARTS == 0:
        behind = (sub * (SIZE - 1) + chunk) * (rows // SUBS)
    return chunk, (first + m) * BM, behind, n, counter


@triton.jit
def publish(
    counters, tile, rows, m_tiles, n_tiles,
    SIZE: tl.constexpr, RANK: tl.constexpr, SUBS: tl.constexpr, OWN_PARTS: tl.constexpr,
    BM: tl.constexpr, GROUP_M: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """Settles a tile's stores and raises the counter of its range."""
    settle(BY_TMA)
    _, _, _, _, counter = scatter_place(
        tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, OWN_PARTS, BM, GROUP_M
    )
    raise_counter(counters + counter)


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
    OWN_PARTS: tl.constexpr,
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
    tiles = m_tiles * n_tiles * SIZE
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    # Not the last k-step if there are more: the compiler puts the epilogue before this branch.
    late = tl.maximum(min(LATE, k_tiles - 2), 0)
    for tile in tl.range(first, tiles, programs, flatten=FLATTEN):
        chunk, row, at, n, _ = scatter_place(
            tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, OWN_PARTS, BM, GROUP_M
        )
        column = n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(k_tiles):
            a = x_desc.load([at + row, k * BK])
            b = load_weight(w_desc, k * BK, column, TRANSPOSED)
            acc = tl.dot(a, b, acc)
            if (k == late) & (tile != first):
                publish(
                    counters, tile - programs, rows, m_tiles, n_tiles,
                    SIZE, RANK, SUBS, OWN_PARTS, BM, GROUP_M, STORE_TMA,
                )  # fmt: skip
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
    publish(
        counters, last, rows, m_tiles, n_tiles,
        SIZE, RANK, SUBS, OWN_PARTS, BM, GROUP_M, STORE_TMA,
    )  # fmt: skip
