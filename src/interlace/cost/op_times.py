"""Op times: what one op costs the device, from its boxes alone, and what it costs the host.

    >>> teams = {team.name: team for team in program.teams}
    >>> op_cost(op, program.boxes(0), machine, teams, program.where(0)).seconds
    0.0024

Note [Between hosts]
    A collective of a team that spans hosts takes as long as the slower of its two parts: the one
    inside, as if all ranks shared a host, and the one between hosts, which takes the latency of
    each crossing (`crossings`) and the bytes through one interface (`interface_bytes`). That one
    then occupies the ranks' links between hosts, which are others than those inside. A message
    takes the link between if its ends are on different hosts. Signals take what events take.

Note [Parts of a fused kernel]
    Matmuls of one weight are cut from the same waves: together they take as long as one matmul of
    all their rows, and each takes its share. From when a part's rows are there it takes at least
    one tile's time, so what fits into one wave hides nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from interlace.cost.gemm import (
    arithmetic_seconds,
    gemm_seconds,
    measured_seconds,
    wave_seconds,
)
from interlace.cost.machine import Machine, crossings, interface_bytes, link_bytes
from interlace.errors import UnsupportedError
from interlace.ir import (
    Alloc,
    Box,
    Call,
    Collective,
    Copy,
    DType,
    Expect,
    Free,
    Fused,
    Get,
    Group,
    HostSync,
    Notify,
    Op,
    Others,
    Program,
    Put,
    Record,
    Recv,
    Send,
    Team,
    View,
    Wait,
    Where,
)
from interlace.ir.kernels import TAIL
from interlace.ir.operators import MATMUL_NAMES, base_of, is_attention, matmul_of
from interlace.ir.ops import UNORDERED
from interlace.ir.roles import NAME, form_of
from interlace.ir.sizes import Int, number, numbers

Boxes = Callable[[View], Box]


def at_hand(boxes: Boxes) -> Boxes:
    """The boxes for the values at hand of named sizes: costs are told for these."""

    def box(view: View) -> Box:
        return boxes(view).at_hand()

    return box


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of an op: a part that nothing slows down, and work that others may slow down."""

    fixed_s: float = 0.0
    work_s: float = 0.0
    transport: str | None = None
    """The link that does the work; None: the compute units."""
    between: bool = False
    """The link between hosts does the work."""

    @property
    def seconds(self) -> float:
        """Both, undisturbed."""
        return self.fixed_s + self.work_s


def op_kind(op: Op) -> str:
    """The kind of an op in a timeline: `compute`, `comm`, `sync` or `memory`."""
    ordering = op.ordering()
    if ordering is UNORDERED:
        return "comm" if op.one_sided else "compute"
    if ordering.takes is not None or ordering.frees is not None:
        return "memory"
    if ordering.meets is not None or ordering.messages:
        return "comm" if op.reads() or op.writes() else "sync"  # a barrier moves no bytes
    return "sync"


def op_name(op: Op) -> str:
    """The name of an op in a timeline."""
    match op:
        case Call(fn=name) | Collective(kind=name):
            return name
        case Alloc(buffer=buffer):
            detail = buffer.name
        case Fused():
            detail = next((member.fn for member in op.members if isinstance(member, Call)), "")
        case _:
            fields = form_of(type(op)).fields
            detail = next((getattr(op, field.name) for field in fields if field.role is NAME), "")
    return f"{form_of(type(op)).word} {detail}".strip()


