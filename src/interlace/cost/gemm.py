"""Times of matmuls: whole waves of tiles, or their bytes; corrected by those measured nearby.

    >>> round(gemm_seconds(default_machine("cuda"), DType.bf16, 8192, 8192, 14336) * 1e3, 1)
    2.4

A kernel has a few tiles to choose from and may split the inner dimension where the tiles do not
fill the device; the quickest counts, as the library's own choice would have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from interlace.cost.machine import GemmTime, Machine
from interlace.ir import DType

SPLITS = (1, 2, 4, 8)
"""Into how many parts the inner dimension may be cut,"""
LEAST_INNER = 256
"""of which each has at least this many elements."""
NEAREST = 6
"""The number of measured matmuls that correct a prediction."""
FAR = 3.0
"""The distance (in doublings) at which a measurement is worth as much as the bare prediction."""


def gemm_seconds(
    machine: Machine, dtype: DType, rows: int, inner: int, columns: int, batch: int = 1
) -> float:
    """A matmul of rows x inner by inner x columns, a batch of them, without its launch."""
    if min(rows, inner, columns, batch) <= 0:
        return 0.0
    predicted = _model(machine, dtype, rows, inner, columns, batch)
    known = [time for time in machine.gemms if time.dtype == str(dtype)]
    if batch > 1 or not known:
        return predicted
    place = rows, inner, columns
    near: list[tuple[tuple[int, int, int], float]] = []
    for time in sorted(known, key=lambda time: _distance(_place(time), place))[:NEAREST]:
        work = max(time.seconds - machine.launch_s, 0.1 * time.seconds)
        if _place(time) == place:
            return work
        near.append((_place(time), work / _model(machine, dtype, *_place(time))))
    return predicted * _blend(near, place)


def _blend(points: Sequence[tuple[tuple[int, int, int], float]], at: tuple[int, int, int]) -> float:
    """A ratio between those of some points in log space, the nearer ones the more; far from all of
    them it is 1."""
    total, weights = 0.0, 1 / FAR**2
    for place, ratio in points:
        weight = 1 / (_distance(place, at) ** 2 + 1e-4)
        total += weight * math.log(ratio)
        weights += weight
    return math.exp(total / weights)


def _distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """The number of doublings between two sizes."""
    return math.sqrt(sum(math.log2(a / b) ** 2 for a, b in zip(one, other, strict=True)))


def _place(time: GemmTime) -> tuple[int, int, int]:
    return time.m, time.k, time.n


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


def _model(
    machine: Machine, dtype: DType, rows: int, inner: int, columns: int, batch: int = 1
) -> float:
    elements = batch * (rows * inner + inner * columns + rows * columns)
    by_bytes = math.ceil(elements * dtype.itemsize) / machine.memory_bandwidth
    return max(by_bytes, arithmetic_seconds(machine, dtype, rows, inner, columns, batch))
