"""fuse: the matmuls that one kernel is to do become one op. The last pass.

A site with the strategy `fused` was decomposed into chunks and puts like any other. Here the chunks
of each matmul become the parts of one `Fused`, with the signals that they await and the events that
they record for their puts and for sums beside the kernel:

    main: fused(
        part(call("aten.mm.out", x, w, out=y[tp.rank])),
        part(expect(arrived, tp.rank + 1), call("aten.mm.out", slots[tp.rank + 1], w, out=...)),
        kernel=gather_matmul())

What else stands between the chunks on their stream goes before or after the op, which takes the
place of the last chunk, or of the first op that waits for one. Chunks that cannot be brought
together stay as peer copies, with a remark.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.errors import ProgramError
from interlace.ir import (
    Call,
    Copy,
    Expect,
    Fused,
    FusedKernel,
    FusedMember,
    Get,
    Op,
    Program,
    Record,
    Remark,
    Site,
    Wait,
)
from interlace.ir.kernels import kernel_matmul
from interlace.ir.operators import matmul_of
from interlace.ir.overlap import representatives
from interlace.ir.program import calls_in
from interlace.strategies import row_of


@dataclass(frozen=True)
class Fuse:
    """Makes one op of what one kernel is to do."""

    name: ClassVar[str] = "fuse"

    def run(self, program: Program) -> Program:
        """The Program with the chunks of its fused sites brought together."""
        program, reasons = joined(program)
        return with_reasons(_with_kernels(program), reasons)


class _Apart(Exception):
    """The chunks cannot be brought together, and why."""


def joined(program: Program) -> tuple[Program, dict[int, str]]:
    """The Program with chunks brought together, and why those of other sites are not."""
    reasons: dict[int, str] = {}
    for members in reversed(groups(program)):
        site = program.ops[members[0]].site
        assert site is not None
        try:
            program = program.replace(ops=tuple(_Joining(program.ops, members).joined()))
        except _Apart as reason:
            reasons[site] = str(reason)
    return program, reasons


def with_reasons(program: Program, reasons: dict[int, str]) -> Program:
    """The Program whose sites say why they are not fused, and its remarks where some are not."""
    fused = {op.site for op in program.fused().values()}
    sites = tuple(
        _unfused(site, f"not fused: {reasons[site.id]}")
        if site.id in reasons and site.id not in fused
        else site
        for site in program.sites
    )
    remarks = [
        Remark(Fuse.name, f"a matmul stays in chunks: {why}", site) for site, why in reasons.items()
    ]
    return program.replace(sites=sites).remarked(remarks)


def _with_kernels(program: Program) -> Program:
    """The Program whose fused ops name the kernel that does their parts."""
    kinds = {site.id: site.kind for site in program.sites}
    ops, remarks = list(program.ops), list[Remark]()
    for index, op in program.fused().items():
        if op.kernel is None and op.site in kinds:
            gathers = kinds[op.site] == "all_gather_matmul"
            ops[index], why = _with_kernel(program, op, gathers)
            if why:
                text = f"a matmul's parts run one after another, without a kernel: {why}"
                remarks.append(Remark(Fuse.name, text, op.site))
    return program.replace(ops=tuple(ops)).remarked(remarks)


def _with_kernel(program: Program, op: Fused, gathers: bool) -> tuple[Fused, str]:
    """The op with its kernel; or as it is, and why there is none."""
    buffers, why = program.buffers(), ""
    for kernel in _gathers(program, op) if gathers else _scatters(program, op):
        made = dataclasses.replace(op, kernel=kernel)
        try:
            for rank in representatives(program):
                kernel_matmul(made, program.boxes(rank), buffers, program.where(rank))
        except ProgramError as error:
            why = why or str(error)
        else:
            return made, ""
    return op, why


def _gathers(program: Program, op: Fused) -> list[FusedKernel]:
    """The kernel that takes the others' rows in as many ranges as a gather's parts."""
    levels = (member.ordering().expects for member in op.members)
    awaited = [program.team(level.team).size - 1 for level in levels if level is not None]
    others = max(awaited, default=1)  # without any, no kernel fits in any case
    return [FusedKernel(kind="gather_matmul", pieces=max(1, (len(op.parts) - 1) // others))]


def _scatters(program: Program, op: Fused) -> list[FusedKernel]:
    """The kernels with as many ranges as a scatter's parts: rank after rank, or slab by slab."""
    buffers = program.buffers()
    calls = [next(calls_in(part)) for part in op.parts]
    slots = buffers[calls[-1].outs[0].buffer]
    if slots.team is None:
        raise AssertionError("a reduction ends with the rank's own rows, in their slot")
    size = program.team(slots.team).size
    own = sum(call.outs[0].buffer == slots.name for call in calls)
    pieces = (len(calls) - own) // (size - 1)
    return [FusedKernel(kind="scatter_matmul", pieces=pieces, own=count) for count in (own, 0)]


