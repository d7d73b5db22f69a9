"""What the members of a Fused cost: one kernel whose tiles are worked through part by part.

costs = fused_costs(op, program.boxes(rank), machine)     # one for each of op.members

Matmuls of one weight are cut from the same waves, which is what fusing is for: together they take
as long as a whole matmul of all their rows, and each takes its share of that. A tile is one unit's:
from when a part's rows are there it takes at least a tile's time, however many units are idle, so
that what fits into one wave hides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from interlace.cost.gemm import gemm_seconds, wave_seconds
from interlace.cost.machine import Machine
from interlace.cost.op_times import Boxes, Cost, MatmulShape, call_bytes, matmul_shape
from interlace.ir import Call, DType, Fused


class Part(NamedTuple):
    """What a member costs."""

    cost: Cost
    tile_s: float = 0.0
    """Of a matmul: what one of its tiles takes."""


def fused_costs(op: Fused, box: Boxes, machine: Machine) -> list[Part]:
    """The cost of each member; the launch is the Fused's own."""
    shapes: list[MatmulShape | None] = [
        matmul_shape(member, box) if isinstance(member, Call) else None for member in op.members
    ]
    rows: defaultdict[tuple[DType, int, int, int], int] = defaultdict(int)
    for shape in filter(None, shapes):
        rows[shape.dtype, shape.inner, shape.columns, shape.batch] += shape.rows
    costs: list[Part] = []
    for member, shape in zip(op.members, shapes, strict=True):
        if shape is not None:
            whole = rows[shape.dtype, shape.inner, shape.columns, shape.batch]
            sizes = shape.dtype, whole, shape.inner, shape.columns, shape.batch
            took = gemm_seconds(machine, *sizes) * machine.fused
            tile = min(took, wave_seconds(machine, shape.dtype, shape.inner) * machine.fused)
            share = Cost(work_s=took * shape.rows / whole)
            costs.append(Part(share, tile))
        elif isinstance(member, Call):
            costs.append(Part(Cost(work_s=call_bytes(member, box) / machine.memory_bandwidth)))
        else:
            costs.append(Part(Cost()))
    return costs
