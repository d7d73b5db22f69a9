"""The persistent GEMM that starts on its own rows and takes the others' as they arrive.

    part k = 0        y[rank]   = x @ w
    part k = 1..W-1   y[c]      = slots[c] @ w       c = (rank + k) % W, once gates[c] has come

One block per SM works through the tiles of all parts in order, part after part, so splitting the
rows into W chunks costs no wave. `flatten` makes one loop of tiles and k-steps: the loads of the
next tile are under way while the last one is stored. With SIZE 1 this is a plain GEMM.
"""

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.device import add_bias, halve, load_weight, place, store_rows, wait_gate


@triton.jit
def gather_kernel(
    x_desc,
    slots_desc,
    w_desc,
    y_desc,
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
    STORE_TMA: tl.constexpr,
    HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    m_tiles = tl.cdiv(rows, BM)
    n_tiles = tl.cdiv(columns, BN)
    k_tiles = tl.cdiv(inner, BK)
    per_part = m_tiles * n_tiles
    first = tl.program_id(0)
    for tile in tl.range(first, per_part * SIZE, tl.num_programs(0), flatten=FLATTEN):
        part = tile // per_part
        chunk = (rank + part) % SIZE
        m, n = place(tile - part * per_part, m_tiles, n_tiles, GROUP_M)
        column = n * BN
        row = m * BM
        source = x_desc
        if SIZE > 1:
            if part > 0:
                source = slots_desc
                row += chunk * rows
                if GATED:
                    row += wait_gate(gates + chunk, expected)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(k_tiles):
            a = source.load([row, k * BK])
            b = load_weight(w_desc, k * BK, column, TRANSPOSED)
            acc = tl.dot(a, b, acc)
        if BIAS:
            acc = add_bias(acc, bias, column, columns, BN)
        if STORE_TMA:
            to_row = chunk * rows + m * BM
            if HALVES:
                left, right = halve(acc, BM, BN)
                y_desc.store([to_row, column], left.to(y_desc.dtype))
                y_desc.store([to_row, column + BN // 2], right.to(y_desc.dtype))
            else:
                y_desc.store([to_row, column], acc.to(y_desc.dtype))
        else:
            to = y + (chunk * rows).to(tl.int64) * columns
            tile_of_y = acc.to(y.dtype.element_ty)
            store_rows(to, tile_of_y, m * BM, rows, column, columns, BM, BN)
