"""Current scaling on CUDA, bit for bit rule.py: a kernel reads for the maximum, another casts.

    amax_kernel    the largest magnitude of each of PARTS parts
    cast_kernel    scale and cast, to packed rows, or to those of the transpose, or both: one read
    guess_kernel   the same by a scale that may be right, and the maximum on the way
    mend_kernel    casts again if it was not: see Note [Scales are guessed]
    turn_kernel    packed rows to those of the transpose, whose scales become one

A tensor is cast in tiles of [BM, BK], tile t at (t // n, t % n) of the n to a row. A thread has the
same column of four rows that follow each other: of them it makes one word of the transpose. No
kernel waits for another inside: `cast_kernel` joins the parts again in each of its programs, which
costs less than a third launch, or a word that must be zero before the first. It is launched before
the kernel ahead of it in the stream has ended, and waits for that one (`gdc_wait`).

Note [Scales are guessed]
    A scale that is a power of two stays the same from step to step, unless the maximum leaves its
    binade. So where a matrix was quantised before (a layer's input, weight or gradient), it is cast
    at once by the scale of that time, which reads it once instead of twice, and the maximum is
    found on the way. The kernel behind it ends at once if all tiles used the right scale, and casts
    all again if not: the result is the same whatever the guess, which may lie where other layers or
    streams write theirs.

Note [bf16 as int16]
    bf16 is read as int16 and widened by a shift, which is exact in Triton's interpreter too.

Note [Four bytes by assembly]
    ptxas makes wrong code of bytes that LLVM joins to a word (Triton 3.6: other bytes than those
    that were converted, or a crash). So one piece of assembly converts four numbers to one word;
    Triton's interpreter, which has none, joins bytes.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from interlace.float8.data import TAIL

MAX = tl.constexpr(3.4028234663852886e38)
"""The largest number of fp32."""
TAIL_BYTES = tl.constexpr(TAIL)
TAIL_WORDS = tl.constexpr(TAIL // 4)
_FOUR = (
    "{{ .reg .b16 low, high; cvt.rn.satfinite.{0}x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.{0}x2.f32 high, $4, $3; mov.b32 $0, {{low, high}}; }}"
)
E4M3_ASM, E5M2_ASM = (tl.constexpr(_FOUR.format(kind)) for kind in ("e4m3", "e5m2"))


@triton.jit
def wide(raw, BF16: tl.constexpr):
    """fp32 of what was loaded; see Note [bf16 as int16]."""
    if BF16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def amax_kernel(x, found, rows, columns, stride, BF16: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: the maximum of pieces i, i + n, ... of a row each. NaN does not count."""
    gdc_launch_dependents()
    pieces = tl.cdiv(columns, BLOCK)
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int16 if BF16 else tl.float32)
    for piece in range(tl.program_id(0), rows * pieces, tl.num_programs(0)):
        first = (piece % pieces) * BLOCK
        here = x + (piece // pieces).to(tl.int64) * stride + first
        raw = tl.load(here + lane, mask=lane < columns - first, other=0)
        if BF16:  # of NaN, adding 0x7F makes a negative number
            largest = tl.maximum(largest, (raw & 0x7FFF) + 0x7F)
        else:
            size = tl.abs(raw.to(tl.float32))
            largest = tl.maximum(largest, tl.where(size == size, size, 0.0))
    most = tl.max(largest.to(tl.int32) if BF16 else largest, 0)
    if BF16:
        most = (tl.maximum(most - 0x7F, 0) << 16).to(tl.float32, bitcast=True)
    tl.store(found + tl.program_id(0), most)


@triton.jit
def line(x, row, column, rows, columns, stride, BF16: tl.constexpr):
    """Some rows and columns in fp32, zeros outside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    return wide(tl.load(at, mask=inside, other=0), BF16)


@triton.jit
def scale_for(amax, eps, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    amax = tl.where(amax < eps, eps, amax)
    usual = (amax > 0.0) & (amax < float("inf"))  # not NaN either
    scale = tl.minimum(tl.div_rn(LARGEST, tl.where(usual, amax, LARGEST)), MAX)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) >> 23 << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def four(a, b, c, d, E5M2: tl.constexpr):
    """The FP8 of four numbers as a word, a's first, saturated: Note [Four bytes by assembly]."""
    asm: tl.constexpr = E5M2_ASM if E5M2 else E4M3_ASM
    return tl.inline_asm_elementwise(
        asm, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def store_tails(words, line, inverse, width, mask, LINES: tl.constexpr):
    """1 / scale and zeros behind each line of a packed matrix, seen as int32."""
    bits = tl.broadcast_to(inverse, (LINES,)).to(tl.int32, bitcast=True)
    lane = tl.arange(0, TAIL_WORDS)
    tail = tl.where((lane == 0)[None, :], bits[:, None], 0)
    at = words + line.to(tl.int64)[:, None] * (width // 4) + (width // 4 - TAIL_WORDS)
    tl.store(at + lane[None, :], tail, mask=mask[:, None])


@triton.jit
def store_line(
    data, words, value, scale, row, column, rows, width, first, E5M2: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Stores scaled rows as packed rows; with their tails where they are the `first`."""
    cast = value.to(tl.float8e5 if E5M2 else tl.float8e4nv)
    here = row < rows
    at = data + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, cast, mask=here[:, None] & (column < width - TAIL_BYTES)[None, :])
    if first:
        one = tl.full((LINES,), 1.0, tl.float32)
        factor = tl.broadcast_to(scale, (LINES,))
        store_tails(words, row, tl.div_rn(one, factor), width, here, LINES)


@triton.jit
def store_words(words, packed, word, column, columns, width):
    """Words of four rows each, transposed."""
    at = words + column.to(tl.int64)[:, None] * (width // 4) + word[None, :]
    inside = (column < columns)[:, None] & (word < width // 4 - TAIL_WORDS)[None, :]
    tl.store(at, tl.trans(packed), mask=inside)


@triton.jit
def cast_tile(
    tile, x, scale, data, words, words_t, rows, columns, stride, width, width_t,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, E5M2: tl.constexpr, BF16: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Casts a tile by `scale`; with `SIZE`, also gives its maximum."""
    across = tl.cdiv(columns, BK)
    LINES: tl.constexpr = BM // 4
    word = (tile // across) * LINES + tl.arange(0, LINES)
    row = 4 * word
    column = (tile % across) * BK + tl.arange(0, BK)
    a = line(x, row, column, rows, columns, stride, BF16)
    b = line(x, row + 1, column, rows, columns, stride, BF16)
    c = line(x, row + 2, column, rows, columns, stride, BF16)
    d = line(x, row + 3, column, rows, columns, stride, BF16)
    if SIZE:  # max.f32 leaves NaN out
        size = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        most = tl.max(tl.max(tl.maximum(size, 0.0), 1), 0)
    a, b, c, d = a * scale, b * scale, c * scale, d * scale
    if ROWS:
        for i in tl.static_range(4):
            value = a if i == 0 else b if i == 1 else c if i == 2 else d
            store_line(
                data, words, value, scale, row + i, column, rows, width, tile % across == 0,
                E5M2, LINES,
            )  # fmt: skip
    if ACROSS:
        store_words(words_t, four(a, b, c, d, E5M2), word, column, columns, width_t)
        if tile < across:
            one = tl.full((BK,), 1.0, tl.float32)
            factor = tl.broadcast_to(scale, (BK,))
            store_tails(words_t, column, tl.div_rn(one, factor), width_t, column < columns, BK)
    if SIZE:
        return most


@triton.jit
def cast_kernel(
    x, amax, data, words, words_t,
    rows, columns, stride, width, width_t, count, eps,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    E5M2: tl.constexpr, LARGEST: tl.constexpr, BF16: tl.constexpr, COUNT: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`amax` has `count` numbers, of which the largest counts. `data` and `words` are the packed
    rows as FP8 and as int32, `width` bytes each; `words_t` and `width_t` are of the transpose.
    """
    gdc_wait()
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the end was read last: it is in the L2
    index = tl.arange(0, COUNT)
    parts = tl.load(amax + index, mask=index < count, other=0.0)
    strange = tl.max((parts != parts).to(tl.int32), 0)
    largest = tl.where(strange != 0, float("nan"), tl.max(parts, 0))
    scale = scale_for(largest, eps, LARGEST, POWER_OF_TWO)
    cast_tile(
        tile, x, scale, data, words, words_t, rows, columns, stride, width, width_t,
        ROWS, ACROSS, E5M2, BF16, False, BM, BK,
    )  # fmt: skip


@triton.jit
def guess_kernel(
    x, near, parts, data, words, words_t, rows, columns, stride, width, width_t, eps,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, E5M2: tl.constexpr, LARGEST: tl.constexpr,
    BF16: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Casts by the scale in `near`. `parts` gets the maximum of each tile, then the scale of each:
    another kernel may write to `near` meanwhile.
    """
    gdc_launch_dependents()
    tile = tl.program_id(0)
    scale = tl.load(near)
    size = cast_tile(
        tile, x, scale, data, words, words_t, rows, columns, stride, width, width_t,
        ROWS, ACROSS, E5M2, BF16, True, BM, BK,
    )  # fmt: skip
    tl.store(parts + tile, size)
    tl.store(parts + tl.num_programs(0) + tile, scale)


@triton.jit
def mend_kernel(
    x, near, parts, data, words, words_t, rows, columns, stride, width, width_t, eps,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, E5M2: tl.constexpr, LARGEST: tl.constexpr,
    BF16: tl.constexpr, COUNT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Casts again if the scale was another, and leaves the right one in `near`."""
    gdc_wait()
    tiles = tl.cdiv(rows, BM) * tl.cdiv(columns, BK)
    index = tl.arange(0, COUNT)
    sizes = tl.zeros((COUNT,), tl.float32)
    first = tl.load(parts + tiles).to(tl.int32, bitcast=True)
    others = tl.zeros((COUNT,), tl.int32)
    for at in range(0, tiles, COUNT):
        here = at + index < tiles
        sizes = tl.maximum(sizes, tl.load(parts + at + index, mask=here, other=0.0))
        used = tl.load(parts + tiles + at + index, mask=here, other=0.0)
        others += (here & (used.to(tl.int32, bitcast=True) != first)).to(tl.int32)
    scale = scale_for(tl.max(sizes, 0), eps, LARGEST, True)
    if tl.program_id(0) == 0:
        tl.store(near, scale)
    if (tl.sum(others, 0) != 0) | (first != scale.to(tl.int32, bitcast=True)):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            cast_tile(
                tile, x, scale, data, words, words_t, rows, columns, stride, width, width_t,
                ROWS, ACROSS, E5M2, BF16, False, BM, BK,
            )  # fmt: skip


@triton.jit
def inverse_at(words, by, width, width_by, row, inside, BY: tl.constexpr):
    """1 / scale of packed rows, times that of the rows of `by`."""
    at = row.to(tl.int64)
    place = words + at * (width // 4) + width // 4 - TAIL_WORDS
    found = tl.load(place, mask=inside, other=0).to(tl.float32, bitcast=True)
    if BY:
        place = by + at * (width_by // 4) + width_by // 4 - TAIL_WORDS
        found = found * tl.load(place, mask=inside, other=0).to(tl.float32, bitcast=True)
    return found


@triton.jit
def turned_line(
    data, words, by, first, row, column, rows, columns, width, width_by, height, most,
    SHIFT: tl.constexpr, BY: tl.constexpr, ALIKE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Packed rows: bytes, or in fp32 as they are by the greatest scale."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = data + row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(at, mask=inside, other=0.0)
    if SHIFT:
        of = first if ALIKE else row
        own = inverse_at(words, by, width, width_by, of // height * height, of < rows, BY)
        share = tl.where(most > 0.0, tl.div_rn(own, most + own * 0.0), 0.0)
        found = value.to(tl.float32) * tl.broadcast_to(share, (LINES,))[:, None]
    else:
        found = value.to(tl.uint8, bitcast=True).to(tl.int32)
    return found


@triton.jit
def turn_kernel(
    data, words, by, words_t, rows, columns, width, width_by, width_t, blocks,
    SHIFT: tl.constexpr, BY: tl.constexpr, ALIKE: tl.constexpr, E5M2: tl.constexpr,
    COUNT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`by`: packed rows as int32 whose scales count as well; `words_t`: of the transpose. `ALIKE`:
    the rows of a tile are of one block.
    """
    program = tl.program_id(0)
    across = tl.cdiv(columns, BK)
    LINES: tl.constexpr = BM // 4
    word = (program // across) * LINES + tl.arange(0, LINES)
    column = (program % across) * BK + tl.arange(0, BK)
    most = 1.0
    height = 1
    if SHIFT:
        height = rows // blocks
        block = tl.arange(0, COUNT)
        most = tl.max(inverse_at(words, by, width, width_by, block * height, block < blocks, BY), 0)
    for i in tl.static_range(4):
        found = turned_line(
            data, words, by, program // across * BM, 4 * word + i, column, rows, columns, width,
            width_by, height, most, SHIFT, BY, ALIKE, LINES,
        )  # fmt: skip
        if i == 0:
            a = found
        elif i == 1:
            b = found
        elif i == 2:
            c = found
        else:
            d = found
    if SHIFT:
        packed = four(a, b, c, d, E5M2)
    else:
        packed = a | b << 8 | c << 16 | d << 24
    store_words(words_t, packed, word, column, columns, width_t)
    if program < across:
        scale = tl.broadcast_to(most, (BK,))
        store_tails(words_t, column, scale, width_t, column < columns, BK)
