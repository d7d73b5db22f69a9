"""What the GEMM kernels with a warp of its own for loads share: a ring of tiles, and its two sides.

One warp fetches tiles of both operands into a ring in shared memory; two groups of four warps each
multiply one half of the tile's rows. None of them waits for the others but at the ring, so one
group stores its rows while the other multiplies, and the next tile's operands come meanwhile: 5 to
8 % faster than loops in which all warps do the same (written in Gluon, Triton's language for that).

The result has the same bits. Chunks must end with a tile's rows, as all stores are by TMA.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from interlace.kernels.gemm.device import WAIT

group_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # 3.6 calls it so
"""Waits for the threads of this group of warps."""

WORKER_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def place(index, m_tiles, n_tiles, GROUP_M: gl.constexpr):
    """The tile's row and column in its part: groups of GROUP_M rows, to keep operands in L2."""
    width = GROUP_M * n_tiles
    group = index // width
    first = group * GROUP_M
    height = gl.minimum(m_tiles - first, GROUP_M)
    inside = index - group * width
    return first + inside % height, inside // height


@gluon.jit
def wait_gate(gate, expected):
    """Waits until the word at `gate` has reached `expected`: Note [Waiting] in device.py."""
    return gl.inline_asm_elementwise(
        WAIT,
        "=r,l,r,~{memory}",
        [gate, expected],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def publish(counter):
    """Raises a counter once this warp's stores are performed: Note [Raising] in device.py."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    group_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="sys")


@gluon.jit
def load_tile(
    a_desc, w_desc, row, column, k_tiles, a, b, full, empty, at, phase,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Fetches both operands of a tile, a k-step at a time; gives where the ring stands."""
    half: gl.constexpr = BM // 2
    for k in range(k_tiles):
        mbarrier.wait(empty.index(at), phase)
        bar = full.index(at)
        mbarrier.expect(bar, (BM + BN) * BK * 2)
        tma.async_copy_global_to_shared(a_desc, [row, k * BK], bar, a.index(2 * at))
        tma.async_copy_global_to_shared(a_desc, [row + half, k * BK], bar, a.index(2 * at + 1))
        if TRANSPOSED:
            tma.async_copy_global_to_shared(w_desc, [column, k * BK], bar, b.index(at))
        else:
            tma.async_copy_global_to_shared(w_desc, [k * BK, column], bar, b.index(at))
        at += 1
        if at == STAGES:
            at = 0
            phase ^= 1
    return at, phase


@gluon.jit
def multiply_tile(
    k_tiles, a, b, full, empty, at, phase,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """One half of a tile's rows, in fp32; gives where the ring stands."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([BM // 2, BN], gl.float32, layout)
    for k in range(k_tiles):
        mbarrier.wait(full.index(at), phase)
        if TRANSPOSED:
            weight = b.index(at).permute((1, 0))
        else:
            weight = b.index(at)
        acc = warpgroup_mma(a.index(2 * at + HALF), weight, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if k > 0:
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1)
        at += 1
        if at == STAGES:
            at = 0
            phase ^= 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1)
    return acc, at, phase


@gluon.jit
def add_bias(acc, bias, column, columns, BN: gl.constexpr):
    """Adds the bias of these columns to the accumulator, in fp32."""
    at = column + gl.arange(0, BN, gl.SliceLayout(0, acc.type.layout))
    added = gl.load(bias + at, mask=at < columns, other=0.0).to(gl.float32)
    return acc + gl.expand_dims(added, 0)


@gluon.jit
def ring(
    a_desc, w_desc, out_desc,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Shared memory: the two operands' ring, its barriers, and the results on their way out."""
    a = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, BM // 2, BK], a_desc.layout)
    if TRANSPOSED:
        b = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    else:
        b = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BK, BN], w_desc.layout)
    out = gl.allocate_shared_memory(out_desc.dtype, [2, BM // 2, BN], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return a, b, out, full, empty