def op_cost(op: Op, box: Boxes, machine: Machine, teams: Mapping[str, Team], where: Where) -> Cost:
    """The cost of an op to the rank of `where`; `teams` are by name.

    A Group itself costs nothing, a Fused its launch: the rest is their members'.
    """
    match op:
        case Call():
            return _call_cost(op, box, machine)
        case Copy(src=src, dst=dst):
            nbytes = number(box(src).nbytes + box(dst).nbytes)
            return Cost(machine.launch_s, nbytes / machine.memory_bandwidth)
        case Collective():
            views = [view for view in (op.src, op.dst) if view is not None]
            whole = max((_nbytes(box(view)) for view in views), default=0)
            return _collective_cost(op, whole, machine, teams[op.team])
        case Send(src=view) | Recv(dst=view):
            apart = teams[op.team].apart(where.member(op.team).index, where.index(op.peer))
            transport = op.backend or machine.backend
            transport = "gloo" if transport == "peer" else transport  # no peer's memory has any
            times = machine.link(transport, apart).times("send", _nbytes(box(view)))
            return Cost(*times, transport, apart)
        case Put(src=view) | Get(src=view):
            kind = "put" if isinstance(op, Put) else "get"
            size = teams[op.team].size
            return Cost(*machine.link("peer").times(kind, _nbytes(box(view)), size), "peer")
        case Fused():
            return Cost(machine.launch_s)
        case Notify():
            return Cost(max(machine.signal_s, machine.event_s))
        case Record() | Wait() | Expect() | HostSync():
            return Cost(machine.event_s)
        case Alloc(buffer=buffer) if buffer.kind == "symmetric":
            return Cost(machine.event_s)
        case Alloc() | Free() | Group():
            return Cost()
        case _:
            raise UnsupportedError(f"the cost model knows no op {type(op).__name__}: add a case")


def _nbytes(box: Box) -> int:
    return number(box.nbytes)


def _collective_cost(op: Collective, whole: int, machine: Machine, team: Team) -> Cost:
    """Note [Between hosts]."""
    transport = op.backend or machine.backend
    nbytes = link_bytes(op.kind, whole, team.size)
    inside = Cost(*machine.link(transport).times(op.kind, nbytes, team.size), transport)
    if team.hosts is None:
        return inside
    link, counts = machine.link(transport, between=True), [*map(len, team.hosts)]
    fixed, work = link.times(op.kind, interface_bytes(op.kind, whole, counts, link.shared))
    across = Cost(fixed * crossings(op.kind, len(counts)), work, transport, between=True)
    return across if max(counts) == 1 or across.seconds >= inside.seconds else inside


def _call_cost(op: Call, box: Boxes, machine: Machine) -> Cost:
    """The arithmetic of a call or its bytes, whichever takes longer."""
    nbytes = call_bytes(op, box) / machine.memory_bandwidth
    shape = matmul_shape(op, box)
    if shape is not None:
        return _matmul_cost(shape, machine, nbytes)
    return Cost(machine.launch_s, max(nbytes, _attention(op, box, machine)))


def call_bytes(op: Call, box: Boxes) -> int:
    """The bytes that a call reads and writes, each view once."""
    outs = (*op.outs, *(View(buffer.name) for buffer in op.fresh))
    return sum(_nbytes(box(view)) for view in dict.fromkeys((*op.views(), *outs)))


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """A batch of matmuls, rows x inner by inner x columns."""

    dtype: DType
    rows: Int
    inner: Int
    columns: Int
    batch: Int = 1


