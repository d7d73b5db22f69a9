"""Times of matmuls: as measured, else whole waves of tiles or their bytes, whichever is longer.

    >>> round(gemm_seconds(default_machine("cuda"), DType.bf16, 8192, 8192, 14336) * 1e3, 1)
    2.4

A kernel has a few tiles to choose from and may split the inner dimension where the tiles do not
fill the device; the quickest counts, as the library's own choice would have it.
"""

from __future__ import annotations

from interlace.cost.machine import Machine
from interlace.ir import DType

SPLITS = (1, 2, 4, 8)
"""Into how many parts the inner dimension may be cut,"""
LEAST_INNER = 256
"""of which each has at least this many elements."""


def gemm_seconds(
    machine: Machine,
    dtype: DType,
    rows: int,
    inner: int,
    columns: int,
    batch: int = 1,
    nbytes: int | None = None,
) -> float:
    """A matmul of rows x inner by inner x columns, a batch of them, without its launch.

    It reads and writes `nbytes`; without them, each matrix once.
    """
    if min(rows, inner, columns, batch) <= 0:
        return 0.0
    if batch == 1 and (seconds := measured_seconds(machine, dtype, rows, inner, columns)):
        return seconds
    if nbytes is None:
        nbytes = batch * (rows * inner + inner * columns + rows * columns) * dtype.itemsize
    arithmetic = arithmetic_seconds(machine, dtype, rows, inner, columns, batch)
    return max(nbytes / machine.memory_bandwidth, arithmetic)


def measured_seconds(
    machine: Machine, dtype: DType, rows: int, inner: int, columns: int
) -> float | None:
    """The measured time of a matmul of these sizes without its launch, where there is one.

    A matmul of other rows by the same weight, as a chunk is, takes as much more or less than the
    model's time as the measured one whose rows are nearest: else a whole would be compared by
    measurement with its chunks by the model.
    """
    wanted = str(dtype), inner, columns
    alike = [time for time in machine.gemms if (time.dtype, time.k, time.n) == wanted]
    if not alike:
        return None
    near = min(alike, key=lambda time: (max(time.m, rows) / min(time.m, rows), time.m))
    seconds = max(near.seconds - machine.launch_s, 0.1 * near.seconds)
    if near.m == rows:
        return seconds
    model = machine.replace(gemms=())
    ours, theirs = (gemm_seconds(model, dtype, m, inner, columns) for m in (rows, near.m))
    return seconds * ours / theirs


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
