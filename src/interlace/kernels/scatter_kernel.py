"""The persistent GEMM whose rows leave for their owners as they are made, own rows last.

Each rank's rows are cut in SUBS ranges, done one after another; of each range s:

    part k = 0..W-2   stage[c] = x[c] @ w, each tile raises counters[c, s]  c = (rank + 1 + k) % W
    part k = W-1      stage[rank] = x[rank] @ w, and once gates[r] has reached expected + s for all
                      other r:  y = sum over r in order of (stage[rank] if r == rank else slots[r])

The sum is in fp32 and rounded once.

All tiles end alike, with a store to the stage, so that one loop of tiles and k-steps (`flatten`)
keeps loads under way throughout. The counter of a tile is raised at k-step LATE of the block's next
one, when its stores have long been performed: waiting for them at once costs 2 us a tile.

Note [Sums under tiles]
    With UNDER an own tile is summed at a k-step of a later one: two blocks share a processor, and
    while one sums the other has the tensor cores; the halves of the grid sum at different k-steps.
    A block looks whether the gates are up but does not wait there: what is left when its tiles are
    done, it sums then, and only then does it wait. Without UNDER all is left till then.

Note [Shares]
    The peers wait for this rank's tiles, so none may be left to a block that has no processor:
    another kernel may hold some, and wait itself for a rank that waits for this one. So tiles are
    dealt in `programs` shares, which blocks draw: each takes one as it starts, and goes on to the
    shares of blocks that have not started before it waits for anything. Of all shares but its last
    a block notes in `shares` what is left to sum, and which it had before. The last draw of all
    puts the word for the next run back to 0.
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
def draw(shares, programs):
    """The number of a share that no block has, or one past the last."""
    share = tl.atomic_add(shares, 1, sem="relaxed", scope="gpu")
    if share == 2 * programs - 1:  # each block draws once in vain
        tl.store(shares, 0)
    return share


@triton.jit
def gates_are_up(gates, expected, SIZE: tl.constexpr, RANK: tl.constexpr):
    """Whether all words have come, without waiting: the same answer for all threads."""
    up = True
    for away in tl.static_range(1, SIZE):
        seen = tl.atomic_add(gates + (RANK + away) % SIZE, 0, sem="acquire", scope="sys")
        up = up & ((seen - expected).to(tl.int32) >= 0)
    return up


@triton.jit
def next_own(tile, share, programs, per_part, SIZE: tl.constexpr, SUBS: tl.constexpr):
    """The first of a share's own tiles that is not before `tile`; past all tiles if none is."""
    per_sub = per_part * SIZE
    for _ in tl.static_range(SUBS):
        own = tile // per_sub * per_sub + per_part * (SIZE - 1)
        if tile < own:
            tile = share + tl.cdiv(own - share, programs) * programs
    return tile


