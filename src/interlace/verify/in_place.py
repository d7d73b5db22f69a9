"""Whether an op that writes bytes which it also reads, or writes twice, is one that may.

    findings = in_place(builder, explainer, regions)

An op reads and writes in no order that the model knows: it may read an element before or after it
has written another. So its operands share bytes in one of these forms, or not at all:

    same   what is written is just what is read: the same bytes, element type, sizes and strides
    own    of a collective: what this rank gives or gets is its own part of the whole, at its place

A Copy, a pointwise operator (ir/operators.py) and an argument that a Call declares as written
(`mutates`) may have the first form; `COLLECTIVES` says which form each kind may have, and on which
backend. Nothing is written twice. What members of a Fused or a Group do to one another is a race,
which the sweep finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from interlace.ir.box import Box
from interlace.ir.operators import is_pointwise
from interlace.ir.ops import KINDS, RNG, Call, Collective, Copy
from interlace.ir.text.printer import print_view
from interlace.ir.types import DType, Index
from interlace.verify.accesses.regions import Regions
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.build import GraphBuilder
from interlace.verify.happens_before.graph import RankPlace
from interlace.verify.happens_before.source import Item, LoweredProgram, Touch
from interlace.verify.report import Finding

BACKENDS = ("gloo", "nccl", "peer", "ucc")
"""A collective that names no backend may come to run on any of these."""
COLLECTIVES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce"), ("same", BACKENDS)),
    **dict.fromkeys(("all_gather", "reduce_scatter"), ("own", BACKENDS)),
    **dict.fromkeys(("gather", "scatter"), ("own", ("gloo", "peer"))),
}
"""Of each kind that may work in place, the form and the backends that do it right."""


class Rule(NamedTuple):
    """How two operands of an op may share bytes."""

    form: str = ""
    """`same` or `own`; empty where they may not."""
    kind: str = ""
    """Of a collective, with what its own part depends on."""
    team: str = ""
    root: Index | None = None
    splits: str | None = None


NEVER, SAME = Rule(), Rule("same")
Pair = tuple[Touch, Touch, Rule]
"""What an op writes, what else it reads or writes of the same storage, and how it may."""


def in_place(builder: GraphBuilder, explainer: Explainer, regions: Regions) -> list[Finding]:
    """A finding of kind `in-place` for each op whose operands share bytes as they may not."""
    placed: dict[LoweredProgram, list[RankPlace]] = {}
    for place in builder.places:
        placed.setdefault(place.source, []).append(place)
    return [
        finding
        for source, places in placed.items()
        for finding in _Finder(source, places, explainer, regions).run()
    ]


class _Finder:
    """Looks through one Program, on all ranks that run it."""

    def __init__(
        self,
        source: LoweredProgram,
        places: Sequence[RankPlace],
        explainer: Explainer,
        regions: Regions,
    ) -> None:
        self.source = source
        self.places = places
        self.explainer = explainer
        self.regions = regions
        self.compiled = {region.name: region for region in source.program.regions}
        self.known: dict[tuple[object, ...], tuple[int, ...]] = {}
        """Of two operands and a rule: the ranks on which they break it."""
        first: dict[str, int] = {}
        self.storage = [
            first.setdefault(version.storage, number) if version.shared else number
            for number, version in enumerate(source.versions)
        ]
        """Of each version, the number of the first one with the same storage."""

    def run(self) -> Iterator[Finding]:
        storage = self.storage
        for item in self.source.items:
            if item.members:
                for member in item.members:
                    yield from self.look(member)
            elif len(item.touches) > 1:
                if len({storage[touch[1]] for touch in item.touches}) < len(item.touches):
                    yield from self.look(item)

    def look(self, item: Item) -> Iterator[Finding]:
        """The first pair of an op's operands that share bytes as they may not."""
        for write, other, rule in self.pairs(item):
            ranks = self.breach(write, other, rule)
            if ranks:
                yield self.finding(item, write, other, rule, ranks)
                return

    def pairs(self, item: Item) -> Iterator[Pair]:
        storage, op = self.storage, item.op
        touches = [touch for touch in item.touches if touch.spot.view != RNG]
        writes = [touch for touch in touches if touch.write]
        if isinstance(op, Call) and len(set(op.outs)) < len(op.outs):
            twice = next(view for i, view in enumerate(op.outs) if view in op.outs[:i])
            write = next(touch for touch in writes if touch.spot.view == twice)
            yield write, write, NEVER
        for i, write in enumerate(writes):
            for other in writes[:i]:
                if storage[other.version] == storage[write.version]:
                    yield write, other, NEVER
            itself = isinstance(op, Call) and op.mutates
            for other in touches:
                if other.write or storage[other.version] != storage[write.version]:
                    continue
                if itself and other.spot is write.spot:
                    itself = False  # the argument that is written
                else:
                    yield write, other, self.rule(item)

    def rule(self, item: Item) -> Rule:
        """How an op may write what it reads."""
        op = item.op
        if isinstance(op, Copy):
            return SAME
        if isinstance(op, Call):
            body = self.compiled[op.fn].body if op.fn in self.compiled else (op,)
            return SAME if all(is_pointwise(node.fn) for node in body) else NEVER
        if isinstance(op, Collective):
            form, backends = COLLECTIVES.get(op.kind, ("", ()))
            if not {op.backend} - {None} <= set(backends):
                form = ""
            elif op.backend is None and len(backends) < len(BACKENDS):
                form = ""
            return Rule(form, op.kind, op.team, op.root, op.splits)
        return NEVER

    def breach(self, write: Touch, other: Touch, rule: Rule) -> tuple[int, ...]:
        """The ranks on which two operands share bytes and break the rule."""
        key = (rule, *(self._identity(touch) for touch in (write, other)))
        found = self.known.get(key)
        if found is None:
            places = self.places if rule.form == "own" else self.representatives(write, other)
            broken = [place.rank for place in places if self.broken(place, write, other, rule)]
            if broken and len(places) < len(self.places):
                broken = [place.rank for place in self.places]
            found = self.known[key] = tuple(broken)
        return found

    def _identity(self, touch: Touch) -> tuple[object, ...]:
        return touch.spot.key, self.base(touch), touch.peer, touch.team, touch.root_only

    def representatives(self, *touches: Touch) -> Sequence[RankPlace]:
        """One rank where all touch the same bytes, else all."""
        for touch in touches:
            if touch.spot.by_rank or touch.peer is not None or touch.root_only:
                return self.places
        return self.places[:1]

    def base(self, touch: Touch) -> int:
        """Where a buffer begins in the storage that it shares, in bytes."""
        version = self.source.versions[touch.version]
        return version.buffer.offset if version.shared else 0

    def bytes_of(self, place: RankPlace, touch: Touch, rule: Rule) -> Bytes | None:
        """What is touched on a rank; None where that is nothing, or memory of a peer's."""
        where = place.where
        if touch.root_only and rule.root is not None:
            if where.index(rule.root) != where.member(rule.team).index:
                return None
        if touch.peer is not None and touch.team is not None:
            if where.index(touch.peer) != where.member(touch.team).index:
                return None
        box = self.regions.at(touch.spot, where).exact
        return Bytes(box, self.base(touch)) if box.numel else None

    def broken(self, place: RankPlace, write: Touch, other: Touch, rule: Rule) -> bool:
        """Whether two operands share bytes on a rank, and not as the rule says."""
        to, of = self.bytes_of(place, write, rule), self.bytes_of(place, other, rule)
        if to is None or of is None or not to.meets(of):
            return False
        if rule.form == "same":
            return not to.same(of)
        if rule.form == "own":
            whole, part = (to, of) if KINDS[rule.kind].scales == "gather" else (of, to)
            return not part.begins_at(whole, self.own_row(place, whole, rule))
        return True

    def own_row(self, place: RankPlace, whole: Bytes, rule: Rule) -> int:
        """The row of the whole at which a rank's own part of it begins."""
        where, member = place.where, place.where.member(rule.team)
        if rule.splits is not None:
            return where.table(rule.splits).start(member.index)
        return whole.box.sizes[0] // len(member.ranks) * member.index

    def finding(
        self, item: Item, write: Touch, other: Touch, rule: Rule, ranks: tuple[int, ...]
    ) -> Finding:
        """What is wrong with an op, and what to do about it."""
        program, op = self.source.program, item.op
        to, of = (print_view(touch.spot.view, program) for touch in (write, other))
        name = op.fn if isinstance(op, Call) else type(op).__name__.lower()
        if isinstance(op, Collective):
            name = op.kind
        if other.write:
            says, fix = f"writes {to} and {of}", "write each to bytes of its own"
        else:
            says, fix = f"reads {of} and writes {to}", _advice(op, rule, of, to)
        place = next(place for place in self.places if place.rank == ranks[0])
        extent = self.regions.at(write.spot, place.where).exact.hull
        buffer = write.spot.buffer.name
        ref = self.explainer.ref(place, item, says, buffer, extent)
        share = "twice the same bytes" if write is other else "which share bytes"
        message = f"{name} {says}, {share}" + _WHY[rule.form]
        return Finding("in-place", message, (ref,), fix, ranks=ranks)


