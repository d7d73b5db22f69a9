"""The kernel behind `exchange`: push to the peers, raise flags, wait for theirs, finish.

CTA i of a rank serves tiles i, i + CTAs, ... of every part, and so does CTA i of every other rank.
So it exchanges flags with those alone, and there is no barrier of all:

    push       what rank o shall have of my source goes into my area of o's staging
    raise      ... and then the word (i, my rank) at o gets the number of this call
    wait       until my words (i, s) have it from every other rank s
    finish     sum in rank order and round once, or copy, from staging to the destination
    twice      for an all-reduce in two shots the sum goes out the same way, to a second area

Note [Order of stores and flags]
    All threads of a CTA store a tile, and a few lanes raise its flags. `bar.sync` orders the stores
    of all threads before what those lanes do next, and their `release` at system scope orders both
    before the flag, for the peer that reads it with `acquire`; there another `bar.sync` hands the
    order on to all threads. Triton puts no barrier before an atomic of its own accord, so they
    stand here; a test reads the order of the instructions in the PTX.

Note [Calls are numbered on the device]
    `words` holds (calls so far, CTAs that have ended in this one, stop). Every CTA reads the number
    as it starts and the last to end advances it, so a CUDA graph that replays the kernel counts on
    as a launch does. The end of the kernel orders that before the CTAs of the next call.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

MAX_BLOCKS = tl.constexpr(128)
"""The most CTAs of a call: the number that every call counts its flags by."""
LINE = tl.constexpr(32)
"""Words from one CTA's flags to the next one's: 128 bytes, so that they share no line."""
VECTOR = tl.constexpr(16)
"""Elements: the widest vector there is, of 8-bit elements."""

AWAIT = tl.constexpr("""{
.reg .pred there, quit;
.reg .b32 word, stop;
again:
ld.acquire.sys.global.b32 word, [$1];
sub.s32 word, word, $2;
setp.le.u32 there, word, 1;
@there bra ended;
ld.relaxed.sys.global.b32 stop, [$3];
setp.ne.s32 quit, stop, 0;
@!quit bra again;
ended:
mov.b32 $0, word;
}""")
"""Spins until a word is a number or the next one, or until the call is stopped."""


@triton.jit
def raise_flags(flags, word, call, RANK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """After all stores of this CTA: one lane for each peer gives its word the call's number."""
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    where = tl.where(lane == 0, flags[0], flags[1])
    for peer in tl.static_range(2, SIZE):
        where = tl.where(lane == peer, flags[peer], where)
    others = (lane < SIZE) & (lane != RANK)
    tl.atomic_xchg(where + (word + RANK), call, mask=others, sem="release", scope="sys")


