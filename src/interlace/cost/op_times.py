"""Op times: what one op costs on a machine, from its boxes alone.

    >>> op_seconds(op, program.boxes(0), machine, {"tp": 4})
    0.0024

A matmul takes whole waves of tiles, or as long as its bytes do; other compute takes its bytes; a
collective takes the bytes that each rank must receive, over its link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from interlace.cost.machine import Machine
from interlace.ir import (
    Alloc,
    Box,
    Call,
    Collective,
    Copy,
    DType,
    Expect,
    Free,
    Get,
    Group,
    HostSync,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    View,
    Wait,
)

Boxes = Callable[[View], Box]

_MATMULS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "matmul": 0, "_scaled_mm": 0, "linear": 0}
"""Operators that multiply matrices, and where their first matrix stands among the arguments."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What an op costs: a part that nothing slows down, and work that others may slow down."""

    fixed_s: float = 0.0
    work_s: float = 0.0
    transport: str | None = None
    """The link that does the work; None: the compute units."""
    dtype: DType | None = None
    """The element type of the arithmetic that the work is, where it is not its bytes."""

    @property
    def seconds(self) -> float:
        """Both, undisturbed."""
        return self.fixed_s + self.work_s


def op_kind(op: Op) -> str:
    """What an op is to a timeline: `compute`, `comm`, `sync` or `memory`."""
    match op:
        case Call() | Copy():
            return "compute"
        case Alloc() | Free():
            return "memory"
        case Collective(kind="barrier"):
            return "sync"
        case Collective() | Send() | Recv() | Group() | Put() | Get():
            return "comm"
        case _:
            return "sync"


def op_name(op: Op) -> str:
    """What an op is called in a timeline."""
    match op:
        case Call(fn=fn):
            return fn
        case Collective(kind=kind):
            return kind
        case Alloc(buffer=buffer):
            return f"alloc {buffer.name}"
        case Free(buffer=buffer):
            return f"free {buffer}"
        case Record(event=event) | Wait(event=event):
            return f"{type(op).__name__.lower()} {event}"
        case Notify(signal=signal) | Expect(signal=signal):
            return f"{type(op).__name__.lower()} {signal}"
        case HostSync():
            return "host_sync"
        case _:
            return type(op).__name__.lower()


def op_seconds(op: Op, box: Boxes, machine: Machine, sizes: Mapping[str, int]) -> float:
    """How long an op takes undisturbed; `sizes` has the number of ranks of each team."""
    return op_cost(op, box, machine, sizes).seconds


def op_cost(op: Op, box: Boxes, machine: Machine, sizes: Mapping[str, int]) -> Cost:
    """What an op costs. Of a Group this is nothing: its members are what costs."""
    match op:
        case Call():
            return _call_cost(op, box, machine)
        case Copy(src=src, dst=dst):
            nbytes = box(src).nbytes + box(dst).nbytes
            return Cost(machine.launch_s, nbytes / machine.memory_bandwidth)
        case Collective():
            nbytes = collective_bytes(op, box, sizes[op.team])
            return _transfer(nbytes, op.backend or machine.backend, machine)
        case Send(src=view) | Recv(dst=view):
            return _transfer(box(view).nbytes, op.backend or machine.backend, machine)
        case Put(src=view) | Get(src=view):
            return _transfer(box(view).nbytes, "peer", machine)
        case Record() | Wait() | Notify() | Expect() | HostSync():
            return Cost(machine.event_s)
        case Alloc(buffer=buffer) if buffer.kind == "symmetric":
            return Cost(machine.event_s)
        case _:
            return Cost()


def _transfer(nbytes: float, transport: str, machine: Machine) -> Cost:
    link = machine.link(transport)
    return Cost(link.latency_s, nbytes / link.bandwidth, transport)


def collective_bytes(op: Collective, box: Boxes, size: int) -> float:
    """The bytes that pass through the busiest rank's link, one way."""
    views = [view for view in (op.src, op.dst) if view is not None]
    whole = max((box(view).nbytes for view in views), default=0)
    part = whole * (size - 1) / size
    match op.kind:
        case "barrier":
            return 0
        case "all_reduce":
            return 2 * part
        case "broadcast":
            return whole if size > 1 else 0
        case _:
            return part


def _call_cost(op: Call, box: Boxes, machine: Machine) -> Cost:
    """The arithmetic of a call or its bytes, whichever takes longer."""
    outs = (*op.outs, *(View(buffer.name) for buffer in op.fresh))
    boxes = {view: box(view) for view in (*op.views(), *outs)}
    by_bytes = sum(b.nbytes for b in boxes.values()) / machine.memory_bandwidth
    parts = op.fn.split(".")
    base = parts[1] if len(parts) > 1 else op.fn
    first = _MATMULS.get(base, 0)
    matrices = [boxes[arg] for arg in op.args[first:] if isinstance(arg, View)][:2]
    arithmetic = 0.0
    if len(matrices) == 2 and base in _MATMULS:
        arithmetic = gemm_seconds(matrices[0], matrices[1], machine, transposed=base == "linear")
    elif len(matrices) == 2 and "attention" in base and all(len(b.sizes) >= 2 for b in matrices):
        query, key = matrices
        flops = 4 * query.numel * key.sizes[-2] * (2.5 if "backward" in base else 1)
        arithmetic = flops / machine.flops(query.dtype)
    if arithmetic > by_bytes:
        return Cost(machine.launch_s, arithmetic, dtype=matrices[0].dtype)
    return Cost(machine.launch_s, by_bytes)


def gemm_seconds(a: Box, b: Box, machine: Machine, transposed: bool = False) -> float:
    """A matmul of two boxes, batched over the dimensions before the last two."""
    if len(a.sizes) < 2 or len(b.sizes) < 2 or a.numel == 0 or b.numel == 0:
        return 0.0
    inner = a.sizes[-1]
    columns = b.sizes[-2] if transposed else b.sizes[-1]
    batch = math.prod(b.sizes[:-2])
    rows = a.numel // inner // batch
    tile_rows, tile_columns = machine.gemm_tile
    tiles = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
    waves = -(-tiles // machine.units)
    flops = 2 * inner * waves * machine.units * tile_rows * tile_columns
    return flops / machine.flops(a.dtype)
