"""Sizes that the fused GEMM kernels serve, and the tile shape that a size gets.

    why = refuse(rows=2048, inner=8192, columns=14336, dtype=torch.float32, device=device)
    if why is not None:                    # "elements are torch.float32: ..."
        ...                                # run the members one after another instead

    >>> choose(rows=64, columns=4096, parts=4, processors=132).bm
    64

Needs neither a GPU nor Triton to be imported.

Note [Tile shapes]
    The kernel with a warp for loads is the fastest where chunks end with its tiles. Of the loops,
    which serve any rows, two tiles of 128 x 128 on each SM, one stored while the other is computed,
    are the first choice; smaller tiles cost more per element and pay where large ones would leave
    most processors without work in the last wave. The figures are measured, at shapes of 256 to
    16384 rows, and say nothing of the shape but the number of its waves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from math import ceil

import torch

ALIGNMENT = 16
"""Bytes that a TMA operand's address and row length are multiples of."""

TAIL = 128
"""Bytes behind the numbers of a packed row of FP8, with its scale (float8/data.py)."""

LIMIT = 2**31
"""Row and column indices are 32-bit in the kernels."""


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Cut of a GEMM kernel: tile, k-step, warps, pipeline, rows a group, blocks an SM."""

    bm: int
    bn: int
    bk: int = 64
    warps: int = 8
    stages: int = 3
    group_m: int = 8
    halves: bool = False
    blocks: int = 1
    specialized: bool = False
    """A warp of its own loads (specialized.py); chunks must end with a tile."""


CONFIGS: tuple[tuple[TileConfig, float], ...] = (
    (TileConfig(bm=128, bn=128, stages=3, warps=4, halves=True, blocks=2), 1.0),
    (TileConfig(bm=128, bn=128, stages=4, warps=4), 0.57),
    (TileConfig(bm=64, bn=256, stages=4, warps=4), 0.56),
    (TileConfig(bm=64, bn=128, bk=128, stages=4, warps=4), 0.33),
    (TileConfig(bm=64, bn=64, bk=128, stages=6, warps=4), 0.22),
)
"""Candidates, and the time of a wave of their tiles in times of 128 x 256 on each SM (H200)."""

SPECIALIZED = (TileConfig(bm=128, bn=256, stages=3, warps=4, specialized=True), 0.95)
"""The fastest where chunks are multiples of its rows: as fast as cuBLAS, and the same bits."""

PACKED = TileConfig(bm=128, bn=256, bk=128, stages=3, warps=4, specialized=True)
"""The same for packed rows of FP8, which no loop serves."""

WITH_TAIL = TileConfig(bm=128, bn=256, stages=4, halves=True)
"""The candidate where its last wave can be cut in halves (see gather_kernel.py)."""

HALF = 0.57
"""Time of such a half."""


def refuse(
    *, rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device, size: int = 1
) -> str | None:
    """Why no kernel serves this GEMM of `rows` rows a rank; None if one does."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"elements are {dtype}: the kernels multiply bfloat16 and float16"
    if min(rows, inner, columns, size) < 1:
        return f"an empty GEMM: {size} x {rows} rows, K {inner}, N {columns}"
    for name, extent in (("K", inner), ("N", columns)):
        if extent * dtype.itemsize % ALIGNMENT:
            return f"{name} is {extent}: TMA takes rows that are multiples of {ALIGNMENT} bytes"
    if max(size * rows, inner, columns) >= LIMIT:
        return "an extent of 2^31 or more"
    return refuse_device(device)


def refuse_device(device: torch.device, *, newer: bool = False) -> str | None:
    """Why no kernel runs on this device; None if they do. `newer` GPUs than 9.0 serve some."""
    if device.type != "cuda":
        return f"the device is {device}: the kernels run on NVIDIA GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9 or (major > 9 and not newer):
        return f"the GPU has compute capability {major}.{minor}: the kernels are made for 9.0"
    return None


def refuse_packed() -> str | None:
    """Why none serves packed rows of FP8, besides the device; None if one does."""
    return None if has_gluon() else "the kernel for FP8 is written for Triton 3.6 and 3.7"


@cache
def has_gluon() -> bool:
    """Returns true for the Gluon that specialized.py is written for: Triton 3.6 or 3.7."""
    try:
        return metadata.version("triton").startswith(("3.6.", "3.7."))
    except metadata.PackageNotFoundError:
        return False


def tiles(config: TileConfig, rows: int, columns: int, parts: int) -> int:
    """The number of tiles of `parts` chunks of `rows` rows."""
    return parts * -(-rows // config.bm) * -(-columns // config.bn)


def short_tail(total: int, processors: int) -> bool:
    """Returns true where the last wave has so few tiles that all of their halves fit in one."""
    rest = total % processors
    return total > processors and 0 < 2 * rest <= processors


def choose(
    *, rows: int, columns: int, parts: int, processors: int, may_halve: bool = True
) -> TileConfig:
    """The candidate whose waves take the least time; the first where two are equal."""

    def cost(candidate: tuple[TileConfig, float]) -> float:
        waves = tiles(candidate[0], rows, columns, parts) / (processors * candidate[0].blocks)
        return ceil(waves) * candidate[1]

    fits = has_gluon() and (parts == 1 or rows % SPECIALIZED[0].bm == 0)
    candidates = (SPECIALIZED, *CONFIGS) if fits else CONFIGS
    best = min(candidates, key=cost)
    total = tiles(WITH_TAIL, rows, columns, parts)
    halved = may_halve and short_tail(total, processors)
    return WITH_TAIL if halved and total // processors + HALF < cost(best) else best[0]
