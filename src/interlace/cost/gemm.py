"""Times of matmuls: as measured, else whole waves of tiles or their bytes, whichever is longer.

    >>> round(gemm_seconds(default_machine("cuda"), DType.bf16, 8192, 8192, 14336) * 1e3, 1)
    2.4

A kernel has a few tiles to choose from and may split the inner dimension where the tiles do not
fill the device; the quickest counts, as the library's own choice would have it.
"""

from __future__ import annotations

import math

from interlace.cost.machine import Machine
from interlace.ir import DType

SPLITS = (1, 2, 4, 8)
"""Into how many parts the inner dimension may be cut,"""
LEAST_INNER = 256
"""of which each has at least this many elements."""


def gemm_seconds(
    machine: Machine, dtype: DType, rows: int, inner: int, columns: int, batch: int = 1
) -> float:
    """A matmul of rows x inner by inner x columns, a batch of them, without its launch."""
    if min(rows, inner, columns, batch) <= 0:
        return 0.0
    if batch == 1 and (seconds := measured_seconds(machine, dtype, rows, inner, columns)):
        return seconds
    elements = batch * (rows * inner + inner * columns + rows * columns)
    by_bytes = math.ceil(elements * dtype.itemsize) / machine.memory_bandwidth
    return max(by_bytes, arithmetic_seconds(machine, dtype, rows, inner, columns, batch))


def measured_seconds(
    machine: Machine, dtype: DType, rows: int, inner: int, columns: int
) -> float | None:
    """The measured time of a matmul of these sizes without its launch, where there is one."""
    wanted = str(dtype), rows, inner, columns
    for time in machine.gemms:
        if (time.dtype, time.m, time.k, time.n) == wanted:
            return max(time.seconds - machine.launch_s, 0.1 * time.seconds)
    return None


def arithmetic_seconds(
    machine: Machine, dtype: DType, rows: int, inner: int, columns: int, batch: int = 1
) -> float:
    """The tiles of a matmul, as the units take them wave by wave."""
    first = (*machine.gemm_tile, 1.0)
    times: list[float] = []
    for tile_rows, tile_columns, speed in (first, *machine.gemm_tiles):
        tiles = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
        for split in SPLITS if machine.gemm_tiles else (1,):
            if split > 1 and (inner // split < LEAST_INNER or tiles >= machine.units):
                break
            waves = -(-tiles * split // machine.units)
            flops = 2 * inner / split * waves * machine.units * tile_rows * tile_columns
            partials = 0 if split == 1 else 8 * batch * rows * columns * split
            took = flops / machine.flops(dtype) / speed + partials / machine.memory_bandwidth
            times.append(took + (machine.launch_s if split > 1 else 0.0))
    return min(times)


def wave_seconds(machine: Machine, dtype: DType, inner: int) -> float:
    """One wave of the largest tiles: the least from a large matmul's first byte to its last."""
    rows, columns = machine.gemm_tile
    return 2 * inner * machine.units * rows * columns / machine.flops(dtype)
