"""Which accesses of a Program touch the same bytes: views as numbered boxes, on every rank at once.

    >>> overlaps = Overlaps(program)
    >>> a, b = overlaps.number(View("x").chunk(0, 2)), overlaps.number(View("x").chunk(1, 2))
    >>> overlaps.between(a, b)
    False

A pass decides for all ranks, so two views overlap here where they do on some rank.

Passes ask for the same views again and again, of Programs that differ in their ops alone: answers
hang on the steps of views, the shape of their buffer and the `World`, and are kept for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from interlace.errors import ProgramError
from interlace.ir import (
    Access,
    AsStrided,
    Box,
    Buffer,
    Chunk,
    Dim,
    DType,
    Program,
    Slice,
    Step,
    Table,
    Team,
    View,
)
from interlace.ir.sizes import Int, cached, greatest, never_above
from interlace.ir.types import TableEntry, Where
from interlace.ir.view import varying

KEPT = 1 << 11
"""Answers that are kept of each kind."""

RNG_BUFFER = Buffer("rng", DType.u8, (1,))
"""Stands for the state that ops read and write when they draw random numbers."""


class World:
    """Who runs Programs of these teams and tables: resolvers of rank-dependent values."""

    def __init__(
        self,
        teams: tuple[Team, ...],
        tables: tuple[Table, ...],
        ranks: tuple[int, ...] | None,
        named: frozenset[str],
    ) -> None:
        self._program = Program(teams=teams, tables=tables, ranks=ranks)
        self._wheres: dict[int, Where] = {}
        self.ranks = self._representatives(sorted(named))

    def where(self, rank: int) -> Where:
        """The resolver for global `rank`."""
        found = self._wheres.get(rank)
        if found is None:
            found = self._wheres[rank] = self._program.where(rank)
        return found

    def _representatives(self, named: Sequence[str]) -> tuple[int, ...]:
        program, seen = self._program, dict[tuple[int, ...], int]()
        for rank, where in zip(program.world, program.wheres(program.world), strict=True):
            places = where.members
            key = tuple(places[name].index if name in places else -1 for name in named)
            seen.setdefault(key, rank)
        return tuple(seen.values())


_world = cached(64)(World)


def world_of(program: Program) -> World:
    """The same for all Programs with the same teams, tables and ranks, and whose views name the
    same teams."""
    return _world(program.teams, program.tables, program.ranks, _named(program))


def _named(program: Program) -> frozenset[str]:
    """The teams on whose place sizes, views and symmetric buffers depend."""
    if len(program.teams) < 2:
        return frozenset(team.name for team in program.teams)
    accesses = (access for op in program.ops for access in (*op.reads(), *op.writes()))
    return teams_of(program, (access.view for access in accesses if access.view.steps))


def teams_of(program: Program, views: Iterable[View] = ()) -> frozenset[str]:
    """The teams that these views, and the buffers of a Program, depend on."""
    buffers = {"rng": RNG_BUFFER, **program.buffers()}
    owners = {table.name: table.team for table in program.tables}
    found = {buffer.team for buffer in buffers.values() if buffer.team is not None}
    for view in (*map(View, buffers), *views):
        for value in varying(view, buffers[view.buffer]):
            found.add(owners[value.table] if isinstance(value, TableEntry) else value.team)
        for step in view.steps:
            if isinstance(step, Chunk) and isinstance(step.parts, str):
                found.add(owners[step.parts])
    return frozenset(found)


def representatives(program: Program) -> tuple[int, ...]:
    """Ranks such that every other one resolves all views as one of them does."""
    return world_of(program).ranks


Like = tuple[tuple[Dim, ...], tuple[Int, ...] | None, DType]
"""Properties that buffers must share for views of equal steps to be equal boxes."""


def _like(buffer: Buffer) -> Like:
    return buffer.shape, buffer.strides, buffer.dtype


def _view(like: Like, steps: tuple[Step, ...]) -> tuple[View, Buffer]:
    shape, strides, dtype = like
    return View("any", steps), Buffer("any", dtype, shape, strides=strides)


Touched = Sequence[tuple[tuple[Access, ...], tuple[Access, ...]]]
"""The reads and the writes of each op."""


def touched_by(program: Program) -> Touched:
    """The reads and the writes of each op of a Program."""
    return [(op.reads(), op.writes()) for op in program.ops]


@dataclass(frozen=True, slots=True)
class ViewExtent:
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
        self.extents: list[ViewExtent] = []
        self._world = world_of(program)
        self._shapes: dict[Like, int] = {}
        self._alike: dict[str, int] = {}
        self._numbers: dict[tuple[int, tuple[Step, ...]], int] = {}
        self._views: list[tuple[Like, tuple[Step, ...]]] = []
        self._answers: dict[tuple[int, int], bool] = {}
        """Results of `_share_bytes` by view numbers, which are found sooner than steps."""

    def size(self, buffer: Buffer) -> int:
        """The most bytes that a buffer spans on any rank, for any sizes of the class."""
        view, world = View(buffer.name), self._world
        uneven = any(isinstance(dim, TableEntry) for dim in buffer.shape)
        ranks = world.ranks if uneven else world.ranks[:1]
        hulls = (view.box(buffer, world.where(rank)).hull for rank in ranks)
        return max((greatest(stop) for _, stop in hulls), default=0)

    def number(self, view: View) -> int:
        """The view's number, which equal views of buffers of one shape share."""
        shape = self._alike.get(view.buffer)
        if shape is None:
            like = _like(self.buffers[view.buffer])
            shape = self._alike[view.buffer] = self._shapes.setdefault(like, len(self._shapes))
        key = (shape, view.steps)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.extents)
            buffer, world = self.buffers[view.buffer], self._world
            try:
                extent = _extent(world, _like(buffer), view.steps)
            except ProgramError:
                for rank in world.ranks:
                    view.box(buffer, world.where(rank))  # which says whose view it is
                raise
            self.extents.append(extent)
            self._views.append((_like(buffer), view.steps))
        return found

    def between(self, one: int, other: int) -> bool:
        """True if two views of one buffer share a byte on some rank."""
        a, b = self.extents[one], self.extents[other]
        if never_above(b.stop, a.start) or never_above(a.stop, b.start):
            return False
        if one == other:
            return True
        key = (one, other) if one < other else (other, one)
        found = self._answers.get(key)
        if found is None:
            steps = self._views[other][1]
            found = self._answers[key] = _share_bytes(self._world, *self._views[one], steps)
        return found

    def covers(self, one: int, other: int) -> bool:
        """True if view `one` certainly holds every byte of view `other`."""
        a, b = self.extents[one], self.extents[other]
        return one == other or (
            never_above(a.full_start, b.start) and never_above(b.stop, a.full_stop)
        )