_WHY = {
    "": "",
    "same": ", and are not one and the same view",
    "own": ", and not as this rank's own part lies in the whole",
}


def _advice(op: object, rule: Rule, of: str, to: str) -> str:
    """How to mend an op that reads `of` and writes `to`."""
    apart = f"read from a copy of {of}, or write to a buffer that does not share bytes with it"
    if rule.form == "same":
        return f"{apart}, or give it just the same view to read and to write"
    if rule.form == "own":
        part, whole = (of, to) if KINDS[rule.kind].scales == "gather" else (to, of)
        return f"{apart}, or let {part} be this rank's own part of {whole}"
    if isinstance(op, Collective) and op.kind in COLLECTIVES:
        return f"{apart}, or name a backend that works in place: {_quoted(COLLECTIVES[op.kind][1])}"
    return apart


def _quoted(names: Sequence[str]) -> str:
    return " or ".join(f'backend="{name}"' for name in names)


class Bytes(NamedTuple):
    """A box of a buffer, and where the buffer begins in its storage."""

    box: Box
    base: int

    @property
    def start(self) -> int:
        """The first byte, from the start of the storage."""
        return self.base + self.box.offset * self.box.dtype.itemsize

    def meets(self, other: Bytes) -> bool:
        """Whether the two share a byte."""
        (lo, hi), (low, high) = self.box.hull, other.box.hull
        if self.base + lo >= other.base + high or other.base + low >= self.base + hi:
            return False
        if self.base == other.base:
            return self.box.overlaps(other.box)
        return self.shifted().overlaps(other.shifted())

    def shifted(self) -> Box:
        """The box as bytes of the storage."""
        item = self.box.dtype.itemsize
        strides = tuple(stride * item for stride in self.box.strides)
        return Box(self.start, (*self.box.sizes, item), (*strides, 1), DType.u8)

    def same(self, other: Bytes) -> bool:
        """Whether the two are one view: element for element, of one type."""
        return (
            self.start == other.start
            and self.box.dtype == other.box.dtype
            and _steps(self.box) == _steps(other.box)
        )

    def begins_at(self, whole: Bytes, row: int) -> bool:
        """Whether the bytes are those of the whole from a row on."""
        width = whole.box.nbytes // whole.box.sizes[0]
        return (
            self.box.contiguous
            and whole.box.contiguous
            and self.box.dtype == whole.box.dtype
            and self.start == whole.start + row * width
        )


def _steps(box: Box) -> list[tuple[int, int]]:
    dims = zip(box.sizes, box.strides, strict=True)
    return [(size, stride) for size, stride in dims if size != 1]
