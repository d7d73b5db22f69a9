"""Rows of FP8 that are multiplied by the scale of other rows.

Packed rows carry their scale (Note [Packed rows] in float8/data.py), and a call that takes them in
blocks takes one scale for each block: that of its first row. So a block has rows of one origin.

    origin   what decided a scale: the maximum by which a call quantised the rows; that call itself,
             where its maximum is unknown; or the parameter in which the rows came

Origins move with the bytes. A maximum that a collective reduced is one origin on all ranks. Bytes
that a call rearranges in a way that is not known here have none, and no block of such is refused.

    origins = Origins(sweep, given)
    origins.write(place, touch, [(64, "a"), (64, "b")])    # 64 bytes of each, in the view's order
    origins.read(place, touch)                              # the same, of any view of the buffer

Nodes are walked in an order of the graph, as by the Sweep; where accesses race, what is read is
chance.

Note [What a message has]
    The source of an op that meets peers may be written again once the op has ended on its rank,
    though a peer takes the bytes only later: what it takes is what was there when the op began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from interlace.ir.ops import KINDS, Call, Collective, Copy, Get, Put, Recv, Send
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

T = TypeVar("T")
Strip = Sequence[tuple[Int, T | None]]
"""Bytes in the order of a view's elements: so many of each origin; None: of one that is unknown."""
MOST = 1 << 12
"""A view of more separate runs of bytes is not followed."""


class Origins(Generic[T]):
    """The origins of all bytes; `given` is that of an input, by its content."""

    def __init__(self, sweep: Sweep, given: Callable[[Content], T]) -> None:
        self.sweep, self.given = sweep, given
        self._labels: dict[Content, list[tuple[Int, Int, T]]] = {}
        """The bytes from the first up to the second, of each buffer."""

    def box(self, place: RankPlace, touch: Touch) -> Box:
        """The bytes that are touched."""
        return self.sweep.regions.at(touch.spot, place.where).exact

    def read(self, place: RankPlace, touch: Touch, box: Box | None = None) -> Strip[T]:
        """The origins of what is touched, or of a part of it."""
        box = self.box(place, touch) if box is None else box
        spans = _spans(box)
        if spans is None:
            return [(box.nbytes, None)]
        labels = sorted(self._labels[self._content(place, touch)], key=lambda label: label[0])
        strip: list[tuple[Int, T | None]] = []
        for at, end in spans:
            for start, stop, origin in labels:
                if stop <= at or start >= end:
                    continue
                if start > at:
                    strip.append((start - at, None))
                    at = start
                reach = end if end <= stop else stop
                strip.append((reach - at, origin))
                at = reach
            if at != end:
                strip.append((end - at, None))
        return strip

    def write(self, place: RankPlace, touch: Touch, strip: Strip[T] | None) -> None:
        """Sets the origins of the bytes that are touched; None: bytes of unknown origin."""
        content, box = self._content(place, touch), self.box(place, touch)
        labels, spans, done = self._labels[content], _spans(box), 0
        if spans is None:
            spans, strip = [box.hull], None
        for at, end in spans:
            labels = [part for label in labels for part in _without(label, at, end)]
            here = cut(strip, done, end - at) if strip and len(spans) > 1 else strip or ()
            done += end - at
            for length, origin in here:
                if origin is not None:
                    labels.append((at, at + length, origin))
                at += length
        self._labels[content] = labels

    def _content(self, place: RankPlace, touch: Touch) -> Content:
        life = self.sweep.life(place, touch.version)
        content = self.sweep.content(life, place, touch)
        if content not in self._labels:
            given = life.version.buffer.kind == "input"
            self._labels[content] = [(0, content.size, self.given(content))] if given else []
        return content


def cut(strip: Strip[T], start: Int, length: Int) -> Strip[T]:
    """`length` bytes of a strip, from `start` on."""
    found: list[tuple[Int, T | None]] = []
    for size, origin in strip:
        if length == 0:
            break
        if size <= start:
            start -= size
            continue
        take = length if length <= size - start else size - start
        found.append((take, origin))
        start, length = 0, length - take
    return found


def _without(label: tuple[Int, Int, T], lo: Int, hi: Int) -> list[tuple[Int, Int, T]]:
    """The parts of a label that remain where the bytes from `lo` to `hi` are overwritten."""
    start, stop, origin = label
    if stop <= lo or hi <= start:
        return [label]
    left = [(start, lo, origin)] if start < lo else []
    return [*left, (hi, stop, origin)] if hi < stop else left


def _spans(box: Box) -> list[tuple[Int, Int]] | None:
    """The runs of bytes that a view is, in the order of its elements."""
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