@cached(KEPT)
def _extent(world: World, like: Like, steps: tuple[Step, ...]) -> ViewExtent:
    view, buffer = _view(like, steps)
    fixed = not any(map(rank_dependent, steps)) and not any(
        isinstance(dim, TableEntry) for dim in buffer.shape
    )
    ranks = world.ranks[:1] if fixed else world.ranks
    boxes = tuple(compared_box(view, buffer, world.where(rank)) for rank in ranks)
    held = [box for box in boxes if box is not None]
    if not held:
        return ViewExtent(boxes, 0, 0, 0, 0)
    hulls = [box.hull for box in held]
    full = len(held) == len(boxes) and all(
        box.nbytes == stop - start for box, (start, stop) in zip(held, hulls, strict=True)
    )
    starts, stops = [start for start, _ in hulls], [stop for _, stop in hulls]
    return ViewExtent(
        boxes, min(starts), max(stops), max(starts) if full else 0, min(stops) if full else 0
    )


@cached(KEPT)
def _share_bytes(world: World, like: Like, one: tuple[Step, ...], other: tuple[Step, ...]) -> bool:
    """True if two views of a buffer like that share a byte on some rank."""
    a, b = _extent(world, like, one).boxes, _extent(world, like, other).boxes
    count = max(len(a), len(b))
    pairs = zip(_stretch(a, count), _stretch(b, count), strict=True)
    return any(
        mine is not None and theirs is not None and mine.overlaps(theirs) for mine, theirs in pairs
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
    """True if a step may lead elsewhere on another rank."""
    match step:
        case Chunk(index, parts, _):
            return not isinstance(index, int) or isinstance(parts, str)
        case Slice(_, start, stop):
            return not (isinstance(start, int) and isinstance(stop, int))
        case _:
            return False


class Meets:
    """Tests if a rank's view of a buffer overlaps another view of it on the rank at a distance."""

    def __init__(self, program: Program) -> None:
        self._world, self._buffers = world_of(program), program.buffers()

    def at(self, team: str, name: str) -> Callable[[View, View, int], bool]:
        """The test for one buffer of a team. Buffers of one shape have the same answers."""
        world, like = self._world, _like(self._buffers[name])
        return lambda one, other, distance: _meet(
            world, team, like, one.steps, other.steps, distance
        )


@cached(KEPT)
def _meet(
    world: World,
    team: str,
    like: Like,
    one: tuple[Step, ...],
    other: tuple[Step, ...],
    distance: int,
) -> bool:
    """Compares the boxes of every rank with those of the rank so far away."""
    near, far = _view(like, one), _view(like, other)
    for rank in world.ranks:
        member = world.where(rank).members.get(team)
        if member is None:
            continue
        peer = member.ranks[(member.index + distance) % len(member.ranks)]
        mine = compared_box(*near, world.where(rank))
        theirs = compared_box(*far, world.where(peer))
        if mine is not None and theirs is not None and mine.overlaps(theirs):
            return True
    return False
