"""Muon's kernels: symmetric products, and what surrounds the iteration for a large matrix.

    u = momentum averaged with the gradient, and Nesterov's look ahead      # momentum_kernel
    ...                                                                     # Newton-Schulz
    w = w * factor + alpha * u                                              # descend_kernel

These two are one pass over memory each. Their references are the foreach operators in update.py;
values are rounded where those round them. Of symmetric products the lower triangle is computed and
mirrored:

    y[i] = alpha * a[i] @ b[i]^T + beta * c[i] + gamma * identity     for each i of a batch

ADD says whether there is a c. With TALL, a and b are given transposed, as a tall matrix has its
columns.

One block takes a tile on or below the diagonal at a time, multiplies it as any GEMM does, and
stores it twice: as it is, and transposed at its mirror image. Half of the products are left out,
and the result is symmetric bit for bit. `a`, `b` and `c` must be such that it would be symmetric
anyway: b is a, or a and b are symmetric and commute; c is symmetric.

Note [Diagonal tiles]
    A tile goes out in pieces of 64 x 64. One on the diagonal is computed whole, and the upper
    triangle of its values is replaced by the lower one before it is stored; a piece above the
    diagonal is not stored. All tiles take the same path: a branch would keep the loops over tiles
    and over k-steps from becoming one (`flatten`), in which the next tile's loads begin early;
    and a mask that follows the diagonal would keep stores from being 16 bytes wide.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlace.kernels.gemm.device import halve
from interlace.kernels.gemm.support import TileConfig
from interlace.kernels.launch import TYPES, KernelSource, block_type

PIECE = 64
"""Rows and columns that are stored at a time."""


@triton.jit
def triangle(index):
    """Row and column of a tile, counted row by row on and below the diagonal."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)  # the root was rounded up
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def quarters(tile, SIZE: tl.constexpr):
    """Upper left, lower left, upper right, lower right; no data moves between threads."""
    half: tl.constexpr = SIZE // 2
    left, right = halve(tile, SIZE, SIZE)
    upper_left, lower_left = tl.split(left.reshape([2, half, half]).permute([1, 2, 0]))
    upper_right, lower_right = tl.split(right.reshape([2, half, half]).permute([1, 2, 0]))
    return upper_left, lower_left, upper_right, lower_right


@triton.jit
def put(y, piece, row, column, rows, SIZE: tl.constexpr):
    """Stores a piece of the lower triangle and its mirror image; see Note [Diagonal tiles]."""
    line = tl.arange(0, SIZE)
    down, across = row + line < rows, column + line < rows
    at = line[:, None] * rows + line[None, :]
    lower = (row > column) | (line[:, None] >= line[None, :])
    piece = tl.where(lower, piece, tl.trans(piece))
    wanted = row >= column
    to = y + row.to(tl.int64) * rows + column
    tl.store(to + at, piece, mask=down[:, None] & across[None, :] & wanted)
    to = y + column.to(tl.int64) * rows + row
    tl.store(to + at, tl.trans(piece), mask=across[:, None] & down[None, :] & wanted)


