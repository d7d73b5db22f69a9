"""Rows of FP8 that are multiplied by the scale of other rows.

Packed rows carry their scale, and a call that takes them in blocks takes one scale for each block
(`ROW_SCALES` in ir/operators.py): that of its first row. So a block has rows of one origin.

    origin   what decided a scale: the maximum by which a call quantised the rows; that call itself,
             where its maximum is unknown; or the parameter in which the rows came

Origins move with the bytes. A maximum that a collective reduced is one origin on all ranks. Bytes
that an op rearranges in a way that is not known here have none, and no block of such is refused.
Nodes are walked in an order of the graph, as by the Sweep.

Note [What a message has]
    The source of an op that meets peers may be written again once the op has ended on its rank,
    though a peer takes the bytes only later: what it takes is what was there when the op began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from interlace.ir.operators import NO_ROWS, ROW_SCALES, RowScales, base_of
from interlace.ir.ops import KINDS, Call
from interlace.ir.sizes import Int, Size, at_hand
from interlace.ir.text.printer import print_view
from interlace.ir.types import DType
from interlace.ir.view import Box, View
from interlace.verify.build import GraphBuilder
from interlace.verify.graph import Part, RankPlace
from interlace.verify.report import Finding
from interlace.verify.source import Item, LoweredProgram, Touch
from interlace.verify.sweep import Content, Sweep

if TYPE_CHECKING:
    from interlace.verify.explain import Explainer

MOST = 1 << 12
"""A view of more separate runs of bytes is not followed."""
FLOAT8 = (DType.f8e4m3, DType.f8e5m2)


class Origin(NamedTuple):
    """Source of a scale: equal for rows of one scale."""

    key: object
    by_row: bool = False
    """Each row has a scale of its own."""


Strip = Sequence[tuple[Int, Origin | None]]
"""Bytes in the order of a view's elements: so many of each origin; None: of one that is unknown."""


def scales(builder: GraphBuilder, sweep: Sweep, explain: Callable[[], Explainer]) -> list[Finding]:
    """A finding of kind `scale` for each op that takes rows of several scales by one.

    Where accesses race, what a block has is chance: there is no such finding then.
    """
    if sweep.faults:
        return []
    found: dict[tuple[LoweredProgram, Item], dict[int, tuple[RankPlace, str]]] = {}
    for place, item, words in _Walk(builder, sweep).run():
        found.setdefault((place.source, item), {})[place.rank] = place, words
    findings: list[Finding] = []
    for (_, item), by_rank in found.items():
        place, words = by_rank[min(by_rank)]
        fix = (
            "let a block have the rows of one quantisation, or quantise all of them by one maximum"
        )
        ops = (explain().ref(place, item, words.partition(" ")[2]),)
        findings.append(Finding("scale", words, ops, fix, ranks=tuple(sorted(by_rank))))
    return findings