@triton.jit
def sum_tile(
    stage, slots, slot_stride, y, tile, ready, per_part, m_tiles, n_tiles, rows, columns,
    SIZE: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GROUP_M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums an own tile over the ranks, STEP rows at a time; the own one lies in the stage."""
    sub = tile // (per_part * SIZE)
    m, n = place(tile % per_part, m_tiles, n_tiles, GROUP_M)
    row, column = (sub * m_tiles + m) * BM + ready, n * BN
    own = stage + (RANK * rows).to(tl.int64) * columns
    at = tl.arange(0, STEP)[:, None] * columns + tl.arange(0, BN)[None, :]
    right = (column + tl.arange(0, BN) < columns)[None, :]
    for _ in tl.static_range(BM // STEP):
        row += now()
        inside = (row + tl.arange(0, STEP) < rows)[:, None] & right
        start = row.to(tl.int64) * columns + column
        loaded = ()
        for s in tl.static_range(SIZE):
            part = own if s == RANK else slots + s * slot_stride
            loaded = loaded + (tl.load(part + start + at, mask=inside, other=0.0),)  # noqa: RUF005
        total = loaded[0].to(tl.float32)
        for s in tl.static_range(1, SIZE):
            total += loaded[s].to(tl.float32)
        tl.store(y + start + at, total.to(y.dtype.element_ty), mask=inside)
        row += STEP


@triton.jit
def publish(
    counters, tile, per_part,
    SIZE: tl.constexpr, RANK: tl.constexpr, SUBS: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """Settles a tile's stores; if it is another rank's, raises the counter of its range."""
    settle(BY_TMA)
    part = tile // per_part
    sub = part // SIZE
    part -= sub * SIZE
    if part < SIZE - 1:
        raise_counter(counters + (RANK + 1 + part) % SIZE * SUBS + sub)


@triton.jit
def scatter_kernel(
    x_desc,
    w_desc,
    stage_desc,
    stage,
    slots,
    y,
    bias,
    gates,
    expected,
    counters,
    shares,
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
    per_part = m_tiles * n_tiles
    tiles = per_part * SIZE * SUBS
    programs = tl.num_programs(0)
    # Not the last k-step if there are more: the compiler puts the epilogue before these branches.
    late = tl.maximum(min(LATE, k_tiles - 2), 0)
    ready = 0  # ranges whose gates have been seen up
    if not GATED:
        ready = SUBS
    share = -1
    before = -1
    own = tiles
    taken = draw(shares, programs)
    while taken < programs:
        if share >= 0:
            tl.store(shares + 1 + 2 * share, own)
            tl.store(shares + 2 + 2 * share, before)
            before = share
        share = taken
        own = next_own(share, share, programs, per_part, SIZE, SUBS)
        sum_at = late + 2
        if share * 2 >= programs:
            sum_at += (k_tiles - late) // 2
        for tile in tl.range(share, tiles, programs, flatten=FLATTEN):
            part = tile // per_part
            sub = part // SIZE
            chunk = (RANK + 1 + part) % SIZE
            m, n = place(tile - part * per_part, m_tiles, n_tiles, GROUP_M)
            row = (sub * m_tiles + m) * BM
            column = n * BN
            acc = tl.zeros([BM, BN], tl.float32)
            for k in range(k_tiles):
                a = x_desc.load([chunk * rows + row, k * BK])
                b = load_weight(w_desc, k * BK, column, TRANSPOSED)
                acc = tl.dot(a, b, acc)
                if (k == late) & (tile != share):
                    publish(counters, tile - programs, per_part, SIZE, RANK, SUBS, STORE_TMA)
                if UNDER:
                    if (k == sum_at) & (tile > own):
                        of_sub = own // (per_part * SIZE)
                        if GATED:
                            if ready <= of_sub:
                                if gates_are_up(gates, expected + of_sub, SIZE, RANK):
                                    ready = of_sub + 1
                        if ready > of_sub:
                            sum_tile(
                                stage, slots, slot_stride, y, own, 0, per_part, m_tiles, n_tiles,
                                rows, columns, SIZE, RANK, BM, BN, GROUP_M, STEP,
                            )  # fmt: skip
                            own = next_own(own + programs, share, programs, per_part, SIZE, SUBS)
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
        last = share + (tl.cdiv(tiles - share, programs) - 1) * programs
        publish(counters, last, per_part, SIZE, RANK, SUBS, STORE_TMA)
        taken = draw(shares, programs)

    waited = 0  # always 0, and no load that it is added to can come before the wait
    left = 1
    while left > 0:
        while own < tiles:
            if GATED:
                of_sub = own // (per_part * SIZE)
                if ready <= of_sub:
                    for away in tl.static_range(1, SIZE):
                        waited += wait_gate(gates + (RANK + away) % SIZE, expected + of_sub)
                    ready = of_sub + 1
            sum_tile(
                stage, slots, slot_stride, y, own, waited, per_part, m_tiles, n_tiles,
                rows, columns, SIZE, RANK, BM, BN, GROUP_M, LAST_STEP,
            )  # fmt: skip
            own = next_own(own + programs, share, programs, per_part, SIZE, SUBS)
        left = 0
        if before >= 0:
            settle(False)
            share = before
            own = tl.load(shares + 1 + 2 * share, volatile=True)
            before = tl.load(shares + 2 + 2 * share, volatile=True)
            left = 1
