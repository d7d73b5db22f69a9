"""Triton kernels of a grouped linear layer, beside torch's grouped GEMM.

    wgrad_kernel   out[g] (+)= dy[rows of g]^T x[rows of g]      fp32 accumulators, no temporary
    sums_kernel    out[g]   = sum of dy over the rows of g       the gradient of the biases
    rows_kernel    y[row]  += bias[group of row], and 0 in the rows behind the last group
    ends_kernel    ends[g]  = sum of the sizes up to g           inside the matrix

`ends[g]` is the row behind group g, on the device. Every element is written by one block, in an
order of additions that only the shapes decide, so results are the same bits in every run. Groups
may be empty; rows behind the last are padding.

Note [Full tiles and the last one]
    A group begins at any row, so its k-tiles are loaded through descriptors of the whole matrices,
    without masks, as long as they are full. The last one may reach into the next group, whose rows
    may hold anything, NaN as well: both its operands are loaded under a mask.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.gemm.device import halve, place


@triton.jit
def extent(ends, group, tokens):
    """The rows of a group, inside the matrix whatever `ends` says."""
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    start = tl.minimum(tl.maximum(start, 0), tokens)
    return start, tl.maximum(tl.minimum(end, tokens), start)


@triton.jit
def put(
    to, made, row, column, rows, columns, BM: tl.constexpr, BN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Stores a tile, or adds it, rounded to the type that is there."""
    at_m = row + tl.arange(0, BM)
    at_n = column + tl.arange(0, BN)
    inside = (at_m < rows)[:, None] & (at_n < columns)[None, :]
    to += at_m.to(tl.int64)[:, None] * columns + at_n[None, :]
    made = made.to(to.dtype.element_ty)
    if ACCUMULATE:
        wide = tl.float64 if to.dtype.element_ty == tl.float64 else tl.float32
        old = tl.load(to, inside).to(wide)
        made = (old + made.to(wide)).to(to.dtype.element_ty)
    tl.store(to, made, inside)


@triton.jit
def wgrad_kernel(
    dy_desc,
    x_desc,
    dy,
    x,
    ends,
    out,
    tokens,
    rows,
    columns,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """One block a tile [BM, BN] of one group's [rows, columns]; see Note [Full tiles ...]."""
    m_tiles = tl.cdiv(rows, BM)
    n_tiles = tl.cdiv(columns, BN)
    group = tl.program_id(0) // (m_tiles * n_tiles)
    m, n = place(tl.program_id(0) % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP_M)
    row, column = m * BM, n * BN
    start, end = extent(ends, group, tokens)
    if ACCUMULATE:
        if end == start:
            return
    acc = tl.zeros([BM, BN], tl.float32)
    full = (end - start) // BK
    for k in range(full):
        a = dy_desc.load([start + k * BK, row])
        b = x_desc.load([start + k * BK, column])
        acc = tl.dot(tl.trans(a), b, acc)
    last = start + full * BK
    if last < end:
        at_m = row + tl.arange(0, BM)
        at_n = column + tl.arange(0, BN)
        at_k = last + tl.arange(0, BK)
        there = (at_k < end)[:, None]
        from_row = at_k.to(tl.int64)[:, None]
        a = tl.load(dy + from_row * rows + at_m[None, :], there & (at_m < rows)[None, :], 0.0)
        b = tl.load(x + from_row * columns + at_n[None, :], there & (at_n < columns)[None, :], 0.0)
        acc = tl.dot(tl.trans(a), b, acc)
    to = out + group.to(tl.int64) * rows * columns
    # In two halves: the old values of a whole tile beside its sums would not fit the registers.
    left, right = halve(acc, BM, BN)
    half: tl.constexpr = BN // 2
    put(to, left, row, column, rows, columns, BM, half, ACCUMULATE)
    put(to, right, row, column + half, rows, columns, BM, half, ACCUMULATE)


@triton.jit
def sums_kernel(dy, ends, out, tokens, columns, BK: tl.constexpr, BN: tl.constexpr):
    """One block BN columns of one group: their sums, added up in fp32."""
    n_tiles = tl.cdiv(columns, BN)
    group = tl.program_id(0) // n_tiles
    at_n = tl.program_id(0) % n_tiles * BN + tl.arange(0, BN)
    start, end = extent(ends, group, tokens)
    acc = tl.zeros([BK, BN], tl.float32)
    for k in range(start, end, BK):
        at_k = k + tl.arange(0, BK)
        there = (at_k < end)[:, None] & (at_n < columns)[None, :]
        rows = dy + at_k.to(tl.int64)[:, None] * columns + at_n[None, :]
        acc += tl.load(rows, there, 0.0).to(tl.float32)
    to = out + group.to(tl.int64) * columns + at_n
    tl.store(to, tl.sum(acc, 0).to(out.dtype.element_ty), at_n < columns)


@triton.jit
def rows_kernel(
    y, bias, ends, groups, tokens, columns,
    BIAS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block BK rows and BN columns; without a bias, blocks of real rows end at once."""
    first = tl.program_id(0) * BK
    total = tl.load(ends + groups - 1)
    if not BIAS:
        if first + BK <= total:
            return
    at_k = first + tl.arange(0, BK)
    at_n = tl.program_id(1) * BN + tl.arange(0, BN)
    real = at_k < total
    there = (at_k < tokens)[:, None] & (at_n < columns)[None, :]
    to = y + at_k.to(tl.int64)[:, None] * columns + at_n[None, :]
    if BIAS:
        of = tl.zeros([BK], tl.int32)
        for group in range(groups):
            of += (at_k >= tl.load(ends + group)).to(tl.int32)
        mine = there & real[:, None]
        made = tl.load(to, mine, 0.0).to(tl.float32)
        made += tl.load(bias + of.to(tl.int64)[:, None] * columns + at_n[None, :], mine, 0.0).to(
            tl.float32
        )
        tl.store(to, made.to(y.dtype.element_ty), there)
    else:
        zeros = tl.zeros([BK, BN], y.dtype.element_ty)
        tl.store(to, zeros, there & (real == 0)[:, None])


@triton.jit
def ends_kernel(sizes, ends, groups, stride, tokens, BLOCK: tl.constexpr):
    """One block has all groups. Sizes and sums are of 32 bits and wrap, as torch's cumsum does."""
    at = tl.arange(0, BLOCK)
    size = tl.load(sizes + at.to(tl.int64) * stride, at < groups, 0).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.cumsum(size, 0), 0), tokens)
    tl.store(ends + at, end, at < groups)