def matmul_shape(op: Call, box: Boxes) -> MatmulShape | None:
    """The sizes of a call that multiplies matrices; None for another call."""
    base = base_of(op.fn)
    matmul = MATMUL_NAMES.get(base)
    if matmul is None:
        return None
    matrices = [box(arg) for arg in op.args[matmul.lhs :] if isinstance(arg, View)][:2]
    if len(matrices) < 2 or any(len(b.sizes) < 2 or b.numel == 0 for b in matrices):
        return None
    a, b = matrices
    width, batch = a.sizes[-1], math.prod(b.sizes[:-2])
    columns = b.sizes[-2] if base == "linear" else b.sizes[-1]
    inner = width if matmul.blocks is None else width - TAIL  # of packed rows
    return MatmulShape(a.dtype, a.numel // width // batch, inner, columns, batch)


def _matmul_cost(shape: MatmulShape, machine: Machine, by_bytes: float) -> Cost:
    rows, inner, columns, batch = numbers((shape.rows, shape.inner, shape.columns, shape.batch))
    measured = None
    if batch == 1:
        measured = measured_seconds(machine, shape.dtype, rows, inner, columns)
    if measured is None:
        sizes = shape.dtype, rows, inner, columns, batch
        measured = max(by_bytes, arithmetic_seconds(machine, *sizes))
    return Cost(machine.launch_s, measured)


def _attention(op: Call, box: Boxes, machine: Machine) -> float:
    """The time of an attention's arithmetic; 0 for another call."""
    matrices = [box(arg) for arg in op.args if isinstance(arg, View)][:2]
    if not is_attention(op.fn) or any(len(b.sizes) < 2 for b in matrices) or len(matrices) < 2:
        return 0.0
    query, key = matrices
    flops = 4 * number(query.numel * key.sizes[-2]) * (2.5 if "backward" in base_of(op.fn) else 1)
    return flops / machine.flops(query.dtype)


class FusedPart(NamedTuple):
    """Cost of a member of a Fused."""

    cost: Cost
    tile_s: float = 0.0
    """Seconds of one tile of a matmul; 0 for other members."""


def fused_costs(op: Fused, box: Boxes, machine: Machine) -> list[FusedPart]:
    """The cost of each member: Note [Parts of a fused kernel]; the launch is the Fused's own."""
    shapes: list[MatmulShape | None] = [
        matmul_shape(member, box) if isinstance(member, Call) else None for member in op.members
    ]
    rows: defaultdict[tuple[DType, Int, Int, Int], int] = defaultdict(int)
    for shape in filter(None, shapes):
        rows[shape.dtype, shape.inner, shape.columns, shape.batch] += number(shape.rows)
    costs: list[FusedPart] = []
    for member, shape in zip(op.members, shapes, strict=True):
        if shape is not None:
            whole = rows[shape.dtype, shape.inner, shape.columns, shape.batch]
            sizes = shape.dtype, *numbers((whole, shape.inner, shape.columns, shape.batch))
            took = gemm_seconds(machine, *sizes) * machine.fused
            tile = min(
                took, wave_seconds(machine, shape.dtype, number(shape.inner)) * machine.fused
            )
            costs.append(FusedPart(Cost(work_s=took * number(shape.rows) / whole), tile))
        elif isinstance(member, Call):
            costs.append(FusedPart(Cost(work_s=call_bytes(member, box) / machine.memory_bandwidth)))
        else:
            costs.append(FusedPart(Cost()))
    return costs


# -- the host -----------------------------------------------------------------------------------


PACKED_CALLS = 3
"""As many calls a matmul of packed rows is to the host, for each block of rows that has a scale:
torch's own is called for each, with views of its numbers and scales."""


def issue_seconds(op: Op, machine: Machine, teams: Mapping[str, Team]) -> float:
    """The seconds that the host takes to issue an op; `teams` are by name.

    A machine that has no figure for a kind of call takes `issue_s`, or for events what a stream
    takes.
    """
    cheap = op_kind(op) in ("sync", "memory")
    other = min(machine.event_s, machine.issue_s) if cheap else machine.issue_s
    if not machine.issue:
        return other
    what, count = _calls(op, teams)
    return count * dict(machine.issue).get(what, other)


def _calls(op: Op, teams: Mapping[str, Team]) -> tuple[str, int]:
    """Which call issues an op, and how many of them."""
    match op:
        case Call(fn=fn):
            matmul = matmul_of(fn)
            if matmul is not None and matmul.blocks is not None:
                blocks = op.args[matmul.blocks]
                return "call", PACKED_CALLS * max(1, blocks if isinstance(blocks, int) else 1)
            return ("call" if fn.startswith("aten.") else "kernel"), 1
        case Copy():
            return "copy", 1
        case Collective(backend=backend):
            return ("kernel" if backend == "peer" else "collective"), 1
        case Send() | Recv():
            return "collective", 1
        case Record() | Wait():
            return "event", 1
        case Notify(peer=peer, team=team) | Expect(peer=peer, team=team):
            return "signal", teams[team].size - 1 if isinstance(peer, Others) else 1
        case Alloc(buffer=buffer) if buffer.kind == "symmetric" and buffer.team:
            # Taking a slot awaits that every peer released it, freeing it tells them so.
            return "signal", 2 * (teams[buffer.team].size - 1)
        case Alloc() | Free():
            return "event", 0
        case Group() | HostSync():
            return "", 1
        case _:
            return ("peer" if op.one_sided else "kernel"), 1


def run_issue_seconds(program: Program, machine: Machine) -> float:
    """The seconds that one rank's host takes to issue a run, joining all streams included."""
    teams = {team.name: team for team in program.teams}
    streams = {op.stream for op in program.ops if not isinstance(op, Alloc | Free)}
    sides = max(0, len(streams) - 1)
    joins = 4 * sides * dict(machine.issue).get("event", 0.0)
    return joins + sum(issue_seconds(op, machine, teams) for op in program.ops)
