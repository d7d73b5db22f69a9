"""The Triton kernels of the cross-entropy that sum over rows, and that scale what was summed.

total    the loss of all rows, and what it is divided by
count    how many rows count
scale    tensors times a number

total_kernel[(1, 1)](losses, ...)
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportReturnType=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

from interlace.nn.cross_entropy.parts import span


@triton.jit(do_not_specialize=["rows"])
def total_kernel(losses, kept, loss, divisor, denominator, number, rows,
                 MEAN: tl.constexpr, WEIGHTED: tl.constexpr, FIGURE: tl.constexpr,
                 GIVEN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The sum of all rows' losses over the rows' weights, a denominator given, or one.

    FIGURE of what is kept: the weights; unweighted, the logs of the sums: inf where none counts.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, rows, BLOCK):
        row = k + tl.arange(0, BLOCK)
        total += tl.load(losses + row, mask=row < rows, other=0.0)
        if MEAN:
            own = tl.load(kept + FIGURE * rows + row, mask=row < rows, other=float("inf"))
            own = tl.where(row < rows, own, 0.0) if WEIGHTED else own != float("inf")
            weight += own.to(tl.float32)
    by = 0.0 + number
    if MEAN:
        by = tl.sum(weight, 0)
    if GIVEN:
        by = tl.load(denominator).to(tl.float32)
    tl.store(loss, tl.sum(total, 0) / by)
    tl.store(divisor, by)


@triton.jit(do_not_specialize=["rows", "offset", "classes", "ignore_index"])
def count_kernel(target, divisor, sizes, rows, stride, offset, classes, ignore_index,
                 RANK: tl.constexpr, WORLD: tl.constexpr, MEASURED: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """The rows whose target is a class, and not ignored."""
    _, count = span(sizes, offset, classes, RANK, WORLD, MEASURED)
    found = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, rows, BLOCK):
        row = k + tl.arange(0, BLOCK)
        y = tl.load(target + row.to(tl.int64) * stride, mask=row < rows, other=-1).to(tl.int64)
        found += ((y >= 0) & (y < count) & (y != ignore_index)).to(tl.float32)
    tl.store(divisor, tl.sum(found, 0))


@triton.jit
def scale_one(tensor, factor, numel, BLOCK: tl.constexpr):
    """Blocks end at a multiple of 8 elements, which the compiler sees; the rest is one block's."""
    full = numel // 8 * 8
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, full, step):
        left = tl.minimum(full - first, BLOCK).to(tl.int32) // 8 * 8
        at = tl.arange(0, BLOCK)
        x = tl.load(tensor + first + at, mask=at < left, other=0.0).to(tl.float32) * factor
        tl.store(tensor + first + at, x.to(tensor.dtype.element_ty), mask=at < left)
    if tl.program_id(0) == 0:
        rest = full + tl.arange(0, 8)
        x = tl.load(tensor + rest, mask=rest < numel, other=0.0).to(tl.float32) * factor
        tl.store(tensor + rest, x.to(tensor.dtype.element_ty), mask=rest < numel)


@triton.jit(do_not_specialize=["numel", "numel_2", "numel_3"])
def scale_kernel(tensor, second, third, by, numel, numel_2, numel_3,
                 COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Each element times `by`, rounded once; nothing is read where `by` is 1.

    COUNT tensors, one for each column of the grid.
    """
    factor = tl.load(by).to(tl.float32)
    if factor != 1.0:
        if tl.program_id(1) == 0:
            scale_one(tensor, factor, numel, BLOCK)
        if COUNT > 1:
            if tl.program_id(1) == 1:
                scale_one(second, factor, numel_2, BLOCK)
        if COUNT > 2:
            if tl.program_id(1) == 2:
                scale_one(third, factor, numel_3, BLOCK)
