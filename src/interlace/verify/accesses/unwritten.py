"""Which rows of a buffer a read finds unwritten, and which ops write them too late.

what, late = Unwritten(builder, regions)(entry)     # "rows 4 to 7 of full", [...]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

from interlace.ir.box import Box, byte_runs
from interlace.ir.order import Slot
from interlace.ir.types import DType
from interlace.verify.accesses.bytesets import first_left
from interlace.verify.accesses.memory import Entry
from interlace.verify.accesses.regions import Regions
from interlace.verify.happens_before.build import Builder
from interlace.verify.happens_before.graph import Frame, Place
from interlace.verify.happens_before.source import Item, Source, Touch

Run = tuple[int, int]
MAX_LISTED = 4
"""Ranges and ops that are listed."""


class Copy(NamedTuple):
    """Whose bytes an access means: a rank's own buffer in one run, or its part of a slot."""

    owner: int | Frame
    what: Slot | int
    take: int


class Unwritten:
    """Looks through the writes of all ranks for those that a read lacks."""

    def __init__(self, builder: Builder, regions: Regions) -> None:
        self.builder = builder
        self.regions = regions
        self._known: dict[Copy, list[tuple[Frame, Item, Item, Touch]]] | None = None

    def __call__(self, entry: Entry) -> tuple[str, list[tuple[Source, int, int]]]:
        """The rows in words, and the ops that write some of them, but not before the read."""
        frame, name = entry.frame, entry.content.name
        touch = next((t for t in entry.item.touches if self._is(t, entry)), None)
        if touch is None:
            return f"all of these bytes of {name}", []
        copy, exact = self._copy(frame, touch), entry.region.exact
        writes = list(self._writes(copy))
        before = self.builder.graph.before
        there = [box for box, node, _, _ in writes if before(node, entry.node)]
        missing, all_of_it = _missing(exact, there)
        late = {
            (id(place.source), item.index): (place.source, item.index, place.rank)
            for box, node, place, item in writes
            if not before(node, entry.node) and _writes_some(box, missing, exact)
        }
        version = frame.place.source.versions[touch.version]
        whole = self.regions.at(version.spot, frame.place.where).box
        more = " and more" if missing and not all_of_it else ""
        what = f"{_rows(missing, whole, version.buffer.strides is None)}{more} of {name}"
        if isinstance(copy.owner, int) and copy.owner != frame.place.rank:
            what += f" on rank {copy.owner}"
        return what, list(late.values())[:MAX_LISTED]

    def _is(self, touch: Touch, entry: Entry) -> bool:
        where = entry.frame.place.where
        name = entry.frame.place.source.versions[touch.version].buffer.name
        same = name == entry.content.name and not touch.write
        return same and self.regions.at(touch.spot, where) is entry.region

    def _copy(self, frame: Frame, touch: Touch) -> Copy:
        place = frame.place
        version = place.source.versions[touch.version]
        if not (version.symmetric or version.registered):
            return Copy(frame, touch.version, 0)
        owner = place.rank
        if touch.peer is not None and touch.team is not None:
            owner = place.where.member(touch.team).ranks[place.where.index(touch.peer)]
        take = frame.run if version.registered else frame.takes.get(touch.version, -1 - frame.run)
        return Copy(owner, self.builder.slot(place, touch.version), take)

    def _writes(self, copy: Copy) -> Iterator[tuple[Box, int, Place, Item]]:
        """The writes of these bytes: each with when it is done and who does it."""
        if self._known is None:
            self._known = {}
            for frame in self.builder.graph.frames:
                for item in frame.place.source.items:
                    for one in (item, *item.members):
                        for touch in one.touches:
                            if touch.write and one.does(touch, frame.place.where):
                                writes = self._known.setdefault(self._copy(frame, touch), [])
                                writes.append((frame, item, one, touch))
        for frame, item, one, touch in self._known.get(copy, ()):
            box = self.regions.at(touch.spot, frame.place.where).exact
            spot = one.place if one.place >= 0 else one.index
            yield box, frame.nodes[spot], frame.place, item


def _missing(wanted: Box, there: Sequence[Box]) -> tuple[list[Run], bool]:
    """The runs of bytes that are wanted and not there, and whether these are all.

    Where there are too many to count it is the first element.
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
    by_row: dict[int, list[Run]] = {}
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
    if len(joined) > MAX_LISTED:
        said.append("more")
    listed = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
    many = len(joined) > 1 or joined[0][1] > joined[0][0] + 1
    return f"{word}{'s' if many else ''} {listed}"
