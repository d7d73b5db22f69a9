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
from typing import TYPE_CHECKING, NamedTuple

from interlace.ir.operators import is_pointwise
from interlace.ir.ops import KINDS, RNG, Collective, Copy, views_in
from interlace.ir.sizes import Int, at_hand
from interlace.ir.text.printer import print_view
from interlace.ir.types import Where
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

Operand = tuple[Box, Int]
"""A box of a buffer, and where the buffer begins in its storage, in bytes."""
_ADVICE = {
    "": "",
    "same": ", or give it just the same view to read and to write",
    "own": ", or let the part be this rank's own part of the whole",
}
_WHY = {
    "": "",
    "same": ", and are not one and the same view",
    "own": ", and not as this rank's own part lies in the whole",
}


class Rule(NamedTuple):
    """Permission of an op to write what it also reads."""

    name: str
    form: str = ""
    """`same`, `own`, or empty for not at all."""
    collective: Collective | None = None
    twice: tuple[View, ...] = ()
    """The views that it fills more than once."""
    written: Sequence[View] = ()
    """The arguments that it writes in place."""
    backends: str = ""
    """Backends that work in place, if not all do."""


class Pair(NamedTuple):
    """A write of an op, and another of its touches of the same storage."""

    write: Touch
    other: Touch
    form: str
    """The form that they may have."""


def in_place(
    places: Sequence[RankPlace],
    regions: Regions,
    explain: Callable[[], Explainer],
    visited: Collection[int],
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
        for source, own in placed.items()
        for finding in _Finder(source, own, explain, regions, visited).run()
    ]


