"""Device code that the GEMM kernels share: waits for a word, counters, the order of tiles.

A tile may be read once a gate's word has come (`wait_gate`), and is announced as written by raising
a counter (`raise_counter`). Peers are other GPUs and copy engines, so the scope is the system:

    row += wait_gate(gates + chunk, expected)        # then load the chunk's tiles
    y_desc.store([row, column], tile)
    settle(BY_TMA=True)
    raise_counter(counters + chunk)                  # then a copy may read the tile

Note [Waiting]
    Every thread polls for itself with an acquire load, then fences the proxies: TMA loads go
    through the async proxy, which an acquire alone does not order. The 0 that the asm returns is
    added to the row that the loads use, so no pass can move a load of the part above the wait.
    The loop has no bound: whoever launched the kernel releases a stalled word by writing it.

Note [Raising]
    Nothing but this orders a tile's stores before its counter. A TMA store is asynchronous:
    `wait_group 0` (not the `.read` form, which only frees shared memory) waits until it is
    performed, the proxy fence makes it visible to ordinary accesses. Ordinary stores come from
    all threads, so a barrier must stand between them and the one thread that releases. The
    release at system scope then carries both to whoever sees the counter.
"""

from __future__ import annotations

import triton
import triton.language as tl

WAITING = """{{
    .reg .pred early;
    .reg .b32 seen;
wait:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.lt.s32 early, seen, 0;
    @early bra wait;
    {fence}
    mov.b32 $0, 0;
    }}"""
WAIT = tl.constexpr(WAITING.format(fence="fence.proxy.async;"))
"""Note [Waiting]; Gluon's kernels have it too."""


@triton.jit
def wait_gate(gate, expected):
    """Waits until the word at `gate` has reached `expected`, cyclically; gives 0."""
    return tl.inline_asm_elementwise(
        WAIT,  # pyright: ignore[reportArgumentType]
        "=r,l,r,~{memory}",
        [gate, expected],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def settle(BY_TMA: tl.constexpr):
    """Waits until this block's stores are performed, in all threads; see Note [Raising]."""
    if BY_TMA:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0; mov.b32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def raise_counter(counter):
    """Adds one to the counter: after `settle`, whoever sees it sees this block's stores."""
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def now():
    """A 0 that no pass knows, so that what is computed from it cannot be computed earlier:
    addresses of several stores or loads in a row would all be worked out first, and spill.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def place(index, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """The tile's row and column in its part: groups of GROUP_M rows, to keep operands in L2."""
    width = GROUP_M * n_tiles
    group = index // width
    first = group * GROUP_M
    height = min(m_tiles - first, GROUP_M)
    inside = index - group * width
    return first + inside % height, inside // height


@triton.jit
def load_weight(w_desc, k, column, TRANSPOSED: tl.constexpr):
    """A tile of the weight as [K, N], whichever way it is stored."""
    if TRANSPOSED:
        tile = w_desc.load([column, k]).T
    else:
        tile = w_desc.load([k, column])
    return tile


@triton.jit
def add_bias(acc, bias, column, columns, BN: tl.constexpr):
    """Adds the bias of these columns to the accumulator, in fp32."""
    at = column + tl.arange(0, BN)
    return acc + tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def halve(tile, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of a tile; no data moves between threads."""
    return tl.split(tile.reshape([M, 2, N // 2]).permute([0, 2, 1]))


@triton.jit
def store_rows(to, tile, row, rows, column, columns, M: tl.constexpr, N: tl.constexpr):
    """Ordinary stores of a tile at (row, column) of a matrix that has `rows` rows from `to` on."""
    row += now()
    inside = (row + tl.arange(0, M) < rows)[:, None] & (column + tl.arange(0, N) < columns)[None, :]
    at = tl.arange(0, M)[:, None] * columns + tl.arange(0, N)[None, :]
    tl.store(to + (row.to(tl.int64) * columns + column) + at, tile, mask=inside)