QUANTIZES = ("float8_rows", "float8_across", "float8_pair")
"""Calls that make packed rows by the maximum that is their second argument; None: of each row."""
BLOCKS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "float8_mm": (2, (0,), (1,)),
    "float8_turn": (2, (0, 1), ()),
}
"""Calls that take packed rows: the index of the argument that is the number of blocks, of those cut
into so many, and of those, given transposed, with one scale. With 0 blocks each row has its own."""
KEEPS_ORDER = ("clone", "contiguous", "alias", "view", "reshape", "_unsafe_view")
FLOAT8 = (DType.f8e4m3, DType.f8e5m2)


class Origin(NamedTuple):
    """Source of a scale."""

    key: object
    """Equal for rows of one scale."""
    part: Part | None
    """The call that quantised, or made the maximum."""
    given: str = ""
    """Else the parameter, and whose it is."""
    by_row: bool = False
    """Each row has a scale of its own."""


class ScaleBlock(NamedTuple):
    """Rows that a call takes by one scale."""

    view: View
    rows: tuple[Int, Int]
    number: int
    of: int
    """Number of blocks in the argument."""
    origins: list[Origin]


def scales(builder: GraphBuilder, sweep: Sweep, explain: Callable[[], Explainer]) -> list[Finding]:
    """A finding of kind `scale` for each op that takes rows of several scales by one.

    Where accesses race, what a block has is chance: there is no such finding then.
    """
    sources = {id(place.source): place.source for place in builder.places}.values()
    if sweep.faults or not takes_blocks(sources):
        return []
    found: dict[tuple[int, int], dict[int, tuple[Part, ScaleBlock]]] = {}
    for part, block in _Walk(builder, sweep).run():
        place, item = part[0], part[1]
        of_op = found.setdefault((place.source.number, item.place), {})
        of_op.setdefault(place.rank, (part, block))
    return [_finding(explain(), dict(sorted(by_rank.items()))) for by_rank in found.values()]


def takes_blocks(sources: Iterable[LoweredProgram]) -> bool:
    """Returns True if some call multiplies rows of FP8 in blocks."""
    steps = (step for source in sources for op in source.program.ops for step in op.steps)
    return any(isinstance(op, Call) and _name(op) in BLOCKS for op in steps)


