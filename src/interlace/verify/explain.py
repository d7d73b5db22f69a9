"""Turns what the checks found into findings that a person can act on.

Lines are those of the file, for a Program that was parsed from one; else those of `str(program)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from interlace.ir.ops import Loc
from interlace.ir.sizes import at_hand
from interlace.ir.text.printer import print_op
from interlace.verify.fixes import Check, Fixes, line_numbers
from interlace.verify.graph import RankPlace
from interlace.verify.report import Finding, OpRef
from interlace.verify.source import Flaw, Item, LoweredProgram
from interlace.verify.sweep import AccessFault, ByteAccess

BEGINS = "the run begins"
NEIGHBOURS = 2
"""Lines of the Program shown above and below an op."""


class Explainer:
    """Findings from faults."""

    def __init__(self, sources: Sequence[LoweredProgram], again: Check) -> None:
        self.fixes = Fixes(sources, again)
        self._lines: dict[int, list[int]] = {}
        self._texts: dict[tuple[int, int], str] = {}

    def line(self, source: LoweredProgram, index: int) -> int:
        """The line of an op or, after the last, of the return; the begin has that of the first."""
        if source.number not in self._lines:
            self._lines[source.number] = line_numbers(source.program)
        return self._lines[source.number][max(index, 0)]

    def ref(
        self,
        place: RankPlace,
        item: Item,
        role: str,
        buffer: str = "",
        extent: tuple[int, int] | None = None,
    ) -> OpRef:
        """The op as a finding shows it."""
        source = place.source
        first = max(0, item.index - NEIGHBOURS)
        last = min(len(source.items), item.index + NEIGHBOURS + 1)
        context = [(self.line(source, i), self.text(source, i)) for i in range(first, last)]
        if item.index == len(source.items):
            context.append((self.line(source, item.index), "return"))
        text = self.text(source, item.index)
        if item.op is not None and item.place > len(source.items):  # a member of a fused op
            text = print_op(item.op, source.program)
            role = f"{text.partition(': ')[2]} {role}"
        return OpRef(
            rank=place.rank,
            line=self.line(source, item.index),
            stream="" if item.op is None else source.streams[item.stream],
            text=text,
            role=role,
            buffer=buffer,
            bytes=extent,
            loc="" if item.op is None else _origin(item.op.loc),
            context=tuple(context),
            at=(source.number, item.index),
        )

    def text(self, source: LoweredProgram, index: int) -> str:
        """The op as the text of its Program writes it."""
        if index < 0:
            return BEGINS
        if index == len(source.program.ops):
            return "return"
        text = self._texts.get((source.number, index))
        if text is None:
            text = print_op(source.program.ops[index], source.program)
            self._texts[source.number, index] = text
        return text

    def flaw(self, place: RankPlace, flaw: Flaw) -> Finding:
        """A fault of list order, which every rank of the Program has."""
        source = place.source
        fix = flaw.fix.format(*(self.line(source, index) for index in flaw.lines))
        ops = tuple(self.ref(place, item, role, buffer) for item, role, buffer in flaw.ops)
        return Finding(flaw.kind, flaw.message, ops, fix, "error", source.ranks)

    def access(self, entry: ByteAccess) -> OpRef:
        """An op with what it does to which bytes."""
        name, item, rank = entry.content.name, entry.item, entry.content.rank
        if entry.free:
            verb = "frees" if item.ordering.frees is not None else "takes the slot of"
        else:
            verb = "returns" if item.ends_run else "writes" if entry.write else "reads"
        whose = f" of rank {rank}" if rank != entry.place.rank else ""
        extent = at_hand(entry.region.lo), at_hand(entry.region.hi)
        return self.ref(entry.place, item, f"{verb} {name}{whose}", name, extent)

    def faults(self, faults: Sequence[AccessFault]) -> Finding:
        """One finding for the same fault on several ranks."""
        kind, first, second = faults[0].kind, faults[0].first, faults[0].second
        ranks = tuple(sorted({found.second.place.rank for found in faults}))
        if first is None:
            return self._unwritten(kind, second, ranks)
        pairs = [(one.first, one.second) for one in faults if one.first is not None]
        if kind == "race" and not first.free and _listed_after(first, second):
            pairs = [(two, one) for one, two in pairs]
            first, second = pairs[0]
        ops = (self.access(first), self.access(second))
        name, proved = second.content.name, None
        match kind:
            case "use-after-free":
                message = f"{name} is used after it was freed"
                fix = f"free {name} after line {ops[1].line}, and in an order that awaits it"
            case "use-before-alloc":
                message = f"{name} is used before its slot is taken"
                fix = f"allocate {name} before line {ops[1].line}, in an order that this op awaits"
            case _:
                message = _race_message(first, second, ops)
                fix = _race_advice(first, second, ops)
                proved = cache(partial(self.fixes.prove, pairs))
        return Finding(kind, message, ops, fix, "error", ranks, proved)

    def _unwritten(self, kind: str, entry: ByteAccess, ranks: tuple[int, ...]) -> Finding:
        op, name = self.access(entry), entry.content.name
        message = f"{name} is read, and nothing wrote some of these bytes before"
        fix = f"write them before line {op.line}, in an order that it awaits"
        if kind == "overwritten":
            message = f"{name} is read after its bytes were overwritten through another buffer"
            fix = f"free {name} only after line {op.line}, and give the storage away after that"
        return Finding("uninitialized", message, (op,), fix, ranks=ranks)


def _origin(loc: Loc) -> str:
    """Where an op was written, in a file or a program, and the module that it is of."""
    if loc.text is None:
        return str(loc)
    (file, line), module = loc.text, str(loc) if loc.module else ""
    place = "" if file.startswith("<") else f"{file}:{line}"  # a text that is no file
    return ", ".join(filter(None, [place, module]))


def _race_message(first: ByteAccess, second: ByteAccess, ops: tuple[OpRef, OpRef]) -> str:
    one, two = first.content.name, second.content.name
    what = one if one == two else f"{one} and {two}, which share storage"
    verbs = [_verb(entry) for entry in (first, second)]
    return (
        f"nothing orders line {ops[0].line} on rank {ops[0].rank}, which {verbs[0]}, and line "
        f"{ops[1].line} on rank {ops[1].rank}, which {verbs[1]} the same bytes of {what}"
    )


def _verb(entry: ByteAccess) -> str:
    if entry.free:
        return "frees" if entry.item.ordering.frees is not None else "allocates"
    return "writes" if entry.write else "reads"


def _race_advice(first: ByteAccess, second: ByteAccess, ops: tuple[OpRef, OpRef]) -> str:
    """Advice on which access must come before which, where no edit is known to bring it about."""
    one, two = first.place, second.place
    line = f"line {ops[0].line}"
    if one is two and first.item.index == second.item.index:
        return f"let {line} write to a buffer of its own, and copy from there"
    if one is not two and first.item is second.item:
        return f"let each rank touch bytes of its own: {line} is one op that all of them do at once"
    said = [
        f"{'the begin of the run' if op.text == BEGINS else f'line {op.line}'} on rank {op.rank}"
        for op in ops
    ]
    return f"order {said[0]} before {said[1]}, or the other way round"


def _listed_after(first: ByteAccess, second: ByteAccess) -> bool:
    """Returns True if the fix reads better the other way round."""
    if first.place.source is second.place.source:
        return first.item.index > second.item.index
    if second.free or second.item.op is None:
        return False
    if first.item.op is None:
        return first.item.ends_run
    return second.write and not first.write
