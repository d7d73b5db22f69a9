"""Which rows of a buffer a read finds unwritten, and which ops write them too late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

from interlace.ir.box import Box, byte_runs
from interlace.ir.sizes import Int
from interlace.ir.types import DType
from interlace.verify.accesses.bytesets import first_left, num_runs
from interlace.verify.accesses.memory import ByteAccess, Content
from interlace.verify.accesses.sweep import Sweep
from interlace.verify.happens_before.graph import Frame, RankPlace
from interlace.verify.happens_before.source import Item, LoweredProgram, Touch

Run = tuple[Int, Int]
WriteOf = tuple[Frame, Item, Item, Touch]
MAX_RUNS = 1 << 23
"""Runs of bytes that are looked at for one report."""
MAX_LISTED = 4
"""Ranges and ops that are listed."""


class Unwritten:
    """Finds among the writes of all ranks those that a read lacks."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.regions = sweep.regions
        self._known: defaultdict[Content, list[WriteOf]] | None = None
        self._left = MAX_RUNS

    def __call__(self, entry: ByteAccess) -> tuple[str, list[tuple[LoweredProgram, int, int]]]:
        """The rows in words, and the ops that write some of them, but not before the read."""
        place, content = entry.frame.place, entry.content
        versions = place.source.versions
        touches = [
            touch
            for touch in entry.item.touches
            if not touch.write
            and versions[touch.version].buffer.name == content.name
            and self.regions.at(touch.spot, place.where) is entry.region
        ]
        if not touches:
            return f"all of these bytes of {content.name}", []
        exact, before = entry.region.exact, self.sweep.graph.before
        done: list[Box] = []
        others: list[tuple[Box, RankPlace, Item]] = []
        for box, node, writer, item in self._writes(content):
            if before(node, entry.node):
                done.append(box)
            else:
                others.append((box, writer, item))
        counts = [num_runs(box) for box in (exact, *done, *(box for box, *_ in others))]
        self._left -= sum(counts) + counts[0] * len(counts)
        if self._left < 0:
            return f"some bytes of {content.name}", []
        missing, all_of_it = _missing(exact, done)
        late = {
            (id(writer.source), item.index): (writer.source, item.index, writer.rank)
            for box, writer, item in others
            if _writes_some(box, missing, exact)
        }
        version = versions[touches[0].version]
        whole = self.regions.at(version.spot, place.where).box
        more = " and more" if missing and not all_of_it else ""
        what = f"{_rows(missing, whole, version.buffer.strides is None)}{more} of {content.name}"
        if content.rank != place.rank:
            what += f" on rank {content.rank}"
        return what, list(late.values())[:MAX_LISTED]

    def _writes(self, content: Content) -> Iterator[tuple[Box, int, RankPlace, Item]]:
        """The writes of these bytes: each with the node at which it is done, its rank and op."""
        if self._known is None:
            self._known = defaultdict(list)
            for frame in self.sweep.graph.frames:
                for item, one, touch in _written(frame):
                    life = self.sweep.life(frame, touch.version)
                    whose = self.sweep.content(life, frame, touch)
                    self._known[whose].append((frame, item, one, touch))
        for frame, item, one, touch in self._known.get(content, ()):
            box = self.regions.at(touch.spot, frame.place.where).exact
            yield box, frame.nodes[one.place if one.place >= 0 else one.index], frame.place, item


def _written(frame: Frame) -> Iterator[tuple[Item, Item, Touch]]:
    """The writes of one run: the op, its member that writes (or the op itself), and what."""
    for item in frame.place.source.items:
        for one in (item, *item.members):
            for touch in one.touches:
                if touch.write and touch.contents and one.does(touch, frame.place.where):
                    yield item, one, touch


def _missing(wanted: Box, there: Sequence[Box]) -> tuple[list[Run], bool]:
    """The runs of bytes that are wanted and not there, and whether these are all: where there are
    too many to count it is the first element.
    """
    found, holes = byte_runs(wanted), [byte_runs(box) for box in there]
    if found is not None and None not in holes:
        left = list(found)
        for hole in holes:
            left = _without(left, hole or ())
        return left, True
    first = first_left(wanted, there)
    return ([] if first is None else [(first, first + wanted.dtype.itemsize)]), False


def _writes_some(box: Box, missing: Sequence[Run], wanted: Box) -> bool:
    """Whether a write is among what is missing or, where that is not known, among what is read."""
    if not missing:
        return box.overlaps(wanted)
    there = byte_runs(box)
    if there is not None:
        return _without(missing, there) != [*missing]
    return any(Box(lo, (hi - lo,), (1,), DType.u8).overlaps(box) for lo, hi in missing)


def _without(runs: Sequence[Run], holes: Sequence[Run]) -> list[Run]:
    """The runs of bytes without those in the holes; both ascend."""
    left: list[Run] = []
    at = 0
    for start, stop in runs:
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        k = at
        while k < len(holes) and holes[k][0] < stop:
            lo, hi = holes[k]
            if start < lo:
                left.append((start, lo))
            start, k = max(start, hi), k + 1
        if start < stop:
            left.append((start, stop))
    return left


def _rows(missing: Sequence[Run], whole: Box, contiguous: bool) -> str:
    """Runs of bytes as rows (the last dimensions in full), or as elements of rows."""
    if not missing:
        return "some bytes"
    item = whole.dtype.itemsize
    row = item * prod(whole.sizes[1:])
    if not contiguous or not whole.sizes:
        return _ranges([(lo // item, -(-hi // item)) for lo, hi in missing], "element")
    word = "row" if len(whole.sizes) > 1 else "element"
    if all(lo % row == 0 == hi % row for lo, hi in missing):
        return _ranges([(lo // row, hi // row) for lo, hi in missing], word)
    by_row: dict[Int, list[Run]] = {}
    for lo, hi in missing:
        for at in range(lo // row, -(-hi // row)):
            part = max(lo, at * row) - at * row, min(hi, (at + 1) * row) - at * row
            by_row.setdefault(at, []).append((part[0] // item, -(-part[1] // item)))
    part_word = "column" if len(whole.sizes) == 2 else "element"
    said: list[str] = []
    for parts, same in groupby(by_row.items(), lambda pair: pair[1]):
        rows = [at for at, _ in same]
        spans = _ranges([(at, at + 1) for at in rows], "row")
        said.append(f"{_ranges(parts, part_word)} of {spans}")
    listed = "; ".join(said[:MAX_LISTED])
    return listed if len(said) <= MAX_LISTED else f"{listed} and more"


def _ranges(runs: Sequence[Run], word: str) -> str:
    """`rows 0, 2 and 4 to 7`, of half-open ranges that ascend."""
    joined: list[Run] = []
    for lo, hi in runs:
        if joined and joined[-1][1] >= lo:
            joined[-1] = joined[-1][0], max(hi, joined[-1][1])
        else:
            joined.append((lo, hi))
    said = [str(lo) if hi == lo + 1 else f"{lo} to {hi - 1}" for lo, hi in joined[:MAX_LISTED]]
    said += ["more"] if len(joined) > MAX_LISTED else []
    listed = " and ".join(filter(None, (", ".join(said[:-1]), said[-1])))
    many = len(joined) > 1 or joined[0][1] > joined[0][0] + 1
    return f"{word}{'s' if many else ''} {listed}"
