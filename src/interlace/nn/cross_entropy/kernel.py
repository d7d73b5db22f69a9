"""The Triton kernels of the cross-entropy: one read forward, one read and one write backward.

    stats    a row's maximum, sum of exponentials, ... over the local vocabulary, online
    merge    joins the stats of several parts of a row: pieces of it, or ranks
    grad     the gradient of the logits, in their type
    total    the loss of all rows, and what it is divided by;  count: how many rows count
    scale    tensors times a number

    stats_kernel[(rows, parts)](logits, ...)

A tile is [U, LANES, VEC]: each thread loads 16 bytes (VEC elements) U times, and the maximum over
U and VEC needs no other thread, so the loop has one exponential an element and no exchange. Loads
begin at a 16-byte boundary below the row; what is not the row's in the first and the last 16 bytes
is taken apart (`edges`), so that rows of any length and place are read 16 bytes at a time.

Note [Sums below the maximum]
    Smoothing needs the sum of a row's logits, less the maximum each. A thread keeps that below its
    own maximum so far, and lowers it by its mass (how many, or their weights) times the rise when
    that rises. All that is added has one sign, so nothing cancels: neither a large common offset
    costs bits, nor logits of -1e9 by which classes are masked, wherever they stand in the row.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportReturnType=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GEOMETRY = (
    "rows", "local", "offset", "classes", "ignore_index", "inner", "outer_step", "step", "skew",
    "first_row",
)  # fmt: skip
"""Numbers that a kernel is not compiled anew for."""


@triton.jit
def place(row, inner, outer_step, step, DIMS: tl.constexpr):
    """Where a row lies: its number counted through DIMS dimensions, the last `inner` long."""
    at = row.to(tl.int64)
    if DIMS == 1:
        return at * step
    return (at // inner) * outer_step + (at % inner) * step


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
def finite(m):
    """A maximum to subtract: zero where all is -inf, so that no difference of infinities is."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def pick(logits, weight, target, at, first, local, WEIGHTED: tl.constexpr):
    """The target's logit and class weight: -inf and 0 where another rank, or none, has it."""
    column = target - first
    mine = (column >= 0) & (column < local)
    x = tl.load(logits + at + column, mask=mine, other=0.0).to(tl.float32)
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
def slope(x, c, weight, inside, column, m, shift, a, b, h,
          SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    """The gradient of columns c."""
    x = x.to(tl.float32)
    g = tl.exp2((x - m) * LOG2E - shift) * a
    if SMOOTH:
        if WEIGHTED:
            g -= b * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        else:
            g -= b
    return tl.where(c == column, g - h, g)


@triton.jit(do_not_specialize=[*GEOMETRY, "groups_a_part"])
def stats_kernel(
    logits, target, weight, stats, out, losses, word, sizes,
    rows, local, offset, classes, ignore_index, inner, outer_step, step, skew, first_row,
    smoothing, z_loss, groups_a_part,
    RANK: tl.constexpr, WORLD: tl.constexpr, MEASURED: tl.constexpr,
    DIMS: tl.constexpr, EVEN: tl.constexpr,
    SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, ZLOSS: tl.constexpr,
    FINISH: tl.constexpr, U: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    at = place(row, inner, outer_step, step, DIMS) + skew
    y = tl.load(target + row).to(tl.int64)
    counted = y != ignore_index
    below = at // VEC * VEC  # the 16-byte boundary, and how far above it the row begins
    base = logits + below
    head = 0 if EVEN else (at - below).to(tl.int32)
    end = head + local
    groups = (end + VEC - 1) // VEC
    first = part * groups_a_part
    last = tl.minimum(first + groups_a_part, groups)
    last = tl.where(counted, last, first)  # a row that does not count is not read
    lane = tl.arange(0, LANES)
    group = lane[None, :, None] + LANES * tl.arange(0, U)[:, None, None]
    element = tl.arange(0, VEC)[None, None, :]
    m = tl.full((LANES,), float("-inf"), tl.float32)
    d = tl.zeros((LANES,), tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    if not EVEN:
        column, rim = edges(head, end, groups, VEC)
        rim = rim & counted & (part == 0)
        few = tl.load(base + column, mask=rim, other=float("-inf")).to(tl.float32)
        m = tl.zeros((LANES,), tl.float32) + tl.max(few, 0)
        below_top = few - finite(tl.max(few, 0))
        d = tl.where(lane == 0, tl.sum(tl.exp2(below_top * LOG2E), 0), 0.0)
        if SMOOTH:
            own = rim.to(tl.float32)
            if WEIGHTED:
                own = tl.load(weight + column - head, mask=rim, other=0.0).to(tl.float32)
            s = tl.where(lane == 0, tl.sum(tl.where(rim, below_top * own, 0.0), 0), 0.0)
            mass = tl.where(lane == 0, tl.sum(own, 0), 0.0)
    for k in range(first, last, U * LANES):
        g = k + group
        whole = g < last
        if not EVEN:
            whole = whole & (g * VEC >= head) & (g * VEC + VEC <= end)
        inside = tl.broadcast_to(whole, (U, LANES, VEC))
        x = tl.load(base + (g * VEC + element), mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(tl.max(x, 2), 0))
        safe = finite(new)
        away = x - safe[None, :, None]
        e = tl.exp2(away * LOG2E)
        d = d * tl.exp2((m - safe) * LOG2E) + tl.sum(tl.sum(e, 2), 0)
        if SMOOTH:  # see Note [Sums below the maximum]
            s += mass * (finite(m) - safe)
            if WEIGHTED:
                w = tl.load(weight + (g * VEC + element) - head, mask=inside, other=0.0)
                w = w.to(tl.float32)
                away = away * w
                mass += tl.sum(tl.sum(w, 2), 0)
            else:
                mass += VEC * tl.sum(tl.sum(whole.to(tl.float32), 2), 0)
            s += tl.sum(tl.sum(tl.where(inside, away, 0.0), 2), 0)
        m = new
    top = tl.max(m, 0)
    safe = finite(top)
    total = tl.sum(d * tl.exp2((m - safe) * LOG2E), 0)
    sum_away = 0.0
    sum_mass = 0.0
    if SMOOTH:
        sum_mass = tl.sum(mass, 0)
        sum_away = tl.sum(s + mass * (finite(m) - safe), 0)
    if FINISH:
        start, count = span(sizes, offset, classes, RANK, WORLD, MEASURED)
        xy, wy = pick(logits, weight, y, at, start, local, WEIGHTED)
        finish(out, losses, word, row, rows, first_row, row < rows, y, count, ignore_index,
               top, total, xy, wy, sum_away, sum_mass, smoothing, z_loss,
               SMOOTH, WEIGHTED, ZLOSS)  # fmt: skip
    else:
        K: tl.constexpr = 3 + 2 * SMOOTH + WEIGHTED
        here = stats + part.to(tl.int64) * K * rows + row
        tl.store(here, top)
        tl.store(here + rows, total)
        if SMOOTH:
            tl.store(here + 3 * rows, sum_away)
            tl.store(here + 4 * rows, sum_mass)


@triton.jit(do_not_specialize=[*GEOMETRY, "parts"])
def merge_kernel(
    stats, merged, logits, target, weight, out, losses, word, sizes,
    rows, parts, local, offset, classes, ignore_index, inner, outer_step, step, skew, first_row,
    smoothing, z_loss,
    RANK: tl.constexpr, WORLD: tl.constexpr, MEASURED: tl.constexpr, DIMS: tl.constexpr,
    SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, ZLOSS: tl.constexpr,
    PICK: tl.constexpr, FINISH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Joins parts, in their order: the pieces of one rank (PICK: it looks the target up) or ranks.

    FINISH: into losses; otherwise into the stats that this rank sends, `merged`.
    """
    K: tl.constexpr = 3 + 2 * SMOOTH + WEIGHTED
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    y = tl.load(target + row, mask=inside, other=0).to(tl.int64)
    start, count = span(sizes, offset, classes, RANK, WORLD, MEASURED)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    here = stats + row
    for _ in range(parts):
        m = tl.maximum(m, tl.load(here, mask=inside, other=0.0))
        here += K * rows
    safe = finite(m)
    d = tl.zeros((BLOCK,), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    xy = tl.full((BLOCK,), float("-inf"), tl.float32)
    wy = tl.zeros((BLOCK,), tl.float32)
    here = stats + row
    for _ in range(parts):
        top = tl.load(here, mask=inside, other=0.0)
        d += tl.load(here + rows, mask=inside, other=0.0) * tl.exp2((top - safe) * LOG2E)
        if SMOOTH:
            more = tl.load(here + 4 * rows, mask=inside, other=0.0)
            s += tl.load(here + 3 * rows, mask=inside, other=0.0) + more * (finite(top) - safe)
            mass += more
        if not PICK:
            xy = tl.maximum(xy, tl.load(here + 2 * rows, mask=inside, other=0.0))
            if WEIGHTED:
                wy += tl.load(here + (K - 1) * rows, mask=inside, other=0.0)
        here += K * rows
    if PICK:
        at = place(row, inner, outer_step, step, DIMS) + skew
        own = tl.where(inside, y, -1)  # of no rank
        xy, wy = pick(logits, weight, own, at, start, local, WEIGHTED)
    if FINISH:
        finish(out, losses, word, row, rows, first_row, inside, y, count, ignore_index,
               m, d, xy, wy, s, mass, smoothing, z_loss, SMOOTH, WEIGHTED, ZLOSS)  # fmt: skip
    else:
        here = merged + row
        tl.store(here, m, mask=inside)
        tl.store(here + rows, d, mask=inside)
        tl.store(here + 2 * rows, xy, mask=inside)
        if SMOOTH:
            tl.store(here + 3 * rows, s, mask=inside)
            tl.store(here + 4 * rows, mass, mask=inside)
        if WEIGHTED:
            tl.store(here + (K - 1) * rows, wy, mask=inside)


@triton.jit(do_not_specialize=[*GEOMETRY, "g_row", "groups_a_program"])
def grad_kernel(
    logits, target, weight, out, upstream, divisor, grad, sizes,
    rows, local, offset, classes, ignore_index, inner, outer_step, step, skew, first_row,
    g_row, smoothing, z_loss, groups_a_program,
    RANK: tl.constexpr, WORLD: tl.constexpr, MEASURED: tl.constexpr,
    DIMS: tl.constexpr, EVEN: tl.constexpr, ALIKE: tl.constexpr,
    SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, ZLOSS: tl.constexpr,
    PER_ROW: tl.constexpr, DIVIDED: tl.constexpr, SCALED: tl.constexpr,
    U: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """grad = (p A - b w - h [target]) upstream: one read, one write, in one pass.

    ALIKE: rows of the gradient begin as far above a 16-byte boundary as those of the logits.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    at = place(row, inner, outer_step, step, DIMS) + skew
    y = tl.load(target + row).to(tl.int64)
    start, count = span(sizes, offset, classes, RANK, WORLD, MEASURED)
    ignored = y == ignore_index
    known = (y >= 0) & (y < count)
    counted = known & (~ignored)
    column = tl.where(counted, y - start, -1)
    column = tl.where(column < local, column, -1).to(tl.int32)  # -1: of another rank, or none
    m = tl.load(out + row, mask=counted, other=0.0)
    log_sum = tl.load(out + rows + row, mask=counted, other=0.0)
    up = 1.0
    if SCALED:
        up = tl.load(upstream + (row if PER_ROW else 0)).to(tl.float32)
    if DIVIDED:
        up = up / tl.load(divisor)
    h = tl.load(out + (2 + SMOOTH) * rows + row) if WEIGHTED else 1.0
    a = h
    b = 0.0
    if SMOOTH:
        b = smoothing / count.to(tl.float32)
        h = h * (1.0 - smoothing)
        a = h + b * tl.load(out + 2 * rows + row, mask=counted, other=0.0)
    if ZLOSS:
        a += 2.0 * z_loss * (m + log_sum)
    blank = tl.where(ignored, 0.0, float("nan"))  # the gradient of a row that does not count
    a = tl.where(counted, a * up, blank)
    b = tl.where(counted, b * up, 0.0)
    h = tl.where(counted, h * up, 0.0)
    shift = log_sum * LOG2E
    below = at // VEC * VEC
    base = logits + below
    head = 0 if EVEN else (at - below).to(tl.int32)
    to = row.to(tl.int64) * g_row
    into = grad + (to // VEC * VEC if ALIKE else to - head)
    end = head + local
    groups = (end + VEC - 1) // VEC
    first = part * groups_a_program
    last = tl.minimum(first + groups_a_program, groups)
    group = tl.arange(0, LANES)[None, :, None] + LANES * tl.arange(0, U)[:, None, None]
    element = tl.arange(0, VEC)[None, None, :]
    if not EVEN:
        place_of, rim = edges(head, end, groups, VEC)
        rim = rim & (part == 0)
        few = tl.load(base + place_of, mask=rim & counted, other=0.0)
        few = slope(few, place_of - head, weight, rim, column, m, shift, a, b, h,
                    SMOOTH, WEIGHTED)  # fmt: skip
        tl.store(into + place_of, few.to(grad.dtype.element_ty), mask=rim)
    for k in range(first, last, U * LANES):
        g = k + group
        c = g * VEC + element
        whole = g < last
        if not EVEN:
            whole = whole & (g * VEC >= head) & (g * VEC + VEC <= end)
        inside = tl.broadcast_to(whole, (U, LANES, VEC))
        x = tl.load(base + c, mask=tl.broadcast_to(whole & counted, (U, LANES, VEC)), other=0.0)
        x = slope(x, c - head, weight, inside, column, m, shift, a, b, h,
                  SMOOTH, WEIGHTED)  # fmt: skip
        tl.store(into + c, x.to(grad.dtype.element_ty), mask=inside)


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
def count_kernel(target, divisor, sizes, rows, offset, classes, ignore_index,
                 RANK: tl.constexpr, WORLD: tl.constexpr, MEASURED: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """The rows whose target is a class, and not ignored."""
    _, count = span(sizes, offset, classes, RANK, WORLD, MEASURED)
    found = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, rows, BLOCK):
        row = k + tl.arange(0, BLOCK)
        y = tl.load(target + row, mask=row < rows, other=-1).to(tl.int64)
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
