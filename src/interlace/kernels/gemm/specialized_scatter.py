"""The GEMM of scatter_kernel.py with one warp for loads and one for stores.

A tile's counter may rise once its stores are performed, some 2 us after they began. The warp that
issues them waits for that; those that multiply go on with the next tile.

It leaves a small block room on each processor (REGISTERS): the sum of the rows that are there runs
beside it.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from interlace.kernels.gemm import scatter_kernel as scatter_loop
from interlace.kernels.gemm.specialized import (
    LOADER_REGISTERS,
    add_bias,
    load_tile,
    multiply_tile,
    place,
    publish,
    ring,
)

REGISTERS = 160
"""Of a thread: with 12 warps, 4096 of a processor's registers are left (sums.py takes them). The
compiler refuses less than 154."""
WORKER_REGISTERS = gl.constexpr(224)
"""What that leaves the warps that multiply."""


turn_of = gluon.jit(scatter_loop.turn_of.fn)
"""Which tiles have their turn when, as scatter_kernel.py says,"""
above = gluon.jit(scatter_loop.above.fn)
"""and where their rows lie."""


@gluon.jit
def scatter_place(
    tile, rows, m_tiles, n_tiles,
    SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr, LEAD: gl.constexpr,
    BM: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A tile's chunk, its row there and in x, its tile column, and the number of its counter."""
    height = m_tiles // SUBS
    turn = tile // (height * n_tiles)
    part, sub = turn_of(turn, SIZE, SUBS, LEAD)
    chunk = (RANK + 1 + part) % SIZE
    m, n = place(tile - turn * (height * n_tiles), height, n_tiles, GROUP_M)
    row = (sub * height + m) * BM
    return chunk, row, above(chunk, sub, rows, SIZE, SUBS, LEAD) + row, n, chunk * SUBS + sub


@gluon.jit
def scatter_load(
    x_desc, w_desc, rows, m_tiles, n_tiles, k_tiles, a, b, full, empty,
    SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr, LEAD: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    at = 0
    phase = 1
    for tile in range(gl.program_id(0), m_tiles * n_tiles * SIZE, gl.num_programs(0)):
        _, _, row, n, _ = scatter_place(
            tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, LEAD, BM, GROUP_M
        )
        at, phase = load_tile(
            x_desc, w_desc, row, n * BN, k_tiles, a, b, full, empty, at, phase,
            BM, BN, BK, STAGES, TRANSPOSED,
        )  # fmt: skip


@gluon.jit
def scatter_work(
    bias, rows, columns, m_tiles, n_tiles, k_tiles, a, b, out, full, empty, made, sent,
    HALF: gl.constexpr, SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr,
    LEAD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A group of warps that multiplies its half of every tile and hands it on."""
    at = 0
    phase = 0
    turn = 1
    for tile in range(gl.program_id(0), m_tiles * n_tiles * SIZE, gl.num_programs(0)):
        acc, at, phase = multiply_tile(
            k_tiles, a, b, full, empty, at, phase, HALF, BM, BN, STAGES, TRANSPOSED
        )
        if BIAS:
            _, _, _, n, _ = scatter_place(
                tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, LEAD, BM, GROUP_M
            )
            acc = add_bias(acc, bias, n * BN, columns, BN)
        mbarrier.wait(sent.index(HALF), turn)
        out.index(HALF).store(acc.to(out.dtype))
        fence_async_shared()
        mbarrier.arrive(made.index(HALF), count=1)
        turn ^= 1


@gluon.jit
def scatter_store(
    stage_desc, own_desc, counters, rows, m_tiles, n_tiles, out, made, sent,
    SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr, LEAD: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The warp that stores each half of a tile and says so."""
    phase = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles * SIZE, gl.num_programs(0)):
        chunk, own_row, row, n, counter = scatter_place(
            tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, LEAD, BM, GROUP_M
        )
        for half in gl.static_range(2):
            mbarrier.wait(made.index(half), phase)
            down = half * (BM // 2)
            if chunk == RANK:
                tma.async_copy_shared_to_global(own_desc, [own_row + down, n * BN], out.index(half))
            else:
                tma.async_copy_shared_to_global(stage_desc, [row + down, n * BN], out.index(half))
            publish(counters + counter)
            mbarrier.arrive(sent.index(half), count=1)
        phase ^= 1


@gluon.jit
def scatter_kernel(
    x_desc, w_desc, stage_desc, own_desc, bias, counters, rows, columns, inner,
    SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr, LEAD: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """What scatter_kernel.py describes; each half of a tile raises its counter once."""
    m_tiles = gl.cdiv(rows, BM)
    n_tiles = gl.cdiv(columns, BN)
    k_tiles = gl.cdiv(inner, BK)
    a, b, out, full, empty = ring(x_desc, w_desc, own_desc, BM, BN, BK, STAGES, TRANSPOSED)
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(made.index(i), count=1)
        mbarrier.init(sent.index(i), count=1)
    gl.warp_specialize(
        [
            (
                scatter_work,
                (
                    bias, rows, columns, m_tiles, n_tiles, k_tiles,
                    a, b, out, full, empty, made, sent, 0, SIZE, RANK, SUBS, LEAD,
                    BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS,
                ),
            ),
            (
                scatter_work,
                (
                    bias, rows, columns, m_tiles, n_tiles, k_tiles,
                    a, b, out, full, empty, made, sent, 1, SIZE, RANK, SUBS, LEAD,
                    BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS,
                ),
            ),
            (
                scatter_load,
                (
                    x_desc, w_desc, rows, m_tiles, n_tiles, k_tiles, a, b, full, empty,
                    SIZE, RANK, SUBS, LEAD, BM, BN, BK, GROUP_M, STAGES, TRANSPOSED,
                ),
            ),
            (
                scatter_store,
                (
                    stage_desc, own_desc, counters, rows, m_tiles, n_tiles, out, made, sent,
                    SIZE, RANK, SUBS, LEAD, BM, BN, GROUP_M,
                ),
            ),
        ],
        [4, 1, 1],
        [WORKER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
