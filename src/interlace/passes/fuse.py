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
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.errors import ProgramError
from interlace.ir import (
    Alloc,
    Call,
    Copy,
    Expect,
    Free,
    Fused,
    FusedKernel,
    FusedMember,
    Get,
    Notify,
    Op,
    Program,
    Record,
    Remark,
    Site,
    Wait,
)
from interlace.ir.kernels import kernel_matmul
from interlace.ir.operators import matmul_of
from interlace.ir.overlap import Overlaps, ViewExtent, representatives
from interlace.strategies import row_of


@dataclass(frozen=True)
class Fuse:
    """Makes one op of what one kernel is to do."""

    name: ClassVar[str] = "fuse"

    def run(self, program: Program) -> Program:
        """The Program with the chunks of its fused sites brought together."""
        apart: dict[int, str] = {}
        overlaps: Overlaps | None = None
        for members in reversed(groups(program)):
            site = program.ops[members[0]].site
            assert site is not None
            overlaps = overlaps or Overlaps(program)  # joining changes no buffer
            try:
                _check_apart(program.ops, members, overlaps)
                program = program.replace(ops=tuple(_Joining(program.ops, members).joined()))
            except _Apart as reason:
                apart[site] = str(reason)
        return _with_reasons(_with_kernels(program), apart)


class _Apart(Exception):
    """The chunks cannot be brought together, and why."""


def _check_apart(ops: Sequence[Op], members: Sequence[int], overlaps: Overlaps) -> None:
    """Refuses chunks that touch the same bytes: parts of one op are not ordered."""
    seen: defaultdict[str, list[tuple[ViewExtent, bool]]] = defaultdict(list)
    for index in members:
        accesses = [(access.view, False) for access in ops[index].reads()]
        accesses += [(access.view, True) for access in ops[index].writes()]
        extents = [(view.buffer, overlaps.extent(view), writes) for view, writes in accesses]
        for name, extent, writes in extents:
            if any((writes or wrote) and extent.meets(other) for other, wrote in seen[name]):
                raise _Apart(f"{_name(ops[index])} depends on a chunk before it")
        for name, extent, writes in extents:
            seen[name].append((extent, writes))


def _with_reasons(program: Program, apart: dict[int, str]) -> Program:
    """The Program whose sites say why they are not fused, and its remarks where some are not."""
    fused = {op.site for op in program.ops if isinstance(op, Fused)}
    sites = tuple(
        _unfused(site, f"not fused: {why}")
        if (why := apart.get(site.id, "")) and site.id not in fused
        else site
        for site in program.sites
    )
    remarks = [
        Remark(Fuse.name, f"a matmul stays in chunks: {why}", site) for site, why in apart.items()
    ]
    return program.replace(sites=sites).remarked(remarks)


def _with_kernels(program: Program) -> Program:
    """The Program whose fused ops name the kernel that does their parts."""
    kinds = {site.id: site.kind for site in program.sites}
    ops, remarks = list(program.ops), list[Remark]()
    for index, op in enumerate(program.ops):
        if isinstance(op, Fused) and op.kernel is None and op.site in kinds:
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
    awaited = [program.team(m.team).size - 1 for m in op.members if isinstance(m, Expect)]
    others = max(awaited, default=1)  # without any, no kernel fits in any case
    return [FusedKernel(kind="gather_matmul", pieces=max(1, (len(op.parts) - 1) // others))]


def _scatters(program: Program, op: Fused) -> list[FusedKernel]:
    """The kernels with as many ranges as a scatter's parts: rank after rank, or slab by slab."""
    buffers = program.buffers()
    calls = [next(m for m in part if isinstance(m, Call)) for part in op.parts]
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
        turn = next(
            (
                i
                for i in range(first, last + 1)
                if ops[i].stream != self.stream and self._awaits(ops[i])
            ),
            last + 1,
        )
        known = {op.event for op in ops[:turn] if isinstance(op, Record)} - self.recorded
        for wait in self.waits:
            if wait.event not in known:
                raise _Apart(f"one of its chunks waits for {wait.event}, which comes after it")
        own = ops[first]
        parts = tuple(map(tuple, self.parts))
        fused = Fused(parts=parts, stream=own.stream, site=own.site, loc=own.loc)
        early, late = (
            [op for op in ops[start:stop] if op.stream != self.stream]
            for start, stop in ((first, turn), (turn, last + 1))
        )
        middle = [*early, *self.before, *self.waits, fused, *late, *self.after]
        return [*ops[:first], *middle, *ops[last + 1 :]]

    def _awaits(self, op: Op) -> bool:
        return isinstance(op, Wait) and op.event in self.recorded

    def _sort(self) -> None:
        """Deals what stands on the stream to the parts, or before or after them."""
        expects: list[Expect] = []
        inside = False  # whether an event recorded here is one of the chunk before it
        for index in range(self.first, self.last + 1):
            op = self.ops[index]
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
                case Alloc():
                    self.before.append(op)
                case Free() | Notify():
                    self.after.append(op)
                    inside = False
                case _:
                    raise _Apart(f"{_name(op)} stands between its chunks")


def _name(op: Op) -> str:
    return op.fn if isinstance(op, Call) else type(op).__name__


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
    for index, op in enumerate(program.ops if kinds else ()):
        if isinstance(op, Call) and op.site in kinds and _fills_fusable(op):
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
    for index, op in enumerate(program.ops if sites else ()):
        if isinstance(op, Expect):
            awaited.setdefault(op.site, []).append(index)
        elif isinstance(op, Call) and op.fn == SUM and op.site in sites:
            (slots,) = op.views()
            sums.setdefault(slots.buffer, []).append([*awaited.pop(op.site, []), index])
        elif isinstance(op, Call) and op.site in sites and _fills_fusable(op):
            made[op.outs[0].buffer] += 1
        elif isinstance(op, Get | Copy) and op.site in back:
            found += [*awaited.pop(op.site, []), index]
    for slots, mine in sums.items():
        beside = made[slots] == len(mine)
        found += [index for each in mine[:-1] for index in (each if beside else each[:-1])]
    return sorted(found)


def used_by(ops: Iterable[Op]) -> set[str]:
    """The buffers that ops read or write, a peer's copies included."""
    return {access.view.buffer for op in ops for access in (*op.reads(), *op.writes())}


def _fills_fusable(op: Call) -> bool:
    """True if a call is a matmul that the kernels compute, into given memory."""
    matmul = matmul_of(op.fn)
    return matmul is not None and matmul.fusable and op.fn == matmul.into
