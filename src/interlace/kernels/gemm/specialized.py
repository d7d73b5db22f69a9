"""The fused GEMMs with a warp of its own for loads, written in Gluon (Triton's language for that).

One warp fetches tiles of both operands into a ring in shared memory; two groups of four warps each
multiply one half of the tile's rows. None of them waits for the others but at the ring, so one
group stores its rows while the other multiplies, and the next tile's operands come meanwhile: 5 to
8 % faster than the loops of gather_kernel.py and scatter_kernel.py, with the same bits. Chunks must
end with a tile's rows, as all stores are by TMA.

    gather_kernel     the warp that loads alone waits for a chunk's pieces, once for each
    scatter_kernel    a warp more stores each half of a tile, waits until that is performed (some
                      2 us) and raises the counter; those that multiply go on with the next tile

Note [Scales behind a gate]
    Packed rows (float8/data.py) bring their scale along, and that of a piece's first row is right
    once its gate is open. The warps that multiply do not wait for that; but the warp that loads had
    seen the gate before it asked for the first tile, so whoever has multiplied that tile may read
    the scale. They do whenever they come to another piece, past the L1 cache (volatile), which no
    write of a peer reaches. The own rows are one piece.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from interlace.kernels.gemm import device
from interlace.kernels.gemm import scatter_kernel as scatter_loop

group_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # 3.6 calls it so
"""Waits for the threads of this group of warps."""

WAIT = device.WAIT
LOADER_REGISTERS = gl.constexpr(24)
GATHER_REGISTERS = gl.constexpr(232)
"""Registers of a thread that multiplies."""
REGISTERS = 160
"""Registers of a thread of `scatter_kernel`: with 12 warps, 4096 of a processor's are left for a
block of sums.py, which sums rows while others are still made. The compiler takes 154 or more."""
SCATTER_REGISTERS = gl.constexpr(224)
"""Registers that are left to the warps that multiply."""

place = gluon.jit(device.place.fn)
scatter_place = gluon.jit(scatter_loop.scatter_place.fn)
"""The order of tiles and where they lie, as in the loops."""


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
        mbarrier.expect(bar, (BM + BN) * BK * a_desc.dtype.primitive_bitwidth // 8)
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
    step: gl.constexpr = 256 // a.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, step])
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
def scale_of(row, inner):
    """The scale of the packed row that begins there: Note [Scales behind a gate]."""
    return gl.load(row + inner // 4, volatile=True)


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


@gluon.jit
def gather_load(
    x_desc, slots_desc, w_desc, gates, expected, rows, rank, m_tiles, n_tiles, k_tiles,
    a, b, full, empty,
    SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, GATED: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """The warp that loads: it alone waits for a piece, once for each."""
    at = 0
    phase = 1
    opened = PIECES - 1  # the last of the pieces that have come; chunks are numbered by turn
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
                piece = m * PIECES // m_tiles
                if part * PIECES + piece > opened:
                    row += wait_gate(gates + chunk, expected - (PIECES - 1 - piece))
                    opened = part * PIECES + piece
            at, phase = load_tile(
                slots_desc, w_desc, row, n * BN, k_tiles, a, b, full, empty, at, phase,
                BM, BN, BK, STAGES, TRANSPOSED,
            )  # fmt: skip


@gluon.jit
def gather_work(
    y_desc, x, slots, w, bias, rows, columns, inner, rank, m_tiles, n_tiles, k_tiles,
    a, b, out, full, empty,
    HALF: gl.constexpr, SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
    PIECES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """A group of warps that multiplies and stores its half of every tile."""
    at = 0
    phase = 0
    scaled = -1  # the piece, among those of all parts, whose rows have this scale
    scale = 1.0
    per_part = m_tiles * n_tiles
    for tile in range(gl.program_id(0), per_part * SIZE, gl.num_programs(0)):
        part = tile // per_part
        m, n = place(tile - part * per_part, m_tiles, n_tiles, GROUP_M)
        acc, at, phase = multiply_tile(
            k_tiles, a, b, full, empty, at, phase, HALF, BM, BN, STAGES, TRANSPOSED
        )
        first = (rank + part) % SIZE * rows
        if TAIL:
            turn = part * PIECES + min(part, 1) * (m * PIECES // m_tiles)
            if turn != scaled:
                row = x
                if part > 0:
                    piece = first + turn % PIECES * (rows // PIECES)
                    row = slots + piece.to(gl.int64) * ((inner + TAIL) // 4)
                scale = scale_of(row, inner) * scale_of(w, inner)
                scaled = turn
            acc *= scale
        if BIAS:
            acc = add_bias(acc, bias, n * BN, columns, BN)
        to = first + m * BM + HALF * (BM // 2)
        tma.store_wait(0)
        out.index(HALF).store(acc.to(y_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [to, n * BN], out.index(HALF))
    tma.store_wait(0)


@gluon.jit
def gather_kernel(
    x_desc, slots_desc, w_desc, y_desc, x, slots, w, bias, gates, expected,
    rows, columns, inner, rank,
    SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
    GATED: gl.constexpr, PIECES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """See gather_kernel.py. Behind the numbers of each row are `TAIL` bytes with its scale, or
    none."""
    m_tiles = gl.cdiv(rows, BM)
    n_tiles = gl.cdiv(columns, BN)
    k_tiles = gl.cdiv(inner, BK)
    a, b, out, full, empty = ring(x_desc, w_desc, y_desc, BM, BN, BK, STAGES, TRANSPOSED)
    gl.warp_specialize(
        [
            (
                gather_work,
                (
                    y_desc, x, slots, w, bias, rows, columns, inner, rank,
                    m_tiles, n_tiles, k_tiles, a, b, out, full, empty,
                    0, SIZE, BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS, PIECES, TAIL,
                ),
            ),
            (
                gather_work,
                (
                    y_desc, x, slots, w, bias, rows, columns, inner, rank,
                    m_tiles, n_tiles, k_tiles, a, b, out, full, empty,
                    1, SIZE, BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS, PIECES, TAIL,
                ),
            ),
            (
                gather_load,
                (
                    x_desc, slots_desc, w_desc, gates, expected, rows, rank,
                    m_tiles, n_tiles, k_tiles, a, b, full, empty,
                    SIZE, BM, BN, BK, GROUP_M, STAGES, TRANSPOSED, GATED, PIECES,
                ),
            ),
        ],
        [4, 1],
        [GATHER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def scatter_load(
    x_desc, w_desc, rows, m_tiles, n_tiles, k_tiles, a, b, full, empty,
    SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr, OWN_PARTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    at = 0
    phase = 1
    for tile in range(gl.program_id(0), m_tiles * n_tiles * SIZE, gl.num_programs(0)):
        _, row, behind, n, _ = scatter_place(
            tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, OWN_PARTS, BM, GROUP_M
        )
        at, phase = load_tile(
            x_desc, w_desc, behind + row, n * BN, k_tiles, a, b, full, empty, at, phase,
            BM, BN, BK, STAGES, TRANSPOSED,
        )  # fmt: skip


@gluon.jit
def scatter_work(
    bias, rows, columns, m_tiles, n_tiles, k_tiles, a, b, out, full, empty, made, sent,
    HALF: gl.constexpr, SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr,
    OWN_PARTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP_M: gl.constexpr,
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
                tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, OWN_PARTS, BM, GROUP_M
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
    SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr, OWN_PARTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The warp that stores each half of a tile and says so."""
    phase = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles * SIZE, gl.num_programs(0)):
        chunk, row, behind, n, counter = scatter_place(
            tile, rows, m_tiles, n_tiles, SIZE, RANK, SUBS, OWN_PARTS, BM, GROUP_M
        )
        for half in gl.static_range(2):
            mbarrier.wait(made.index(half), phase)
            to = row + half * (BM // 2)
            if chunk == RANK:
                tma.async_copy_shared_to_global(own_desc, [to, n * BN], out.index(half))
            else:
                tma.async_copy_shared_to_global(stage_desc, [behind + to, n * BN], out.index(half))
            publish(counters + counter)
            mbarrier.arrive(sent.index(half), count=1)
        phase ^= 1


@gluon.jit
def scatter_kernel(
    x_desc, w_desc, stage_desc, own_desc, bias, counters, rows, columns, inner,
    SIZE: gl.constexpr, RANK: gl.constexpr, SUBS: gl.constexpr, OWN_PARTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """The kernel of scatter_kernel.py; each half of a tile raises its counter once."""
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
                    a, b, out, full, empty, made, sent, 0, SIZE, RANK, SUBS, OWN_PARTS,
                    BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS,
                ),
            ),
            (
                scatter_work,
                (
                    bias, rows, columns, m_tiles, n_tiles, k_tiles,
                    a, b, out, full, empty, made, sent, 1, SIZE, RANK, SUBS, OWN_PARTS,
                    BM, BN, GROUP_M, STAGES, TRANSPOSED, BIAS,
                ),
            ),
            (
                scatter_load,
                (
                    x_desc, w_desc, rows, m_tiles, n_tiles, k_tiles, a, b, full, empty,
                    SIZE, RANK, SUBS, OWN_PARTS, BM, BN, BK, GROUP_M, STAGES, TRANSPOSED,
                ),
            ),
            (
                scatter_store,
                (
                    stage_desc, own_desc, counters, rows, m_tiles, n_tiles, out, made, sent,
                    SIZE, RANK, SUBS, OWN_PARTS, BM, BN, GROUP_M,
                ),
            ),
        ],
        [4, 1, 1],
        [SCATTER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
