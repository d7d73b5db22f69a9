"""Ops that write bytes which they also read, or write twice, in a form that they do not allow.

An op reads and writes in no order that the model knows: it may read an element before or after it
has written another. So its operands share bytes in one of these forms, or not at all:

    same   what is written is just what is read: the same bytes, element type, sizes and strides
    own    of a collective: what this rank gives or gets is its own part of the whole, at its place

A Copy, a pointwise operator (ir/operators.py) and an argument that a Call writes in place may have
the first form; `COLLECTIVES` says which form each kind may have, and on which
backend. Nothing is written twice. What members of a Fused or a Group do to one another is a race,
which the sweep finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from interlace.ir.operators import is_pointwise
from interlace.ir.ops import KINDS, RNG, Call, Collective, Copy, Op, views_in
from interlace.ir.sizes import Int, at_hand
from interlace.ir.text.printer import print_view
from interlace.ir.types import DType, Where
from interlace.ir.view import Box, View
from interlace.options import BACKENDS
from interlace.verify.graph import RankPlace
from interlace.verify.regions import PER_PAIR, Regions
from interlace.verify.report import Finding
from interlace.verify.source import Item, LoweredProgram, Touch

if TYPE_CHECKING:
    from interlace.verify.explain import Explainer

COLLECTIVES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce"), ("same", BACKENDS)),
    **dict.fromkeys(("all_gather", "reduce_scatter"), ("own", BACKENDS)),
    **dict.fromkeys(("gather", "scatter"), ("own", ("gloo", "peer"))),
}
"""For each kind that may work in place, the form and the backends that do it right."""

Pair = tuple[Touch, Touch, str]
"""A write of an op, another of its touches of the same storage, and the form they may have."""
Operand = tuple[Box, Int]
"""A box of a buffer, and where the buffer begins in its storage, in bytes."""


def in_place(
    places: Sequence[RankPlace],
    regions: Regions,
    explain: Callable[[], Explainer],
    visited: Collection[int] | None = None,
) -> list[Finding]:
    """A finding of kind `in-place` for each op whose operands share bytes as they may not.

    Where the ranks that were `visited` stand for all, what lies in a rank's own part of a whole is
    compared on all ranks, the rest on those.
    """
    placed: dict[LoweredProgram, list[RankPlace]] = {}
    for place in places:
        placed.setdefault(place.source, []).append(place)
    return [
        finding
        for source, mine in placed.items()
        for finding in _Finder(source, mine, explain, regions, visited).run()
    ]


class _Finder:
    """Looks through one Program, on all ranks that run it."""

    def __init__(
        self,
        source: LoweredProgram,
        places: Sequence[RankPlace],
        explain: Callable[[], Explainer],
        regions: Regions,
        visited: Collection[int] | None,
    ) -> None:
        self.source = source
        self.places = places
        self.visited = [one for one in places if visited is None or one.rank in visited]
        self.explain = explain
        self.regions = regions
        self.compiled = {region.name: region for region in source.program.regions}
        self.known: dict[tuple[object, ...], tuple[int, ...]] = {}
        first: dict[str, int] = {}
        self.storage = [
            first.setdefault(version.storage, number) if version.shared else number
            for number, version in enumerate(source.versions)
        ]
        """For each version, the number of the first one with the same storage."""

    def run(self) -> Iterator[Finding]:
        for whole in self.source.items:
            for item in whole.members or (whole,):
                touches = item.touches
                several = len({self.storage[touch.version] for touch in touches}) < len(touches)
                if several or _twice(item.op):
                    yield from self.look(item)

    def look(self, item: Item) -> Iterator[Finding]:
        """The first pair of an op's operands that share bytes as they may not."""
        for write, other, form in self.pairs(item):
            ranks = self.breach(item, write, other, form)
            if ranks:
                yield self.finding(item, write, other, form, ranks)
                return

    def pairs(self, item: Item) -> Iterator[Pair]:
        storage, op = self.storage, item.op
        touches = [touch for touch in item.touches if touch.spot.view != RNG]
        writes = [touch for touch in touches if touch.write]
        self.regions.spend(len(writes) * len(touches))
        for twice in _twice(op):  # its two writes are one touch
            write = next(touch for touch in writes if touch.spot.view == twice)
            yield write, write, ""
        for i, write in enumerate(writes):
            for other in writes[:i]:
                if storage[other.version] == storage[write.version]:
                    yield write, other, ""
            itself = isinstance(op, Call) and write.spot.view in op.written
            for other in touches:
                if other.write or storage[other.version] != storage[write.version]:
                    continue
                if itself and other.spot is write.spot:
                    itself = False  # the argument that is written
                elif other.contents:
                    yield write, other, self.form(op)

    def form(self, op: Op | None) -> str:
        """The form in which an op may write what it reads: `same`, `own`, or empty for none."""
        if isinstance(op, Copy):
            return "same"
        if isinstance(op, Call):
            body = self.compiled[op.fn].body if op.fn in self.compiled else (op,)
            return "same" if all(is_pointwise(node.fn) for node in body) else ""
        if isinstance(op, Collective):
            form, backends = COLLECTIVES.get(op.kind, ("", ()))
            # A collective that names no backend may come to run on any.
            possible = set(BACKENDS) if op.backend is None else {op.backend}
            return form if possible <= set(backends) else ""
        return ""

    def breach(self, item: Item, write: Touch, other: Touch, form: str) -> tuple[int, ...]:
        """The ranks on which two operands share bytes, and not in the form."""
        touches = (write, other)
        op = item.op
        own = (op.kind, op.team, op.root, op.splits) if isinstance(op, Collective) else None
        key = (form, own, *((t.spot.key, self.base(t), t.peer, t.team) for t in touches))
        found = self.known.get(key)
        if found is None:
            alike = form != "own" and not any(
                t.spot.by_rank or t.peer is not None or t.root_only for t in touches
            )
            places = self.places if form == "own" else self.visited
            places = places[:1] if alike else places
            self.regions.spend(PER_PAIR * len(places))
            broken = [p.rank for p in places if self.broken(p.where, item, write, other, form)]
            if alike and broken:
                broken = [place.rank for place in self.places]
            found = self.known[key] = tuple(broken)
        return found

    def base(self, touch: Touch) -> Int:
        version = self.source.versions[touch.version]
        return version.buffer.offset if version.shared else 0

    def operand(self, where: Where, item: Item, touch: Touch) -> Operand | None:
        """The operand of a touch on a rank; None for no bytes, or a peer's memory."""
        if not item.does(touch, where):
            return None
        if touch.peer is not None and touch.team is not None:
            if where.index(touch.peer) != where.member(touch.team).index:
                return None
        box = self.regions.at(touch.spot, where).exact
        return (box, self.base(touch)) if box.numel else None

    def broken(self, where: Where, item: Item, write: Touch, other: Touch, form: str) -> bool:
        """Returns True if two operands share bytes on a rank, and not in the form."""
        to, of = (self.operand(where, item, touch) for touch in (write, other))
        if to is None or of is None or not _meet(to, of):
            return False
        if form == "same":
            return _layout(to) != _layout(of)
        if form == "own":
            assert isinstance(item.op, Collective)
            whole, part = (to, of) if KINDS[item.op.kind].scales == "gather" else (of, to)
            row = _own_row(where, item.op, whole[0].sizes[0])
            return not _begins_at(part, whole, row)
        return True

    def finding(
        self, item: Item, write: Touch, other: Touch, form: str, ranks: tuple[int, ...]
    ) -> Finding:
        """The finding for an op: its fault, and how to fix it."""
        program, op = self.source.program, item.op
        to, of = (print_view(touch.spot.view, program) for touch in (write, other))
        name = op.fn if isinstance(op, Call) else type(op).__name__.lower()
        if isinstance(op, Collective):
            name = op.kind
        if other.write:
            says, fix = f"writes {to} and {of}", "write each to bytes of its own"
        else:
            says, fix = f"reads {of} and writes {to}", _advice(op, form, of, to)
        place = next(place for place in self.places if place.rank == ranks[0])
        low, high = self.regions.at(write.spot, place.where).exact.hull
        extent = at_hand(low), at_hand(high)
        ref = self.explain().ref(place, item, says, write.spot.buffer.name, extent)
        share = "twice the same bytes" if write is other else "which share bytes"
        message = f"{name} {says}, {share}{_WHY[form]}"
        return Finding("in-place", message, (ref,), fix, ranks=ranks)


