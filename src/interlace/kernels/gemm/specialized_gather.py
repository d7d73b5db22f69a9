"""The GEMM of gather_kernel.py with a warp of its own for loads, which alone waits for chunks."""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from interlace.kernels.gemm.specialized import (
    LOADER_REGISTERS,
    WORKER_REGISTERS,
    add_bias,
    load_tile,
    multiply_tile,
    place,
    ring,
    wait_gate,
)


@gluon.jit
def gather_load(
    x_desc, slots_desc, w_desc, gates, expected, rows, rank, m_tiles, n_tiles, k_tiles,
    a, b, full, empty,
    SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The warp that loads: it alone waits for a chunk, once for each."""
    at = 0
    phase = 1
    opened = 0
    per_part = m_tiles * n_tiles
    for tile in range(gl.program_id(0), per_part * SIZE, gl.num_programs(0)):
        part = tile // per_part
        m, n = place(tile - part * per_part, m_tiles, n_tiles, GROUP_M)
        row = m * BM
        if part == 0:
            at, phase = load_tile(
                x_desc, w_desc, row, n * BN, k_tiles, a, b, full, empty, at, phase,
                BM, BN, BK, STAGES, TRANSPOSED,
            )  # fmt: skip
        else:
            chunk = (rank + part) % SIZE
            row += chunk * rows
            if GATED:
                if part != opened:
                    row += wait_gate(gates + chunk, expected)
                    opened = part
            at, phase = load_tile(
                slots_desc, w_desc, row, n * BN, k_tiles, a, b, full, empty, at, phase,
                BM, BN, BK, STAGES, TRANSPOSED,
            )  # fmt: skip


@gluon.jit
def gather_work(
    y_desc, bias, rows, columns, rank, m_tiles, n_tiles, k_tiles, a, b, out, full, empty,
    HALF: gl.constexpr, SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A group of warps that multiplies and stores its half of every tile."""
    at = 0
    phase = 0
    per_part = m_tiles * n_tiles
    for tile in range(gl.program_id(0), per_part * SIZE, gl.num_programs(0)):
        part = tile // per_part
        m, n = place(tile - part * per_part, m_tiles, n_tiles, GROUP_M)
        acc, at, phase = multiply_tile(
            k_tiles, a, b, full, empty, at, phase, HALF, BM, BN, STAGES, TRANSPOSED
        )
        if BIAS:
            acc = add_bias(acc, bias, n * BN, columns, BN)
        row = (rank + part) % SIZE * rows + m * BM + HALF * (BM // 2)
        tma.store_wait(0)
        out.index(HALF).store(acc.to(y_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [row, n * BN], out.index(HALF))
    tma.store_wait(0)


@gluon.jit
def gather_kernel(
    x_desc, slots_desc, w_desc, y_desc, bias, gates, expected, rows, columns, inner, rank,
    SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """What gather_kernel.py describes."""
    m_tiles = gl.cdiv(rows, BM)
    n_tiles = gl.cdiv(columns, BN)
    k_tiles = gl.cdiv(inner, BK)
    a, b, out, full, empty = ring(x_desc, w_desc, y_desc, BM, BN, BK, STAGES, TRANSPOSED)
    gl.warp_specialize(
        [
            (
                gather_work,
                (
                    y_desc, bias, rows, columns, rank, m_tiles, n_tiles, k_tiles,
                    a, b, out, full, empty, 0, SIZE, BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS,
                ),
            ),
            (
                gather_work,
                (
                    y_desc, bias, rows, columns, rank, m_tiles, n_tiles, k_tiles,
                    a, b, out, full, empty, 1, SIZE, BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS,
                ),
            ),
            (
                gather_load,
                (
                    x_desc, slots_desc, w_desc, gates, expected, rows, rank,
                    m_tiles, n_tiles, k_tiles, a, b, full, empty,
                    SIZE, BM, BN, BK, GROUP_M, STAGES, TRANSPOSED, GATED,
                ),
            ),
        ],
        [4, 1],
        [WORKER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
