"""Adam for many tensors in one launch; the reference and the notes are in arithmetic.py.

A block takes one chunk of one tensor. `owners` (int32) gives the tensor of each block; the table
has FIELDS words for each tensor: addresses, length and key; `dynamic` has what may change at each
step, the gradients' addresses, and then the number of each tensor's row. All come by address.

Note [Wide accesses]
    A thread has 8 elements in a row, 16 bytes of a 16-bit type; or 4 where fp32 is stored as well
    as 16-bit types, since 8 would be moved through shared memory to store them. The predicate is
    the same for all of a thread's, as full tiles end at a multiple of 8, which the compiler can
    see; the up to 7 elements that are left are a small tile of their own. bf16 is read and written
    as int16: widening is a shift, and rounding is spelled out, so that Triton's interpreter gives
    the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from interlace.kernels.launch import TYPES, KernelSource
from interlace.optim.adam.arithmetic import NAN, ROW, AdamSpec

FIELDS = 8
"""Words of a tensor in the table: addresses of parameter, moments and master or remainder; length;
number of its first element; key; its first block."""
P, M, V, W, LENGTH, BASE, KEY, FIRST = (tl.constexpr(i) for i in range(FIELDS))
CHUNK = 16384
"""Elements that a block takes."""
WARPS = 4
ROWS = tl.constexpr(ROW)
QUIET = tl.constexpr(NAN)


@triton.jit
def mix_word(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def place(address, start, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to element `start` of a tensor; bf16 as int16."""
    if KIND == "fp32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def wide(raw, KIND: tl.constexpr):
    if KIND == "bf16":
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def bits_of(x):
    """The bits of what arithmetic gave: its NaN, 0x7FFFFFFF on a GPU, would round to zero."""
    return tl.minimum(x.to(tl.int32, bitcast=True), QUIET)


