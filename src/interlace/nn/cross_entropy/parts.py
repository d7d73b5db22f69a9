"""What the kernels of the cross-entropy share: where a row lies, its target, its loss, its slope.

    at = place(row, n1, n2, s0, s1, s2, DIMS=1)     # in elements: a row of any strides
    loss = finish(...)                              # of one row, or of a block of rows

The kernels are in kernel.py, the formulas in plain torch in twin.py.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportReturnType=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def place(row, n1, n2, s0, s1, s2, DIMS: tl.constexpr):
    """Where a row lies: its number counted through DIMS dimensions, the last n2 and n1 long."""
    at = row.to(tl.int64)
    if DIMS == 1:
        return at * s2
    if DIMS == 2:
        return (at // n2) * s1 + (at % n2) * s2
    outer = at // n2
    return (outer // n1) * s0 + (outer % n1) * s1 + (at % n2) * s2


@triton.jit
def span(sizes, offset, classes, RANK: tl.constexpr, WORLD: tl.constexpr, MEASURED: tl.constexpr):
    """The first class of this rank and the number of classes of all: given, or on the device."""
    if MEASURED:
        first = tl.zeros((), tl.int64)
        total = tl.zeros((), tl.int64)
        for q in tl.static_range(WORLD):
            size = tl.load(sizes + q)
            total += size
            if q < RANK:
                first += size
        return first, total
    return tl.zeros((), tl.int64) + offset, tl.zeros((), tl.int64) + classes


@triton.jit
def cap_logits(x, softcap):
    """softcap * tanh(x / softcap): a series near zero, where 1 - 2 / (e^2u + 1) cancels."""
    u = x * (1.0 / softcap)
    size = tl.abs(u)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    far = tl.where(u < 0, -far, far)
    v = u * u
    near = v * (-0.05396825396825397 + v * 0.021869488536155203)
    near = u + u * v * (-0.3333333333333333 + v * 0.13333333333333333 + v * near)
    return softcap * tl.where(size < 0.25, near, far)


@triton.jit
def finite(m):
    """A maximum to subtract: zero where all is -inf, so that no difference of infinities is."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def pick(logits, weight, target, at, first, local, stride, softcap,
         CAP: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    """The target's logit and class weight: -inf and 0 where another rank, or none, has it."""
    column = target - first
    mine = (column >= 0) & (column < local)
    x = tl.load(logits + at + column * stride, mask=mine, other=0.0).to(tl.float32)
    if CAP:
        x = cap_logits(x, softcap)
    x = tl.where(mine, x, float("-inf"))
    if WEIGHTED:
        return x, tl.load(weight + column, mask=mine, other=0.0).to(tl.float32)
    return x, tl.where(mine, 1.0, 0.0)


@triton.jit
def finish(out, losses, word, row, rows, first_row, inside, target, classes, ignore_index,
           m, d, xy, wy, s, mass, smoothing, z_loss,
           SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, ZLOSS: tl.constexpr):  # fmt: skip
    """A row's loss, and what backward needs of it: its maximum, log of the sum, mass, weight."""
    ignored = target == ignore_index
    known = (target >= 0) & (target < classes)
    base = finite(m)
    log_sum = tl.log2(d) * LN2
    loss = log_sum - (xy - base)
    if WEIGHTED:
        loss = loss * wy
    if SMOOTH:
        each = smoothing / classes.to(tl.float32)
        loss = (1.0 - smoothing) * loss + each * (mass * log_sum - s)
        tl.store(out + 2 * rows + row, mass, mask=inside)
    if ZLOSS:
        lse = base + log_sum
        loss += z_loss * lse * lse
    loss = tl.where(ignored, 0.0, tl.where(known, loss, float("nan")))
    counted = known & (~ignored)
    tl.store(out + row, tl.where(ignored, 0.0, base), mask=inside)
    tl.store(out + rows + row, tl.where(counted, log_sum, float("inf")), mask=inside)
    if WEIGHTED:
        tl.store(out + (2 + SMOOTH) * rows + row, tl.where(counted, wy, 0.0), mask=inside)
    tl.store(losses + row, loss, mask=inside)
    wrong = inside & (~ignored) & (~known)
    tl.store(word + 1 + tl.zeros_like(row), target, mask=wrong)
    tl.store(word + 2 + tl.zeros_like(row), classes + tl.zeros_like(target), mask=wrong)
    tl.store(word + tl.zeros_like(row), row.to(tl.int64) + first_row + 1, mask=wrong)


@triton.jit
def edges(head, end, groups, VEC: tl.constexpr):
    """The columns of a row's first and last 16 bytes that are not all the row's, and which are."""
    index = tl.arange(0, 2 * VEC)
    final = (groups - 1) * VEC
    leading = index < VEC
    c = tl.where(leading, index, final + index - VEC)
    begun = (head > 0) & leading
    ended = (end % VEC != 0) & (~leading) & ((groups > 1) | (head == 0))
    return c, (begun | ended) & (c >= head) & (c < end)


@triton.jit
def slope(x, c, weight, inside, column, m, shift, a, b, h, softcap,
          SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """The gradient of columns c."""
    x = x.to(tl.float32)
    if CAP:
        x = cap_logits(x, softcap)
    g = tl.exp2((x - m) * LOG2E - shift) * a
    if SMOOTH:
        if WEIGHTED:
            g -= b * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        else:
            g -= b
    g = tl.where(c == column, g - h, g)
    if CAP:
        u = x * (1.0 / softcap)
        g *= 1.0 - u * u
    return g