class _Joining:
    """Makes the chunks of one matmul the parts of one op."""

    def __init__(self, ops: Sequence[Op], members: tuple[int, ...]) -> None:
        self.ops, self.members = ops, members
        self.first, self.last = members[0], members[-1]
        self.stream = ops[self.first].stream
        self.parts: list[list[FusedMember]] = []
        self.before: list[Op] = []
        self.after: list[Op] = []
        self.waits: list[Wait] = []
        self.recorded: set[str] = set()

    def joined(self) -> list[Op]:
        """All ops, with the Fused in place of its members."""
        ops, first, last = self.ops, self.first, self.last
        self._sort()
        others = [i for i in range(first, last + 1) if ops[i].stream != self.stream]
        behind = (i for i in others if ops[i].ordering().waits in self.recorded)
        turn = next(behind, last + 1)
        known = {op.ordering().records for op in ops[:turn]} - self.recorded
        for wait in self.waits:
            if wait.event not in known:
                raise _Apart(f"one of its chunks waits for {wait.event}, which comes after it")
        own = ops[first]
        parts = tuple(map(tuple, self.parts))
        fused = Fused(parts=parts, stream=own.stream, site=own.site, loc=own.loc)
        early = [ops[i] for i in others if i < turn]
        late = [ops[i] for i in others if i >= turn]
        middle = [*early, *self.before, *self.waits, fused, *late, *self.after]
        return [*ops[:first], *middle, *ops[last + 1 :]]

    def _sort(self) -> None:
        """Deals what stands on the stream to the parts, or before or after them."""
        expects: list[Expect] = []
        inside = False  # whether an event recorded here is one of the chunk before it
        for index in range(self.first, self.last + 1):
            op = self.ops[index]
            ordering = op.ordering()
            if op.stream != self.stream:
                if index in self.members:
                    raise _Apart("its chunks are on several streams")
                continue
            match op:
                case Call() if index in self.members:
                    self.parts.append([*expects, op])
                    expects, inside = [], True
                case Expect(site=site) if site == self.ops[self.first].site:
                    expects.append(op)
                case Record() if inside:
                    self.parts[-1].append(op)
                    self.recorded.add(op.event)
                case Wait():
                    self.waits.append(op)
                case _ if ordering.takes:
                    self.before.append(op)
                case _ if ordering.raises or ordering.frees is not None:
                    self.after.append(op)
                    inside = False
                case _:
                    name = op.fn if isinstance(op, Call) else type(op).__name__
                    raise _Apart(f"{name} stands between its chunks")


def _unfused(site: Site, reason: str) -> Site:
    row = row_of(site.strategy, site.protocol)
    if row is None or row.instead is None:
        return dataclasses.replace(site, reason=reason)
    name, protocol = row.instead
    return dataclasses.replace(site, strategy=name, protocol=protocol, reason=reason)


# groups


SUM = "interlace.sum_slots"
ALL_REDUCE = "matmul_all_reduce"


def groups(program: Program) -> list[tuple[int, ...]]:
    """The calls of each group as list indices, in order."""
    kinds = {site.id: site.kind for site in program.sites if _fuses(site)}
    found: dict[object, list[int]] = {}
    for index, op in program.calls().items() if kinds else ():
        if op.site in kinds and _fills_fusable(op):
            gathers = kinds[op.site] == "all_gather_matmul"
            found.setdefault((op.site, op.outs[0].buffer if gathers else ""), []).append(index)
    return [tuple(members) for members in found.values() if len(members) > 1]


def _fuses(site: Site) -> bool:
    """True if a site has a strategy whose chunks one kernel computes."""
    row = row_of(site.strategy, site.protocol)
    return row is not None and row.fuses


def arrivals(program: Program) -> list[int]:
    """List indices, in order, of the Expects before the sums of sites that put, but for those of
    the last sum, and of the sums beside a kernel; for a fused all-reduce also of the ops that fetch
    these sums."""
    rows = {site: row_of(site.strategy, site.protocol) for site in program.sites}
    sites = {site.id for site, row in rows.items() if row and row.puts and not row.whole}
    back = {site.id for site in rows if _fuses(site) and site.kind == ALL_REDUCE}
    found, awaited = list[int](), dict[int | None, list[int]]()
    made = Counter[str]()  # by buffer: matmuls that fill it,
    sums: dict[str, list[list[int]]] = {}  # and its sums, each behind what it awaits
    calls = program.calls()
    for index, op in enumerate(program.ops if sites else ()):
        call = calls.get(index) if op.site in sites else None
        if op.ordering().expects:
            awaited.setdefault(op.site, []).append(index)
        elif call is not None and call.fn == SUM:
            (slots,) = call.views()
            sums.setdefault(slots.buffer, []).append([*awaited.pop(op.site, []), index])
        elif call is not None and _fills_fusable(call):
            made[call.outs[0].buffer] += 1
        elif isinstance(op, Get | Copy) and op.site in back:
            found += [*awaited.pop(op.site, []), index]
    for slots, mine in sums.items():
        beside = made[slots] == len(mine)
        found += [index for each in mine[:-1] for index in (each if beside else each[:-1])]
    return sorted(found)


def _fills_fusable(op: Call) -> bool:
    """True if a call is a matmul that the kernels compute, into given memory."""
    matmul = matmul_of(op.fn)
    return matmul is not None and matmul.fusable and op.fn == matmul.into
