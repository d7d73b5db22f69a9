"""Which rows of a buffer a read finds unwritten, and which ops write them too late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from interlace.ir.sizes import Int
from interlace.ir.view import Box, byte_runs
from interlace.verify.accesses.bytesets import num_runs
from interlace.verify.accesses.memory import ByteAccess, Content
from interlace.verify.accesses.sweep import Sweep
from interlace.verify.happens_before.graph import RankPlace
from interlace.verify.happens_before.source import Item, LoweredProgram, Touch

Run = tuple[Int, Int]
WriteOf = tuple[RankPlace, Item, Item, Touch]
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
        place, content = entry.place, entry.content
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
        missing = _missing(exact, done)
        late = {
            (id(writer.source), item.index): (writer.source, item.index, writer.rank)
            for box, writer, item in others
            if _writes_some(box, missing, exact)
        }
        version = versions[touches[0].version]
        whole = self.regions.at(version.spot, place.where).box
        what = f"{_rows(missing, whole, version.buffer.strides is None)} of {content.name}"
        if content.rank != place.rank:
            what += f" on rank {content.rank}"
        return what, list(late.values())[:MAX_LISTED]

    def _writes(self, content: Content) -> Iterator[tuple[Box, int, RankPlace, Item]]:
        """The writes of these bytes: each with the node at which it is done, its rank and op."""
        if self._known is None:
            self._known = defaultdict(list)
            for place in self.sweep.graph.places:
                for item, one, touch in _written(place):
                    life = self.sweep.life(place, touch.version)
                    whose = self.sweep.content(life, place, touch)
                    self._known[whose].append((place, item, one, touch))
        for place, item, one, touch in self._known.get(content, ()):
            box = self.regions.at(touch.spot, place.where).exact
            yield box, place.nodes[one.place if one.place >= 0 else one.index], place, item


def _written(place: RankPlace) -> Iterator[tuple[Item, Item, Touch]]:
    """The writes of one run: the op, its member that writes (or the op itself), and what."""
    for item in place.source.items:
        for one in (item, *item.members):
            for touch in one.touches:
                if touch.write and touch.contents and one.does(touch, place.where):
                    yield item, one, touch


def _missing(wanted: Box, there: Sequence[Box]) -> list[Run]:
    """The runs of bytes that are wanted and not there; none where there are too many to count."""
    runs, holes = byte_runs(wanted), [byte_runs(box) for box in there]
    if runs is None or None in holes:
        return []
    left = list(runs)
    for hole in holes:
        left = _without(left, hole or ())
    return left


def _writes_some(box: Box, missing: Sequence[Run], wanted: Box) -> bool:
    """Returns True if a write fills missing bytes or, if those are unknown, some that are read."""
    there = byte_runs(box)
    if not missing or there is None:
        return box.overlaps(wanted)
    return _without(missing, there) != [*missing]


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
    """Runs of bytes as rows (the last dimensions in full), or as elements."""
    if not missing:
        return "some bytes"
    item = whole.dtype.itemsize
    if not contiguous or len(whole.sizes) < 2:
        return _ranges([(lo // item, -(-hi // item)) for lo, hi in missing], "element")
    row = item * prod(whole.sizes[1:])
    part = "" if all(lo % row == 0 == hi % row for lo, hi in missing) else "part of "
    return part + _ranges([(lo // row, -(-hi // row)) for lo, hi in missing], "row")


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