class _Finder:
    """Looks through one Program, on all ranks that run it."""

    def __init__(
        self,
        source: LoweredProgram,
        places: Sequence[RankPlace],
        explain: Callable[[], Explainer],
        regions: Regions,
        visited: Collection[int],
    ) -> None:
        self.source = source
        self.places = places
        self.visited = [one for one in places if one.rank in visited]
        self.explain = explain
        self.regions = regions
        self.compiled = {region.name: region for region in source.program.regions}
        self.known: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.storage = [
            version.storage if version.shared else number
            for number, version in enumerate(source.versions)
        ]
        """For each version, what is equal for those that may share bytes."""

    def run(self) -> Iterator[Finding]:
        for whole in self.source.items:
            for item in whole.members or (whole,):
                touches, call = item.touches, item.call
                several = len({self.storage[touch.version] for touch in touches}) < len(touches)
                if several or (call is not None and (len(call.outs) > 1 or call.facts.writes)):
                    yield from self.look(item)

    def look(self, item: Item) -> Iterator[Finding]:
        """The first pair of an op's operands that share bytes as they may not."""
        rule = self.rule(item)
        for pair in self.pairs(item, rule):
            ranks = self.breach(item, pair, rule.collective)
            if ranks:
                yield self.finding(item, pair, rule, ranks)
                return

    def rule(self, item: Item) -> Rule:
        if (call := item.call) is not None:
            body = self.compiled[call.fn].body if call.fn in self.compiled else (call,)
            form = "same" if all(is_pointwise(node.fn) for node in body) else ""
            groups = call.outs, views_in(tuple(call.facts.written(call.args, call.kwargs)))
            twice = [view for outs in groups for i, view in enumerate(outs) if view in outs[:i]]
            return Rule(call.fn, form, twice=tuple(twice), written=call.written)
        if (op := item.collective) is not None:
            form, backends = COLLECTIVES.get(op.kind, ("", ()))
            # A collective that names no backend may come to run on any.
            possible = {*BACKENDS} if op.backend is None else {op.backend}
            if possible <= {*backends}:
                return Rule(op.kind, form, op)
            named = " or ".join(f'backend="{name}"' for name in backends)
            return Rule(op.kind, "", op, backends=named)
        return Rule(type(item.op).__name__.lower(), "same" if isinstance(item.op, Copy) else "")

    def pairs(self, item: Item, rule: Rule) -> Iterator[Pair]:
        touches = [touch for touch in item.touches if touch.spot.view != RNG]
        writes = [touch for touch in touches if touch.write]
        self.regions.spend(len(writes) * len(touches))
        for twice in rule.twice:  # its two writes are one touch
            write = next(touch for touch in writes if touch.spot.view == twice)
            yield Pair(write, write, "")
        for i, write in enumerate(writes):
            storage = self.storage[write.version]
            yield from (
                Pair(write, one, "") for one in writes[:i] if self.storage[one.version] == storage
            )
            itself = write.spot.view in rule.written
            for other in touches:
                if other.write or self.storage[other.version] != storage:
                    continue
                if itself and other.spot is write.spot:
                    itself = False  # the argument that is written
                elif other.contents:
                    yield Pair(write, other, rule.form)

    def breach(self, item: Item, pair: Pair, op: Collective | None) -> tuple[int, ...]:
        """The ranks on which two operands share bytes, and not in the form."""
        touches, form = (pair.write, pair.other), pair.form
        own = None if op is None else (op.kind, op.team, op.root, op.splits)
        key = (form, own, *((t.spot.key, self.base(t), t.peer, t.team) for t in touches))
        found = self.known.get(key)
        if found is None:
            places = self.places if form == "own" else self.visited
            self.regions.spend(PER_PAIR * len(places))
            broken = [place.rank for place in places if self.broken(place.where, item, pair, op)]
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

    def broken(self, where: Where, item: Item, pair: Pair, op: Collective | None) -> bool:
        """Returns True if two operands share bytes on a rank, and not in the form."""
        to, of = self.operand(where, item, pair.write), self.operand(where, item, pair.other)
        if to is None or of is None or not _meet(to, of):
            return False
        if pair.form == "same":
            return _layout(to) != _layout(of)
        if pair.form == "own" and op is not None:
            whole, part = (to, of) if KINDS[op.kind].scales == "gather" else (of, to)
            row = _own_row(where, op, whole[0].sizes[0])
            return not _begins_at(part, whole, row)
        return True

    def finding(self, item: Item, pair: Pair, rule: Rule, ranks: tuple[int, ...]) -> Finding:
        """The finding for an op: its fault, and how to fix it."""
        program, write = self.source.program, pair.write
        to, of = (print_view(touch.spot.view, program) for touch in (write, pair.other))
        if pair.other.write:
            says, fix = f"writes {to} and {of}", "write each to bytes of its own"
        else:
            says = f"reads {of} and writes {to}"
            fix = (
                f"read from a copy of {of}, or write to a buffer that does not share bytes with it"
                + _ADVICE[pair.form]
                + (
                    f", or name a backend that works in place: {rule.backends}"
                    * bool(rule.backends)
                )
            )
        place = next(place for place in self.places if place.rank == ranks[0])
        low, high = self.regions.at(write.spot, place.where).exact.hull
        extent = at_hand(low), at_hand(high)
        ref = self.explain().ref(place, item, says, write.spot.buffer.name, extent)
        share = "twice the same bytes" if write is pair.other else "which share bytes"
        message = f"{rule.name} {says}, {share}{_WHY[pair.form]}"
        return Finding("in-place", message, (ref,), fix, ranks=ranks)


def _own_row(where: Where, op: Collective, rows: Int) -> Int:
    """The row of the whole at which a rank's own part begins."""
    member = where.member(op.team)
    if op.splits is not None:
        return where.table(op.splits).starts[member.index]
    return rows // len(member.ranks) * member.index


def _hull(operand: Operand) -> tuple[Int, Int]:
    """The first byte, from the start of the storage, and the one behind the last."""
    (low, high), base = operand[0].hull, operand[1]
    return base + low, base + high


def _meet(one: Operand, other: Operand) -> bool:
    """Returns True if the two share a byte: by box in one buffer, else by hull."""
    if one[1] == other[1]:
        return one[0].overlaps(other[0])
    (low, high), (start, stop) = (_hull(operand) for operand in (one, other))
    return low < stop and start < high


def _layout(operand: Operand) -> tuple[object, ...]:
    """Start, element type, sizes and strides of an operand: equal for two that are one view."""
    box, dims = operand[0], zip(operand[0].sizes, operand[0].strides, strict=True)
    return _hull(operand)[0], box.dtype, *((size, stride) for size, stride in dims if size != 1)


def _begins_at(part: Operand, whole: Operand, row: Int) -> bool:
    """Returns True if the part is dense, and lies in the dense whole from a row on."""
    width = whole[0].nbytes // whole[0].sizes[0]
    return (
        part[0].contiguous
        and whole[0].contiguous
        and part[0].dtype == whole[0].dtype
        and _hull(part)[0] == _hull(whole)[0] + row * width
    )
