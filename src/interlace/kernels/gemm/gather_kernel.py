"""The persistent GEMM that starts on its own rows and takes the others' as they arrive.

    part k = 0        y[rank]   = x @ w
    part k = 1..W-1   y[c]      = slots[c] @ w       c = (rank + k) % W, once gates[c] has come

A chunk of another rank is awaited in PIECES ranges of rows, the last with `expected`, each before
it with one less: the first block needs the next chunk about a wave of tiles before the last does.
Tiles go in groups of GROUP_M rows of them, which may span pieces.

One block per SM works through the tiles of all parts in order, part after part, so splitting the
rows into W chunks costs no wave. `flatten` makes one loop of tiles and k-steps: the loads of the
next tile are under way while the last one is stored. With SIZE 1 this is a plain GEMM.

Where few tiles are left for the last wave (TAIL), they are cut in two, so that it takes half the
time: 448 tiles on 132 processors are 3 waves and 52 tiles, or 3 waves and 104 halves.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.gemm.device import add_bias, halve, load_weight, place, store_rows, wait_gate


@triton.jit
def turn_of(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr, PIECES: tl.constexpr):
    """The number of a tile's piece among those of all parts."""
    part = tile // (m_tiles * n_tiles)
    turn = part * PIECES
    if PIECES > 1:
        m, _ = place(tile - part * (m_tiles * n_tiles), m_tiles, n_tiles, GROUP_M)
        turn += m * PIECES // m_tiles
    return turn


@triton.jit
def find(
    tile, before, expected, gates, rows, rank, m_tiles, n_tiles,
    SIZE: tl.constexpr, BM: tl.constexpr, GROUP_M: tl.constexpr, GATED: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Where a tile lies: (part, chunk, tile's row and column in the part, row of its operand).
    `before` is the tile that this block did last: the gate of a piece is read once.
    """
    per_part = m_tiles * n_tiles
    part = tile // per_part
    chunk = (rank + part) % SIZE
    m, n = place(tile - part * per_part, m_tiles, n_tiles, GROUP_M)
    row = m * BM
    if SIZE > 1:
        if part > 0:
            row += chunk * rows
            if GATED:
                turn = turn_of(tile, m_tiles, n_tiles, GROUP_M, PIECES)
                if (before < 0) | (turn_of(before, m_tiles, n_tiles, GROUP_M, PIECES) != turn):
                    row += wait_gate(gates + chunk, expected - (PIECES - 1 - turn % PIECES))
    return part, chunk, m, n, row


@triton.jit
def gather_kernel(
    x_desc,
    slots_desc,
    w_desc,
    y_desc,
    w_half_desc,
    y_half_desc,
    y,
    bias,
    gates,
    expected,
    rows,
    columns,
    inner,
    rank,
    SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PIECES: tl.constexpr,
    STORE_TMA: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
    TAIL: tl.constexpr,
):
    m_tiles = tl.cdiv(rows, BM)
    n_tiles = tl.cdiv(columns, BN)
    k_tiles = tl.cdiv(inner, BK)
    tiles = m_tiles * n_tiles * SIZE
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    whole = tiles
    if TAIL:
        whole = tiles // programs * programs
    for tile in tl.range(first, whole, programs, flatten=FLATTEN):
        part, chunk, m, n, row = find(
            tile, tile - programs, expected, gates, rows, rank, m_tiles, n_tiles,
            SIZE, BM, GROUP_M, GATED, PIECES,
        )  # fmt: skip
        source = x_desc
        if SIZE > 1:
            if part > 0:
                source = slots_desc
        column = n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(k_tiles):
            a = source.load([row, k * BK])
            b = load_weight(w_desc, k * BK, column, TRANSPOSED)
            acc = tl.dot(a, b, acc)
        if BIAS:
            acc = add_bias(acc, bias, column, columns, BN)
        made = acc.to(y.dtype.element_ty)
        if STORE_TMA:
            to_row = chunk * rows + m * BM
            if HALVES:
                left, right = halve(made, BM, BN)
                y_half_desc.store([to_row, column], left)
                y_half_desc.store([to_row, column + BN // 2], right)
            else:
                y_desc.store([to_row, column], made)
        else:
            to = y + (chunk * rows).to(tl.int64) * columns
            store_rows(to, made, m * BM, rows, column, columns, BM, BN)

    if TAIL:
        half: tl.constexpr = BN // 2
        for piece in tl.range(first, (tiles - whole) * 2, programs):
            part, chunk, m, n, row = find(
                whole + piece // 2, -1, expected, gates, rows, rank, m_tiles, n_tiles,
                SIZE, BM, GROUP_M, GATED, PIECES,
            )  # fmt: skip
            source = x_desc
            if SIZE > 1:
                if part > 0:
                    source = slots_desc
            column = n * BN + piece % 2 * half
            acc = tl.zeros([BM, half], tl.float32)
            for k in range(k_tiles):
                a = source.load([row, k * BK])
                b = load_weight(w_half_desc, k * BK, column, TRANSPOSED)
                acc = tl.dot(a, b, acc)
            if BIAS:
                acc = add_bias(acc, bias, column, columns, half)
            made = acc.to(y.dtype.element_ty)
            if STORE_TMA:
                y_half_desc.store([chunk * rows + m * BM, column], made)
            else:
                to = y + (chunk * rows).to(tl.int64) * columns
                store_rows(to, made, m * BM, rows, column, columns, BM, half)