class _Walk:
    def __init__(self, builder: GraphBuilder, sweep: Sweep) -> None:
        self.graph, meetings = sweep.graph, builder.meetings
        self.origins = Origins[Origin](sweep, _of_parameter)
        self.meets = {
            (at.place, at.item): (queue, k, come)
            for queue, k, come in meetings.collectives()
            for at in come.values()
        }
        self.sends: dict[Part, Part] = {
            (one.recv.place, one.recv.item): (one.send.place, one.send.item)
            for one in meetings.deliveries()
            if one.recv is not None and one.send is not None
        }
        self.given: dict[Part, Strip[Origin]] = {}
        """See     origins = Origins(sweep, given)
    origins.write(place, touch, [(64, "a"), (64, "b")])    # 64 bytes of each, in the view's order
    origins.read(place, touch)                              # the same, of any view of the buffer

Nodes are walked in an order of the graph, as by the Sweep; where accesses race, what is read is
chance.

Note [What a message has]. What gives no bytes may not be here."""

    def run(self) -> Iterator[tuple[Part, ScaleBlock]]:
        """The first block of each call and rank that has several scales."""
        for node in self.graph.order:
            part = self.graph.part[node]
            if part is None:
                continue
            place, item = part
            ends = place.nodes[item.place] == node
            for one in item.members if item.is_group else (item,):
                if not ends:
                    self.begin((place, one))
                    continue
                if isinstance(one.op, Call):
                    block = next(self.mixed((place, one), one.op), None)
                    if block is not None:
                        yield (place, one), block
                self.end((place, one))

    def begin(self, part: Part) -> None:
        place, item = part
        if isinstance(item.op, Send | Collective):
            for touch in item.touches:
                if not touch.write and item.does(touch, place.where):
                    self.given[part] = self.origins.read(place, touch)

    def end(self, part: Part) -> None:
        place, item = part
        for touch in item.touches:
            if touch.write and item.does(touch, place.where):
                self.origins.write(place, touch, self.made(part, touch))

    def made(self, part: Part, touch: Touch) -> Strip[Origin] | None:
        """The origins of the bytes that an op writes; None: unknown."""
        place, item = part
        match item.op:
            case Copy() | Put() | Get():
                source = item.touches[0]
                sizes = {self.origins.box(place, one).dtype.itemsize for one in item.touches}
                return self.origins.read(place, source) if len(sizes) == 1 else None
            case Recv():
                return self.given.get(self.sends[part], ())
            case Collective() as op:
                return self.collected(part, op, touch)
            case Call() as op:
                return self.called(part, op, touch)
            case _:
                return None

    def collected(self, part: Part, op: Collective, touch: Touch) -> Strip[Origin] | None:
        place, (queue, k, come) = part[0], self.meets[part]
        where, box, kind = place.where, self.origins.box(place, touch), KINDS[op.kind]
        ranks, index = queue[0].ranks, where.member(op.team).index
        if kind.reduces:
            whose = place.rank if kind.scales else None
            return [(box.nbytes, Origin((queue, k, whose), part))]
        given = [self.given.get((come[r].place, come[r].item), ()) for r in ranks]
        if op.root is not None and kind.scales != "gather":
            root = given[where.index(op.root)]
            if kind.scales != "scatter":
                return root
            row = box.nbytes // max(box.sizes[0], 1)
            first = index * box.sizes[0]
            if op.splits is not None:
                first = where.table(op.splits).starts[index]
            return cut(root, first * row, box.nbytes)
        if op.kind == "all_to_all":
            if op.splits is not None:
                return None
            size = box.nbytes // len(ranks)
            given = [cut(one, index * size, size) for one in given]
        return [piece for one in given for piece in one]

    def called(self, part: Part, op: Call, touch: Touch) -> Strip[Origin] | None:
        (place, item), box = part, self.origins.box(part[0], touch)
        name, origin = _name(op), Origin(part, part)
        reads = [one for one in item.touches if not one.write]
        if name in QUANTIZES:
            if not isinstance(op.args[1], View):
                origin = origin._replace(by_row=True)
            else:
                most = _distinct(self.origins.read(place, _touch(item, op.args[1])))
                if None not in most:
                    keys = tuple([one.key for one in most if one is not None])
                    origin = origin._replace(key=(keys, op.args[2:4], box.dtype))
        elif name in KEEPS_ORDER or (name == "cat" and op.args[1:] in ((), (0,))):
            return [piece for one in reads for piece in self.origins.read(place, one)]
        elif any(self.origins.box(place, one).dtype in FLOAT8 for one in reads):
            return None
        return [(box.nbytes, origin)]

    def mixed(self, part: Part, op: Call) -> Iterator[ScaleBlock]:
        """The blocks that have rows of several scales."""
        (place, item), (at, by_block, whole) = part, BLOCKS.get(_name(op), (0, (), ()))
        blocks = op.args[at] if by_block else 0
        if not isinstance(blocks, int) or blocks < 1:
            return
        for each in (*by_block, *whole):
            view = op.args[each]
            if not isinstance(view, View):
                continue
            touch = _touch(item, view)
            box, count = self.origins.box(place, touch), blocks
            if each in whole:
                box, count = replace(box, sizes=box.sizes[::-1], strides=box.strides[::-1]), 1
            height = box.sizes[0] // count
            for i in range(count):
                start = box.offset + i * height * box.strides[0]
                rows = Box(start, (height, *box.sizes[1:]), box.strides, box.dtype)
                found = [one for one in _distinct(self.origins.read(place, touch, rows)) if one]
                if len(found) > 1 or (found and found[0].by_row and height != 1):
                    yield ScaleBlock(view, (i * height, (i + 1) * height), i, count, found)


def _finding(explainer: Explainer, by_rank: dict[int, tuple[Part, ScaleBlock]]) -> Finding:
    """In the words of the first rank."""
    (place, item), block = next(iter(by_rank.values()))
    by_row = block.origins[0].by_row
    assert isinstance(item.op, Call)
    view = print_view(block.view, place.source.program)
    first, behind = map(at_hand, block.rows)
    rows = f"rows {first} to {behind - 1} of {view}, block {block.number} of {block.of},"
    said: list[str] = []
    ops = [explainer.ref(place, item, f"multiplies {rows} by the scale of row {first}")]
    for origin in block.origins[: 1 if by_row else 2]:
        if origin.part is None:
            said.append(origin.given)
            continue
        place, call = origin.part[0], origin.part[1]
        ops.append(explainer.ref(place, call, "decides the scale of some of them"))
        said.append(f"rank {place.rank}, line {ops[-1].line}")
    several = "each has a scale of its own" if by_row else "they have scales of several origins"
    return Finding(
        "scale",
        f"{_name(item.op)} multiplies {rows} by one scale, and {several}: {' and '.join(said)}",
        tuple(ops),
        "let a block have the rows of one quantisation, or quantise all of them by one maximum; "
        "0 blocks are for rows that have a scale each",
        ranks=tuple(by_rank),
    )


def _of_parameter(content: Content) -> Origin:
    return Origin((content.rank, content.name), None, f"{content.name} of rank {content.rank}")


def _name(op: Call) -> str:
    return op.fn.split(".")[1] if "." in op.fn else op.fn


def _touch(item: Item, view: View) -> Touch:
    return next(one for one in item.touches if not one.write and one.spot.view == view)


def _distinct(strip: Strip[Origin]) -> list[Origin | None]:
    return list({None if one is None else one.key: one for _, one in strip}.values())