@triton.jit
def symmetric_kernel(
    a_desc, b_desc, c_desc, y, alpha, beta, gamma, count, rows, inner,
    BM: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr, ADD: tl.constexpr,
    TALL: tl.constexpr,
):  # fmt: skip
    """`count` matrices of `rows` rows; a and b have `inner` columns. See Note [Diagonal tiles]."""
    side = tl.cdiv(rows, BM)
    each = side * (side + 1) // 2
    for tile in tl.range(tl.program_id(0), count * each, tl.num_programs(0), flatten=True):
        matrix = tile // each
        m, n = triangle(tile - matrix * each)
        first = matrix * rows
        row, column = m * BM, n * BM
        acc = tl.zeros([BM, BM], tl.float32)
        for k in range(tl.cdiv(inner, BK)):
            if TALL:
                a = a_desc.load([matrix * inner + k * BK, row])
                b = b_desc.load([matrix * inner + k * BK, column])
                acc = tl.dot(a.T, b, acc)
            else:
                a = a_desc.load([first + row, k * BK])
                b = b_desc.load([first + column, k * BK])
                acc = tl.dot(a, b.T, acc)
        to = y + first.to(tl.int64) * rows
        pieces = (acc,)
        if BM > PIECE:
            pieces = quarters(acc, BM)
        for i in tl.static_range((BM // PIECE) * (BM // PIECE)):
            down = row + i % 2 * PIECE
            across = column + i // 2 * PIECE
            made = pieces[i] * alpha
            if ADD:
                made += c_desc.load([first + down, across]).to(tl.float32) * beta
            line = tl.arange(0, PIECE)
            made += tl.where((down + line)[:, None] == (across + line)[None, :], gamma, 0.0)
            put(to, made.to(y.dtype.element_ty), down, across, rows, PIECE)


def symmetric_source(
    config: TileConfig, dtype: torch.dtype, add: bool, tall: bool = False
) -> KernelSource:
    """Kernel to compile for matrices whose rows are multiples of 16 bytes."""
    piece = min(config.bm, PIECE)
    tile = (config.bk, config.bm) if tall else (config.bm, config.bk)
    return KernelSource(
        kernel=symmetric_kernel,
        types={
            **dict.fromkeys(("a_desc", "b_desc"), block_type(dtype, *tile)),
            "c_desc": block_type(dtype, piece, piece),
            "y": "*" + TYPES[dtype],
            **dict.fromkeys(("alpha", "beta", "gamma"), "fp32"),
            **dict.fromkeys(("count", "rows", "inner"), "i32"),
        },
        constants={
            "BM": config.bm,
            "BK": config.bk,
            "PIECE": piece,
            "ADD": add,
            "TALL": tall,
        },
        num_warps=config.warps,
        num_stages=config.stages,
        divisible={"rows": 8, "inner": 8},
    )


# -- elementwise ----------------------------------------------------------------------------------

BLOCK = 4096
"""Elements that a block of threads takes."""


@triton.jit
def lerp(start, end, weight):
    """As torch does it: from the nearer end."""
    return tl.where(
        weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight)
    )


@triton.jit
def momentum_kernel(
    update, moment, x, squares, count, weight, momentum,
    AVERAGE: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the update to x, and the sum of the squares of each block of it. With AVERAGE, what is
    given is the gradient: the moment moves towards it by `weight`, and makes the update.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    u = tl.load(update + at, mask=mask, other=0.0)
    if AVERAGE:
        kept: tl.constexpr = u.dtype
        grad = u.to(tl.float32)
        u = lerp(tl.load(moment + at, mask=mask, other=0.0).to(tl.float32), grad, weight).to(kept)
        tl.store(moment + at, u, mask=mask)
        if NESTEROV:
            u = lerp(grad, u.to(tl.float32), momentum).to(kept)
    u = u.to(x.dtype.element_ty)
    tl.store(x + at, u, mask=mask)
    wide = u.to(tl.float64)  # whose squares are numbers
    tl.store(squares + tl.program_id(0), tl.sum(wide * wide))


@triton.jit
def descend_kernel(param, x, count, factor, alpha, BLOCK: tl.constexpr):
    """Multiplies the parameter by `factor`, and adds `alpha * x`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    kept = param.dtype.element_ty
    p = (tl.load(param + at, mask=mask).to(tl.float32) * factor).to(kept)
    p = p.to(tl.float32) + tl.load(x + at, mask=mask).to(tl.float32) * alpha
    tl.store(param + at, p.to(kept), mask=mask)


def momentum_source(dtype: torch.dtype, average: bool, nesterov: bool) -> KernelSource:
    """The kernel for gradients and momentum, or updates, of this dtype; x is bfloat16."""
    return KernelSource(
        kernel=momentum_kernel,
        types={
            **dict.fromkeys(("update", "moment"), "*" + TYPES[dtype]),
            "x": "*bf16",
            "squares": "*fp64",
            "count": "i32",
            **dict.fromkeys(("weight", "momentum"), "fp32"),
        },
        constants={"AVERAGE": average, "NESTEROV": nesterov, "BLOCK": BLOCK},
        num_warps=8,
        divisible={"count": 16, "squares": 8},
    )


def descend_source(param: torch.dtype) -> KernelSource:
    """The kernel for parameters of this dtype; x is bfloat16."""
    return KernelSource(
        kernel=descend_kernel,
        types={
            "param": "*" + TYPES[param],
            "x": "*bf16",
            "count": "i32",
            **dict.fromkeys(("factor", "alpha"), "fp32"),
        },
        constants={"BLOCK": BLOCK},
        num_warps=8,
        divisible={"count": 16},
    )