@triton.jit
def await_flags(mine, words, call, RANK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Before all loads of what came: every peer's word has the call's number."""
    lane = tl.arange(0, LANES)
    writer = tl.where((lane < SIZE) & (lane != RANK), lane, (RANK + 1) % SIZE)
    tl.inline_asm_elementwise(
        AWAIT, "=r,l,r,l", [mine + writer, call, words + 2], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def padded(num):
    """A count rounded up, so that vectors of staging stay whole."""
    return (num + VECTOR - 1) // VECTOR * VECTOR


@triton.jit
def combine(total, part, OP: tl.constexpr):
    """One more rank's part."""
    if OP == "min":
        return tl.minimum(total, part, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "max":
        return tl.maximum(total, part, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "prod":
        return total * part
    else:
        return total + part


@triton.jit
def push(src, stages, at, num, area, tile, RANK: tl.constexpr, SIZE: tl.constexpr, ALIKE, BLOCK):
    """One tile of what each peer shall have, into my area of its staging; nearest peer first."""
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    if ALIKE:
        same = tl.load(src + at[RANK] + offs, mask=offs < num[RANK], other=0)
        whole = padded(num[RANK])
        for k in tl.static_range(1, SIZE):
            tl.store(stages[(RANK + k) % SIZE] + area + offs, same, mask=offs < whole)
    else:
        push_parts(src, stages, at, num, area, offs, RANK, SIZE)


@triton.jit
def push_parts(src, stages, at, num, area, offs, RANK: tl.constexpr, SIZE: tl.constexpr):
    """One tile of a part of each peer's own."""
    parts = ()
    for k in tl.static_range(1, SIZE):  # all loads first, so that they overlap
        peer_at, peer_num = at[(RANK + k) % SIZE], num[(RANK + k) % SIZE]
        parts += (tl.load(src + peer_at + offs, mask=offs < peer_num, other=0),)
    for k in tl.static_range(1, SIZE):
        whole = padded(num[(RANK + k) % SIZE])
        tl.store(stages[(RANK + k) % SIZE] + area + offs, parts[k - 1], mask=offs < whole)


@triton.jit
def take(dst, stage, at, num, slot, tile, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK):
    """One tile of what each peer has sent, from its area of my staging to its place."""
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    parts = ()
    for k in tl.static_range(1, SIZE):
        whole = padded(num[(RANK + k) % SIZE])
        area = stage + ((RANK + k) % SIZE) * slot
        parts += (tl.load(area + offs, mask=offs < whole, other=0),)
    for k in tl.static_range(1, SIZE):
        peer_at, peer_num = at[(RANK + k) % SIZE], num[(RANK + k) % SIZE]
        tl.store(dst + peer_at + offs, parts[k - 1], mask=offs < peer_num)


@triton.jit
def reduce(own, stage, num, slot, tile, RANK: tl.constexpr, SIZE: tl.constexpr, OP, ACC, BLOCK):
    """One tile of all ranks' parts in rank order; my own comes from the source itself."""
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    whole = padded(num)
    if RANK == 0:
        total = tl.load(own + offs, mask=offs < num, other=0).to(ACC)
    else:
        total = tl.load(stage + offs, mask=offs < whole, other=0).to(ACC)
    for rank in tl.static_range(1, SIZE):
        if rank == RANK:
            part = tl.load(own + offs, mask=offs < num, other=0)
        else:
            part = tl.load(stage + rank * slot + offs, mask=offs < whole, other=0)
        total = combine(total, part.to(ACC), OP)
    if OP == "avg":
        if ACC == tl.float64:  # of which there is one division, and it rounds to nearest
            total = total / tl.full([BLOCK], SIZE, ACC)
        else:
            total = tl.div_rn(total, tl.full([BLOCK], SIZE, ACC))
    return total


@triton.jit
def exchange_kernel(
    src,
    dst,
    words,
    stages,
    flags,
    send_at,
    send_n,
    take_at,
    take_n,
    slot,
    half,
    tiles,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    OP: tl.constexpr,
    ACC: tl.constexpr,
    TWICE: tl.constexpr,
    ALIKE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """One call. `stages` and `flags` have each rank's address; the tables are those of `Moves`.

    `slot` and `half` are elements: of a writer's area, and of one of the two copies of staging.
    `ALIKE`: everybody gets the same of my source.
    `FIRST` and `LAST` are 0 and 2; a test that plays all ranks in turn runs steps 0, 1 and 2 alone.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    call = tl.load(words) + 1
    copy = (call & 1) * half
    mine = flags[RANK] + block * LINE
    spins: tl.constexpr = FIRST == 0 and LAST == 2

    if FIRST == 0:
        for tile in range(block, tiles, blocks):
            area = copy + RANK * slot
            push(src, stages, send_at, send_n, area, tile, RANK, SIZE, ALIKE, BLOCK)
        raise_flags(flags, block * LINE, call, RANK, SIZE, LANES)
        if OP is None:  # while the others' parts are on their way
            for tile in range(block, tiles, blocks):
                offs = tile * BLOCK + tl.arange(0, BLOCK)
                inside = offs < take_n[RANK]
                own = tl.load(src + send_at[RANK] + offs, mask=inside)
                tl.store(dst + take_at[RANK] + offs, own, mask=inside)

    if FIRST <= 1 and LAST >= 1:
        if spins:
            await_flags(mine, words, call, RANK, SIZE, LANES)
        stage = stages[RANK] + copy
        for tile in range(block, tiles, blocks):
            if OP is None:
                take(dst, stage, take_at, take_n, slot, tile, RANK, SIZE, BLOCK)
            else:
                offs = tile * BLOCK + tl.arange(0, BLOCK)
                num = take_n[RANK]
                own = src + send_at[RANK]
                total = reduce(own, stage, num, slot, tile, RANK, SIZE, OP, ACC, BLOCK)
                result = total.to(dst.dtype.element_ty)
                tl.store(dst + take_at[RANK] + offs, result, mask=offs < num)
                if TWICE:
                    whole = padded(num)
                    area = copy + (SIZE + RANK) * slot
                    for k in tl.static_range(1, SIZE):
                        there = stages[(RANK + k) % SIZE] + area
                        tl.store(there + offs, result, mask=offs < whole)
        if TWICE:
            raise_flags(flags, (MAX_BLOCKS + block) * LINE, call, RANK, SIZE, LANES)

    if LAST == 2:
        if TWICE:
            if spins:
                await_flags(mine + MAX_BLOCKS * LINE, words, call, RANK, SIZE, LANES)
            second = stages[RANK] + copy + SIZE * slot
            for tile in range(block, tiles, blocks):
                take(dst, second, take_at, take_n, slot, tile, RANK, SIZE, BLOCK)
        ended = tl.atomic_add(words + 1, 1, sem="acq_rel", scope="gpu")
        if ended == blocks - 1:
            tl.store(words + 1, 0)
            tl.store(words, call)
