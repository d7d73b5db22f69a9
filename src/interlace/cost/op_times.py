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
from typing import Any

from interlace.cost.gemm import gemm_seconds, wave_seconds
from interlace.cost.machine import Machine, crossings, interface_bytes, link_bytes
from interlace.errors import UnsupportedError
from interlace.ir import (
    Box,
    Call,
    Collective,
    Copy,
    DType,
    Fused,
    Get,
    Op,
    Others,
    Program,
    Put,
    Recv,
    Send,
    Team,
    View,
    Where,
)
from interlace.ir.kernels import TAIL
from interlace.ir.operators import MATMUL_NAMES, base_of, is_attention, matmul_of
from interlace.ir.ops import UNORDERED
from interlace.ir.program import calls_in
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
    """The name of an op in a timeline: its operator, or its word with what it names."""
    if isinstance(op, Call):
        return op.fn
    form = form_of(type(op))
    details: list[str] = [getattr(op, field.name) for field in form.fields if field.role is NAME]
    details += [buffer.name for buffer in op.declares()]
    details += [call.fn for call in calls_in(op.members)]
    return " ".join([form.of(op).word, *details[:1]])


def op_cost(op: Op, box: Boxes, machine: Machine, teams: Mapping[str, Team], where: Where) -> Cost:
    """The cost of an op to the rank of `where`; `teams` are by name.

    A Group itself costs nothing, a Fused its launch: the rest is their members'.
    """
    ordering = op.ordering()
    if ordering.raises is not None:
        return Cost(max(machine.signal_s, machine.event_s))
    if op_kind(op) == "memory" or (ordering.messages and op.members):
        takes_slot = ordering.takes is not None and ordering.takes.team is not None
        return Cost(machine.event_s if takes_slot else 0.0)
    if ordering is not UNORDERED and ordering.meets is None and not ordering.messages:
        return Cost(machine.event_s)
    rule = _COSTS.get(type(op))
    if rule is None:
        raise UnsupportedError(f"the cost model knows no op {type(op).__name__}: add a row")
    return rule(_Pricing(box, machine, teams, where), op)


@dataclass(frozen=True, slots=True)
class _Pricing:
    """The cost of each kind of op to one rank."""

    box: Boxes
    machine: Machine
    teams: Mapping[str, Team]
    where: Where

    def call(self, op: Call) -> Cost:
        """The arithmetic of a call or its bytes, whichever takes longer."""
        machine = self.machine
        nbytes, shape = call_bytes(op, self.box), matmul_shape(op, self.box)
        if shape is None:
            by_bytes = nbytes / machine.memory_bandwidth
            return Cost(machine.launch_s, max(by_bytes, _attention(op, self.box, machine)))
        sizes = numbers((shape.rows, shape.inner, shape.columns, shape.batch))
        return Cost(machine.launch_s, gemm_seconds(machine, shape.dtype, *sizes, nbytes=nbytes))

    def copy(self, op: Copy) -> Cost:
        nbytes = number(self.box(op.src).nbytes + self.box(op.dst).nbytes)
        return Cost(self.machine.launch_s, nbytes / self.machine.memory_bandwidth)

    def collective(self, op: Collective) -> Cost:
        """Note [Between hosts]."""
        machine, team = self.machine, self.teams[op.team]
        views = [view for view in (op.src, op.dst) if view is not None]
        whole = max((self.nbytes(view) for view in views), default=0)
        if op.sent is not None:  # the larger one has room for what seldom comes
            whole = min(map(self.nbytes, views))
        transport = op.backend or machine.backend
        nbytes = link_bytes(op.kind, whole, team.size)
        inside = Cost(*machine.link(transport).times(op.kind, nbytes, team.size), transport)
        if team.hosts is None:
            return inside
        link, counts = machine.link(transport, between=True), [*map(len, team.hosts)]
        fixed, work = link.times(op.kind, interface_bytes(op.kind, whole, counts, link.shared))
        across = Cost(fixed * crossings(op.kind, len(counts)), work, transport, between=True)
        return across if max(counts) == 1 or across.seconds >= inside.seconds else inside

    def message(self, op: Send | Recv) -> Cost:
        (access,) = (*op.reads(), *op.writes())
        index = self.where.member(op.team).index
        between = self.teams[op.team].apart(index, self.where.index(op.peer))
        transport = op.backend or self.machine.backend
        transport = "gloo" if transport == "peer" else transport  # no peer's memory has any
        link = self.machine.link(transport, between)
        return Cost(*link.times("send", self.nbytes(access.view)), transport, between)

    def one_sided(self, op: Put | Get) -> Cost:
        kind, size = form_of(type(op)).word, self.teams[op.team].size
        return Cost(*self.machine.link("peer").times(kind, self.nbytes(op.src), size), "peer")

    def fused(self, op: Fused) -> Cost:
        return Cost(self.machine.launch_s)

    def nbytes(self, view: View) -> int:
        return number(self.box(view).nbytes)