def _twice(op: Op | None) -> tuple[View, ...]:
    """The views that a Call fills more than once."""
    if not isinstance(op, Call):
        return ()
    groups = op.outs, views_in(tuple(op.facts.written(op.args, op.kwargs)))
    return tuple(view for outs in groups for i, view in enumerate(outs) if view in outs[:i])


_WHY = {
    "": "",
    "same": ", and are not one and the same view",
    "own": ", and not as this rank's own part lies in the whole",
}


def _advice(op: Op | None, form: str, of: str, to: str) -> str:
    """Advice on how to fix an op that reads `of` and writes `to`."""
    apart = f"read from a copy of {of}, or write to a buffer that does not share bytes with it"
    if form == "same":
        return f"{apart}, or give it just the same view to read and to write"
    if isinstance(op, Call) and op.fn.endswith(".out"):
        return f"{apart}, or call `{op.fn.removesuffix('.out')}_` with mutates=True if it exists"
    if not isinstance(op, Collective) or op.kind not in COLLECTIVES:
        return apart
    if form == "own":
        part, whole = (of, to) if KINDS[op.kind].scales == "gather" else (to, of)
        return f"{apart}, or let {part} be this rank's own part of {whole}"
    backends = " or ".join(f'backend="{name}"' for name in COLLECTIVES[op.kind][1])
    return f"{apart}, or name a backend that works in place: {backends}"


def _own_row(where: Where, op: Collective, rows: Int) -> Int:
    """The row of the whole at which a rank's own part begins."""
    member = where.member(op.team)
    if op.splits is not None:
        return where.table(op.splits).starts[member.index]
    return rows // len(member.ranks) * member.index


def _start(operand: Operand) -> Int:
    """The first byte, from the start of the storage."""
    box, base = operand
    return base + box.hull[0]


def _meet(one: Operand, other: Operand) -> bool:
    """Returns True if the two share a byte."""
    if one[1] == other[1]:
        return one[0].overlaps(other[0])
    return _as_bytes(one).overlaps(_as_bytes(other))


def _as_bytes(operand: Operand) -> Box:
    box, item = operand[0], operand[0].dtype.itemsize
    strides = tuple(stride * item for stride in box.strides)
    return Box(_start(operand), (*box.sizes, item), (*strides, 1), DType.u8)


def _layout(operand: Operand) -> tuple[object, ...]:
    """Start, element type, sizes and strides of an operand: equal for two that are one view."""
    box, dims = operand[0], zip(operand[0].sizes, operand[0].strides, strict=True)
    return _start(operand), box.dtype, *((size, stride) for size, stride in dims if size != 1)


def _begins_at(part: Operand, whole: Operand, row: Int) -> bool:
    """Returns True if the part is dense, and lies in the dense whole from a row on."""
    width = whole[0].nbytes // whole[0].sizes[0]
    return (
        part[0].contiguous
        and whole[0].contiguous
        and part[0].dtype == whole[0].dtype
        and _start(part) == _start(whole) + row * width
    )