@triton.jit
def narrow(x, bits, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """fp32 rounded for storage: to nearest, even at a tie, or by random bits."""
    if KIND == "bf16":
        raw = bits_of(x)
        if STOCHASTIC:
            raw += bits
        else:
            raw += 0x7FFF + ((raw >> 16) & 1)
        y = (raw >> 16).to(tl.int16)
    elif KIND == "fp16":
        y = x.to(tl.float16)
    else:
        y = x
    return y


@triton.jit
def update(
    p, g, m, v, w, at, inside, start_word, key_here, key_next, key_last,
    gain, l2, from_g, slope, beta2, rest2, correction, eps, size, decay,
    P_KIND: tl.constexpr, G_KIND: tl.constexpr, M_KIND: tl.constexpr, V_KIND: tl.constexpr,
    MASTER: tl.constexpr, COUPLED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """The elements at offsets `at` of the chunk."""
    m_old = wide(tl.load(m + at, mask=inside), M_KIND)
    v_old = wide(tl.load(v + at, mask=inside), V_KIND)
    grad = wide(tl.load(g + at, mask=inside), G_KIND) * gain
    if MASTER == "fp32":
        x = tl.load(w + at, mask=inside)
    elif MASTER == "remainder":
        upper = tl.load(p + at, mask=inside).to(tl.int32) << 16
        x = (upper + tl.load(w + at, mask=inside)).to(tl.float32, bitcast=True)
        x = tl.where(x == x, x, upper.to(tl.float32, bitcast=True))  # see Note [Remainders]
    else:
        x = wide(tl.load(p + at, mask=inside), P_KIND)
    if COUPLED:
        grad = tl.where(l2 != 0, grad + x * l2, grad)
    m_new = tl.where(from_g, grad, m_old) + (grad - m_old) * slope
    v_new = v_old * beta2 + grad * rest2 * grad
    root = tl.sqrt_rn(v_new) * correction + eps
    x = x * decay - tl.div_rn(m_new * size, root)

    low, high, third = at, at, at
    if STOCHASTIC:
        word = start_word + at.to(tl.uint32)
        word ^= tl.where(word < start_word, key_next, key_here)
        word = (word ^ (word >> 16)) * 0x21F0AAAD
        word = (word ^ (word >> 15)) * 0xD35A2D97 + key_last
        word ^= word >> 15
        low = (word & 0xFFFF).to(tl.int32)
        high = (word >> 16).to(tl.int32)
        third = ((word * 0x9E3779B1) >> 16).to(tl.int32)
    tl.store(m + at, narrow(m_new, low, M_KIND, STOCHASTIC), mask=inside)
    tl.store(v + at, narrow(v_new, high, V_KIND, STOCHASTIC), mask=inside)
    if MASTER == "remainder":
        raw = bits_of(x)
        upper = (raw + 0x8000) >> 16
        tl.store(p + at, upper.to(tl.int16), mask=inside)
        tl.store(w + at, (raw - (upper << 16)).to(tl.int16), mask=inside)
    elif MASTER == "fp32":
        tl.store(w + at, x, mask=inside)
        tl.store(p + at, narrow(x, third, P_KIND, False), mask=inside)
    else:
        tl.store(p + at, narrow(x, third, P_KIND, STOCHASTIC), mask=inside)


@triton.jit
def adam_kernel(
    table, owners, dynamic, count, rows,
    P_KIND: tl.constexpr, G_KIND: tl.constexpr, M_KIND: tl.constexpr, V_KIND: tl.constexpr,
    MASTER: tl.constexpr, COUPLED: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    owner = tl.load(owners.to(tl.pointer_type(tl.int32)) + block)
    own = table.to(tl.pointer_type(tl.int64)) + owner * FIELDS
    changing = dynamic.to(tl.pointer_type(tl.int64)) + owner
    row = rows.to(tl.pointer_type(tl.float64))
    row += tl.load(changing + count) * ROWS
    start = (block - tl.load(own + FIRST)) * CHUNK
    left = tl.minimum(tl.load(own + LENGTH) - start, CHUNK).to(tl.int32)
    gain = tl.load(row).to(tl.float32)
    l2 = tl.load(row + 1).to(tl.float32)
    from_g = tl.load(row + 2) != 0
    slope = tl.load(row + 3).to(tl.float32)
    beta2 = tl.load(row + 4).to(tl.float32)
    rest2 = tl.load(row + 5).to(tl.float32)
    correction = tl.load(row + 6).to(tl.float32)
    eps = tl.load(row + 7).to(tl.float32)
    size = tl.load(row + 8).to(tl.float32)
    decay = tl.load(row + 9).to(tl.float32)
    step = tl.load(row + 10).to(tl.int32).to(tl.uint32)

    p = place(tl.load(own + P), start, P_KIND, ALIGNED)
    g = place(tl.load(changing), start, G_KIND, ALIGNED)
    m = place(tl.load(own + M), start, M_KIND, ALIGNED)
    v = place(tl.load(own + V), start, V_KIND, ALIGNED)
    w = p
    if MASTER != "none":
        w = place(tl.load(own + W), start, "fp32" if MASTER == "fp32" else "bf16", ALIGNED)

    key = tl.load(own + KEY)
    number = tl.load(own + BASE) + start
    start_word = number.to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    first = mix_word(key.to(tl.uint32) ^ mix_word(step + 0x9E3779B9))
    key_last = mix_word((key >> 32).to(tl.uint32) + mix_word(step ^ 0x85EBCA6B))
    key_here = first ^ mix_word(high)
    key_next = first ^ mix_word(high + 1)

    full = left // 8 * 8
    for offset in range(0, full, TILE):
        at = offset + tl.arange(0, TILE)
        update(
            p, g, m, v, w, at, at < full, start_word, key_here, key_next, key_last,
            gain, l2, from_g, slope, beta2, rest2, correction, eps, size, decay,
            P_KIND, G_KIND, M_KIND, V_KIND, MASTER, COUPLED, STOCHASTIC,
        )  # fmt: skip
    if full < left:
        at = full + tl.arange(0, 8)
        update(
            p, g, m, v, w, at, at < left, start_word, key_here, key_next, key_last,
            gain, l2, from_g, slope, beta2, rest2, correction, eps, size, decay,
            P_KIND, G_KIND, M_KIND, V_KIND, MASTER, COUPLED, STOCHASTIC,
        )  # fmt: skip


def tile_of(spec: AdamSpec) -> int:
    """Elements of a tile; see Note [Wide accesses]."""
    stored = {spec.p.itemsize, spec.m.itemsize, spec.v.itemsize}
    stored |= {4} if spec.master == "fp32" else set()
    return WARPS * 32 * (4 if len(stored) > 1 else 8)


def adam_source(spec: AdamSpec, *, aligned: bool) -> KernelSource:
    """`aligned`: all start at a multiple of 16 bytes."""
    return KernelSource(
        kernel=adam_kernel,
        types=dict.fromkeys(("table", "owners", "dynamic", "count", "rows"), "i64"),
        constants={
            "P_KIND": TYPES[spec.p],
            "G_KIND": TYPES[spec.g],
            "M_KIND": TYPES[spec.m],
            "V_KIND": TYPES[spec.v],
            "MASTER": spec.master or "none",
            "COUPLED": spec.coupled,
            "STOCHASTIC": spec.stochastic,
            "ALIGNED": aligned,
            "CHUNK": CHUNK,
            "TILE": tile_of(spec),
            "FIELDS": FIELDS,
        },
        num_warps=WARPS,
        options={"enable_fp_fusion": False},
    )