_COSTS: Mapping[type[Op], Callable[[_Pricing, Any], Cost]] = {
    Call: _Pricing.call,
    Copy: _Pricing.copy,
    Collective: _Pricing.collective,
    Send: _Pricing.message,
    Recv: _Pricing.message,
    Put: _Pricing.one_sided,
    Get: _Pricing.one_sided,
    Fused: _Pricing.fused,
}
"""Costs of the ops that compute or move bytes."""


def call_bytes(op: Call, box: Boxes) -> int:
    """The bytes that a call reads and writes, each view once."""
    outs = (*op.outs, *(View(buffer.name) for buffer in op.fresh))
    return sum(number(box(view).nbytes) for view in dict.fromkeys((*op.views(), *outs)))


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


def _attention(op: Call, box: Boxes, machine: Machine) -> float:
    """The time of an attention's arithmetic; 0 for another call. A causal one skips half of it.

    A unit computes a tile's rows by all keys; on average it ends half such a tile before the last.
    """
    matrices = [box(arg) for arg in op.args if isinstance(arg, View)][:2]
    if not is_attention(op.fn) or any(len(b.sizes) < 2 for b in matrices) or len(matrices) < 2:
        return 0.0
    query, key = matrices
    backward = "backward" in base_of(op.fn)
    # `is_causal` follows the dropout, a float; where all is as by default, neither is given.
    floats = [i for i, arg in enumerate(op.args) if isinstance(arg, float)]
    after = op.args[floats[0] :] if floats else ()
    causal = next((arg for arg in after if isinstance(arg, bool)), dict(op.kwargs).get("is_causal"))
    rows = number(query.numel // query.sizes[-1])
    computed = rows / (2 if causal else 1) + machine.units * min(rows, machine.gemm_tile[0]) / 2
    each = 4 * number(query.sizes[-1] * key.sizes[-2]) * (2.5 if backward else 1)
    return computed * each / machine.flops(query.dtype) / machine.attention[backward]


def fused_costs(op: Fused, box: Boxes, machine: Machine) -> list[tuple[Cost, float]]:
    """The cost of each member, and of a matmul the seconds of one tile: Note [Parts of a fused
    kernel]; the launch is the Fused's own."""
    calls = [member if isinstance(member, Call) else None for member in op.members]
    shapes = [call and matmul_shape(call, box) for call in calls]
    rows: defaultdict[tuple[DType, Int, Int, Int], int] = defaultdict(int)
    for shape in filter(None, shapes):
        rows[shape.dtype, shape.inner, shape.columns, shape.batch] += number(shape.rows)
    costs: list[tuple[Cost, float]] = []
    for call, shape in zip(calls, shapes, strict=True):
        if shape is not None:
            whole = rows[shape.dtype, shape.inner, shape.columns, shape.batch]
            sizes = shape.dtype, *numbers((whole, shape.inner, shape.columns, shape.batch))
            took = gemm_seconds(machine, *sizes)
            wave = wave_seconds(machine, shape.dtype, number(shape.inner))
            work = took * number(shape.rows) / whole
            costs.append((Cost(work_s=work), min(took, wave)))
        else:
            nbytes = call_bytes(call, box) if call is not None else 0
            costs.append((Cost(work_s=nbytes / machine.memory_bandwidth), 0.0))
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
    ordering = op.ordering()
    level, takes = ordering.raises or ordering.expects, ordering.takes
    if level is not None:
        return "signal", teams[level.team].size - 1 if isinstance(level.peer, Others) else 1
    if takes is not None and takes.team is not None:
        # Taking a slot awaits that every peer released it, freeing it tells them so.
        return "signal", 2 * (teams[takes.team].size - 1)
    if takes is not None or ordering.frees is not None:
        return "event", 0
    if ordering.meets is not None:
        return ("kernel" if ordering.meets[1] == "peer" else "collective"), 1
    if ordering.messages or ordering.holds_host:
        return ("" if op.members or ordering.holds_host else "collective"), 1
    if ordering is not UNORDERED:
        return "event", 1
    if isinstance(op, Call):
        matmul = matmul_of(op.fn)
        if matmul is not None and matmul.blocks is not None:
            blocks = op.args[matmul.blocks]
            return "call", PACKED_CALLS * max(1, blocks if isinstance(blocks, int) else 1)
        return ("call" if op.fn.startswith("aten.") else "kernel"), 1
    if isinstance(op, Copy):
        return "copy", 1
    return ("peer" if op.one_sided else "kernel"), 1


def run_issue_seconds(program: Program, machine: Machine) -> float:
    """The seconds that one rank's host takes to issue a run, joining all streams included."""
    teams = {team.name: team for team in program.teams}
    streams = {op.stream for op in program.ops if op_kind(op) != "memory"}
    sides = max(0, len(streams) - 1)
    joins = 4 * sides * dict(machine.issue).get("event", 0.0)
    return joins + sum(issue_seconds(op, machine, teams) for op in program.ops)