class _Walk:
    def __init__(self, builder: GraphBuilder, sweep: Sweep) -> None:
        self.sweep = sweep
        self.labels: dict[Content, Strip] = {}
        """The origins of all bytes of each buffer."""
        self.meets = {
            (at.place, at.item): (queue, k, come)
            for queue, k, come, _ in builder.meetings.collectives()
            for at in come.values()
        }
        self.sends: dict[Part, Part] = {
            (one.recv.place, one.recv.item): (one.send.place, one.send.item)
            for one in builder.meetings.deliveries()
            if one.recv is not None and one.send is not None
        }
        self.given: dict[Part, Strip] = {}
        """See Note [What a message has]. What gives no bytes may not be here."""

    def run(self) -> Iterator[tuple[RankPlace, Item, str]]:
        """Each call and rank that takes rows of several scales by one, with words for them."""
        graph = self.sweep.graph
        for node in graph.order:
            if (part := graph.part[node]) is None:
                continue
            place, whole = part
            ends = place.nodes[whole.place] == node
            for item in whole.members if whole.is_group else (whole,):
                touches = [touch for touch in item.touches if item.does(touch, place.where)]
                if not ends:
                    for touch in touches:
                        if not touch.write:
                            self.given[place, item] = self.read(place, touch)
                    continue
                if words := self.mixed(place, item):
                    yield place, item, words
                for touch in touches:
                    if touch.write:
                        self.write(place, touch, self.origins((place, item), touch))

    def box(self, place: RankPlace, touch: Touch) -> Box:
        return self.sweep.regions.at(touch.spot, place.where).exact

    def content(self, place: RankPlace, touch: Touch) -> Content:
        life = self.sweep.life(place, touch.version)
        content = self.sweep.content(life, place, touch)
        if content not in self.labels:
            is_input = life.version.buffer.kind == "input"
            self.labels[content] = [(content.size, Origin(content) if is_input else None)]
        return content

    def read(self, place: RankPlace, touch: Touch, box: Box | None = None) -> Strip:
        """The origins of what is touched, or of a part of it."""
        box = self.box(place, touch) if box is None else box
        labels = self.labels[self.content(place, touch)]
        spans = _spans(box)
        if spans is None:
            return [(box.nbytes, None)]
        return [piece for start, end in spans for piece in _cut(labels, start, end - start)]

    def write(self, place: RankPlace, touch: Touch, strip: Strip | None) -> None:
        """Sets the origins of the bytes that are touched; None: bytes of unknown origin."""
        content, box, done = self.content(place, touch), self.box(place, touch), 0
        spans = _spans(box)
        for start, end in [box.hull] if spans is None else spans:
            length, labels = end - start, self.labels[content]
            known = strip is not None and spans is not None
            here = _cut(strip, done, length) if strip and known else [(length, None)]
            behind = _cut(labels, end, content.size - end)
            self.labels[content] = [*_cut(labels, 0, start), *here, *behind]
            done += length

    def origins(self, part: Part, touch: Touch) -> Strip | None:
        """The origins of the bytes that an op writes; None: unknown."""
        place, item = part
        if part in self.meets:
            return self.collected(part, touch)
        if item.ordering.messages:
            return self.given.get(self.sends[part]) if part in self.sends else None
        if item.call is not None:
            return self.called(part, item.call, touch)
        (source,) = (one for one in item.touches if not one.write)
        alike = self.box(place, source).dtype.itemsize == self.box(place, touch).dtype.itemsize
        return self.read(place, source) if alike else None

    def collected(self, part: Part, touch: Touch) -> Strip | None:
        (place, item), (queue, k, come) = part, self.meets[part]
        op, where, box = item.collective, place.where, self.box(place, touch)
        assert op is not None
        kind = KINDS[op.kind]
        if kind.reduces:
            whose = place.rank if kind.scales else None
            return [(box.nbytes, Origin((queue, k, whose)))]
        ranks, index = queue[0].ranks, where.member(op.team).index
        given = [self.given.get((come[rank].place, come[rank].item), ()) for rank in ranks]
        if op.root is not None and kind.scales != "gather":
            root = given[where.index(op.root)]
            if kind.scales != "scatter":
                return root
            row, first = box.nbytes // max(box.sizes[0], 1), index * box.sizes[0]
            if op.splits is not None:
                first = where.table(op.splits).starts[index]
            return _cut(root, first * row, box.nbytes)
        if op.kind == "all_to_all":
            if op.splits is not None or op.sent is not None:
                return None
            size = box.nbytes // len(ranks)
            given = [_cut(one, size * index, size) for one in given]
        return [piece for one in given for piece in one]

    def called(self, part: Part, op: Call, touch: Touch) -> Strip | None:
        (place, item), rows, origin = part, _rows_of(op), Origin(part)
        reads = [one for one in item.touches if not one.write]
        if rows.quantizes and isinstance(op.args[1], View):
            most = _distinct(self.read(place, _touch(item, op.args[1])))
            if None not in most:
                keys = tuple([one.key for one in most if one is not None])
                dtype = self.box(place, touch).dtype
                origin = origin._replace(key=(keys, op.args[2:4], dtype))
        elif rows.quantizes:
            origin = origin._replace(by_row=True)
        elif rows.moves and (base_of(op.fn) != "cat" or op.args[1:] in ((), (0,))):
            return [piece for one in reads for piece in self.read(place, one)]
        elif any(self.box(place, one).dtype in FLOAT8 for one in reads):
            return None
        return [(self.box(place, touch).nbytes, origin)]

    def mixed(self, place: RankPlace, item: Item) -> str:
        """Words for the first block of a call that has rows of several scales; empty: none has."""
        op, rows = item.call, _rows_of(item.call)
        count = op.args[2] if op is not None and rows.cut else 0
        if op is None or not isinstance(count, int) or count < 1:
            return ""
        for each, number in [*((at, count) for at in rows.cut), *((at, 1) for at in rows.whole)]:
            view = op.args[each]
            if not isinstance(view, View):
                continue
            touch = _touch(item, view)
            box = self.box(place, touch)
            if each in rows.whole:
                box = replace(box, sizes=box.sizes[::-1], strides=box.strides[::-1])
            height = box.sizes[0] // number
            for i in range(number):
                start = box.offset + i * height * box.strides[0]
                block = Box(start, (height, *box.sizes[1:]), box.strides, box.dtype)
                origins = [one for one in _distinct(self.read(place, touch, block)) if one]
                by_row = bool(origins) and origins[0].by_row and height != 1
                if len(origins) > 1 or by_row:
                    first, last = at_hand(i * height), at_hand((i + 1) * height) - 1
                    text = print_view(view, place.source.program)
                    return (
                        f"{base_of(op.fn)} multiplies rows {first} to {last} of {text}, block {i} "
                        f"of {number}, by the scale of row {first}, and "
                        + ("each has its own" if by_row else "they have several")
                    )
        return ""


def _cut(strip: Strip, start: Int, length: Int) -> Strip:
    """`length` bytes of a strip, from `start` on."""
    pieces: list[tuple[Int, Origin | None]] = []
    for size, origin in strip:
        if length == 0:
            break
        if size <= start:
            start -= size
            continue
        take = length if length <= size - start else size - start
        pieces.append((take, origin))
        start, length = 0, length - take
    return pieces


def _spans(box: Box) -> list[tuple[Int, Int]] | None:
    """The runs of bytes that a view is, in the order of its elements; None for too many."""
    if box.numel == 0:
        return []
    item = length = box.dtype.itemsize
    dims = [(n, s * item) for n, s in zip(box.sizes, box.strides, strict=True) if n != 1]
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    count = prod([size for size, _ in dims])
    if isinstance(count, Size) or count > MOST:
        return None
    starts = [box.offset * item]
    for size, stride in dims:
        starts = [start + i * stride for start in starts for i in range(size)]
    return [(start, start + length) for start in starts]


def _rows_of(op: Call | None) -> RowScales:
    return NO_ROWS if op is None else ROW_SCALES.get(base_of(op.fn), NO_ROWS)


def _touch(item: Item, view: View) -> Touch:
    return next(one for one in item.touches if not one.write and one.spot.view == view)


def _distinct(strip: Strip) -> list[Origin | None]:
    return list(dict.fromkeys(origin for _, origin in strip))
