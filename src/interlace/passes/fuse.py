"""fuse: the matmuls that one kernel is to do become one op. The last pass.

A site with the strategy `fused` was decomposed into chunks and puts like any other. Here the chunks
of each matmul become the parts of one `Fused`, with the signals that they await and the events that
they record for their puts and for sums beside the kernel:

    main: fused(
        part(call("aten.mm.out", x, w, out=y[tp.rank])),
        part(expect(arrived, tp.rank + 1), call("aten.mm.out", slots[tp.rank + 1], w, out=...)),
        kernel=gather_matmul())

What else stands between the chunks on their stream goes before or after the op, which takes the
place of the last chunk, or of the first op that waits for one. `schedule` lets nothing come between
them that can do neither; a list from elsewhere that does is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from interlace.errors import PassError
from interlace.ir import (
    Buffer,
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
    Site,
    Wait,
)
from interlace.ir.operators import matmul_of
from interlace.strategies import row_of


@dataclass(frozen=True)
class Fuse:
    """Makes one op of what one kernel is to do."""

    name: ClassVar[str] = "fuse"

    def run(self, program: Program) -> Program:
        """The Program with the chunks of its fused sites brought together."""
        kinds, buffers = {site.id: site.kind for site in program.sites}, program.buffers()
        for members in reversed(groups(program)):
            gathers = kinds[program.ops[members[0]].site or 0] == GATHER
            ops = _Joining(program, members).joined(buffers, gathers)
            program = program.replace(ops=tuple(ops))
        return program


class _Joining:
    """Makes the chunks of one matmul the parts of one op."""

    def __init__(self, program: Program, members: tuple[int, ...]) -> None:
        self.program, self.ops, self.members = program, program.ops, members
        self.first, self.last = members[0], members[-1]
        self.stream = self.ops[self.first].stream
        self.parts: list[list[FusedMember]] = []
        self.before: list[Op] = []
        self.after: list[Op] = []
        self.waits: list[Wait] = []
        self.recorded: set[str] = set()

    def joined(self, buffers: Mapping[str, Buffer], gathers: bool) -> list[Op]:
        """All ops, with the Fused in place of its members."""
        ops, first, last = self.ops, self.first, self.last
        self._sort()
        others = [i for i in range(first, last + 1) if ops[i].stream != self.stream]
        behind = (i for i in others if ops[i].ordering().waits in self.recorded)
        turn = next(behind, last + 1)
        known = {op.ordering().records for op in ops[:turn]} - self.recorded
        for wait in self.waits:
            if wait.event not in known:
                raise self._refused(f"one of them waits for {wait.event}, which comes after it")
        own = ops[first]
        parts = tuple(map(tuple, self.parts))
        kernel = self._gather() if gathers else self._scatter(buffers)
        fused = Fused(parts=parts, kernel=kernel, stream=own.stream, site=own.site, loc=own.loc)
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
                    raise self._refused("they are on several streams")
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
                    raise self._refused(f"{name} stands between them")

    def _refused(self, why: str) -> PassError:
        return PassError(
            f"fuse: the chunks of site {self.ops[self.first].site} cannot become one op: {why}. "
            "fix: run schedule before it, or decompose{strategy=peer}"
        )

    def _gather(self) -> FusedKernel:
        """The kernel that takes the others' rows in as many ranges as the parts."""
        levels = (member.ordering().expects for part in self.parts for member in part)
        awaited = [self.program.team(level.team).size - 1 for level in levels if level is not None]
        others = max(awaited, default=1)
        return FusedKernel(kind="gather_matmul", pieces=max(1, (len(self.parts) - 1) // others))

    def _scatter(self, buffers: Mapping[str, Buffer]) -> FusedKernel:
        """The kernel with as many ranges as the parts: rank after rank, or slab by slab."""
        filled = [op.outs[0].buffer for part in self.parts for op in part if isinstance(op, Call)]
        slots = buffers[filled[-1]]
        if slots.team is None:
            raise self._refused("the last of them does not fill a slot of the rank's own rows")
        own = filled.count(slots.name)
        pieces = (len(filled) - own) // (self.program.team(slots.team).size - 1)
        slabs = filled.index(slots.name) < len(filled) - own
        return FusedKernel(kind="scatter_matmul", pieces=pieces, own=0 if slabs else own)


# groups


SUM = "interlace.sum_slots"
GATHER, ALL_REDUCE = "all_gather_matmul", "matmul_all_reduce"


def groups(program: Program) -> list[tuple[int, ...]]:
    """The calls of each group as list indices, in order."""
    kinds = {site.id: site.kind for site in program.sites if _fuses(site)}
    found: dict[object, list[int]] = {}
    for index, op in program.calls().items() if kinds else ():
        if op.site in kinds and _fills_fusable(op):
            key = op.site, op.outs[0].buffer if kinds[op.site] == GATHER else ""
            found.setdefault(key, []).append(index)
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
