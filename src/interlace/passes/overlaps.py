"""Which accesses of a Program touch the same bytes: views as numbered boxes, on every rank at once.

    >>> overlaps = Overlaps(program)
    >>> a, b = overlaps.number(View("x").chunk(0, 2)), overlaps.number(View("x").chunk(1, 2))
    >>> overlaps.between(a, b)
    False

A pass decides for all ranks, so two views overlap here where they do on some rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interlace.ir import Access, AsStrided, Box, Buffer, Chunk, DType, Program, Slice, Step, View
from interlace.ir.sizes import Int
from interlace.ir.types import TableEntry, Where

RNG_BUFFER = Buffer("rng", DType.u8, (1,))
"""Stands for the state that ops read and write when they draw random numbers."""


def representatives(program: Program) -> tuple[int, ...]:
    """Ranks such that every other one resolves all views as one of them does."""
    if program.rank is not None:
        return (program.rank,)
    seen: dict[tuple[int, ...], int] = {}
    for rank in program.world:
        places = program.where(rank).members
        key = tuple(places[t.name].index if t.name in places else -1 for t in program.teams)
        seen.setdefault(key, rank)
    return tuple(seen.values())


Touched = Sequence[tuple[tuple[Access, ...], tuple[Access, ...]]]
"""What each op reads and writes."""


def touched_by(program: Program) -> Touched:
    """What each op of a Program reads and writes."""
    return [(op.reads(), op.writes()) for op in program.ops]


@dataclass(frozen=True, slots=True)
class Extent:
    """A view's bytes in its buffer: the box on each rank, and bounds that hold for all ranks."""

    boxes: tuple[Box | None, ...]
    start: Int
    """No rank's box begins before this byte,"""
    stop: Int
    """nor ends after this one."""
    full_start: Int
    """On every rank the box holds all bytes from here,"""
    full_stop: Int
    """to here (empty where a box has gaps)."""


class Overlaps:
    """Numbers the views of a Program, and tells which of them share a byte."""

    def __init__(self, program: Program) -> None:
        self.buffers = {"rng": RNG_BUFFER, **program.buffers()}
        self.extents: list[Extent] = []
        self._wheres = [program.where(rank) for rank in representatives(program)]
        self._shapes: dict[object, int] = {}
        self._alike: dict[str, int] = {}
        self._numbers: dict[tuple[int, tuple[Step, ...]], int] = {}
        self._answers: dict[tuple[int, int], bool] = {}

    def size(self, buffer: Buffer) -> Int:
        """The most bytes that a buffer spans on any rank."""
        view = View(buffer.name)
        return max((view.box(buffer, where).hull[1] for where in self._wheres), default=0)

    def number(self, view: View) -> int:
        """The view's number, which equal views of buffers of one shape share."""
        shape = self._alike.get(view.buffer)
        if shape is None:
            buffer = self.buffers[view.buffer]
            like = (buffer.shape, buffer.strides, buffer.dtype)
            shape = self._alike[view.buffer] = self._shapes.setdefault(like, len(self._shapes))
        key = (shape, view.steps)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.extents)
            self.extents.append(self._extent(view))
        return found

    def between(self, one: int, other: int) -> bool:
        """Whether two views of one buffer share a byte on some rank."""
        a, b = self.extents[one], self.extents[other]
        if a.start >= b.stop or b.start >= a.stop:
            return False
        if one == other:
            return True
        key = (one, other) if one < other else (other, one)
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._compare(a, b)
        return found

    def covers(self, one: int, other: int) -> bool:
        """Whether view `one` certainly holds every byte of view `other`."""
        a, b = self.extents[one], self.extents[other]
        return one == other or (a.full_start <= b.start and b.stop <= a.full_stop)

    def _compare(self, a: Extent, b: Extent) -> bool:
        count = max(len(a.boxes), len(b.boxes))
        pairs = zip(_stretch(a.boxes, count), _stretch(b.boxes, count), strict=True)
        return any(
            mine is not None and theirs is not None and mine.overlaps(theirs)
            for mine, theirs in pairs
        )

    def _extent(self, view: View) -> Extent:
        buffer = self.buffers[view.buffer]
        fixed = not any(map(rank_dependent, view.steps)) and not any(
            isinstance(dim, TableEntry) for dim in buffer.shape
        )
        wheres = self._wheres[:1] if fixed else self._wheres
        boxes = tuple(compared_box(view, buffer, where) for where in wheres)
        held = [box for box in boxes if box is not None]
        if not held:
            return Extent(boxes, 0, 0, 0, 0)
        hulls = [box.hull for box in held]
        full = len(held) == len(boxes) and all(
            box.nbytes == stop - start for box, (start, stop) in zip(held, hulls, strict=True)
        )
        starts, stops = [start for start, _ in hulls], [stop for _, stop in hulls]
        return Extent(
            boxes, min(starts), max(stops), max(starts) if full else 0, min(stops) if full else 0
        )


def compared_box(view: View, buffer: Buffer, where: Where) -> Box | None:
    """The box that is compared; None where it holds nothing.

    What `as_strided` made counts as the whole buffer. So does an empty box, unless a table made it
    empty: where ranks were traced apart it may hold something on others, and all must agree.
    """
    if any(isinstance(step, AsStrided) for step in view.steps):
        return View(view.buffer).box(buffer, where)
    box = view.box(buffer, where)
    if box.numel:
        return box
    whole = View(view.buffer).box(buffer, where)
    return whole if whole.numel and not any(map(rank_dependent, view.steps)) else None


def _stretch(boxes: tuple[Box | None, ...], count: int) -> tuple[Box | None, ...]:
    return boxes * count if len(boxes) == 1 else boxes


def rank_dependent(step: Step) -> bool:
    """Whether a step may lead elsewhere on another rank."""
    match step:
        case Chunk(index, parts, _):
            return not isinstance(index, int) or isinstance(parts, str)
        case Slice(_, start, stop):
            return not (isinstance(start, int) and isinstance(stop, int))
        case _:
            return False


class Meets:
    """Whether what a rank touches of a buffer is what another, so far away, touches of it."""

    def __init__(self, program: Program) -> None:
        self.program, self.buffers = program, program.buffers()
        self.ranks = representatives(program)
        self.known: dict[object, bool] = {}

    def at(self, team: str, name: str) -> Callable[[View, View, int], bool]:
        """The question for one buffer of a team. Buffers of one shape have the same answers."""
        buffer = self.buffers[name]
        shape = (team, buffer.shape, buffer.strides, buffer.dtype)

        def meet(one: View, other: View, distance: int) -> bool:
            key = (shape, one.steps, other.steps, distance)
            if key not in self.known:
                self.known[key] = self.compare(team, buffer, one, other, distance)
            return self.known[key]

        return meet

    def compare(self, team: str, buffer: Buffer, one: View, other: View, distance: int) -> bool:
        """Compares the boxes of every rank with those of the rank so far away."""
        for rank in self.ranks:
            where = self.program.where(rank)
            member = where.members.get(team)
            if member is None:
                continue
            peer = member.ranks[(member.index + distance) % len(member.ranks)]
            boxes: list[Box | None] = [
                compared_box(one, buffer, where),
                compared_box(other, buffer, self.program.where(peer)),
            ]
            mine, theirs = boxes
            if mine is not None and theirs is not None and mine.overlaps(theirs):
                return True
        return False
