"""Where bytes come from: what was said of them when they were written, wherever they have moved.

    origins = Origins(sweep)
    origins.write(place, touch, [(64, "a"), (64, "b")])    # 64 bytes of each, in the view's order
    origins.read(place, touch)                              # the same, of any view of the buffer

Nodes are walked in an order of the graph, as by the Sweep; where accesses race, what is read is
chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Generic, TypeVar

from interlace.ir.sizes import Int, Size
from interlace.ir.view import Box
from interlace.verify.accesses.memory import Content
from interlace.verify.accesses.sweep import Sweep
from interlace.verify.happens_before.graph import RankPlace
from interlace.verify.happens_before.source import Touch

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
