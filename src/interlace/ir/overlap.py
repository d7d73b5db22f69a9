"""Overlap engine: which bytes two views share, on some rank of a Program.

    >>> overlaps = Overlaps(program)
    >>> a, b = overlaps.extent(View("x").chunk(0, 2)), overlaps.extent(View("x").chunk(1, 2))
    >>> a.meets(b)
    False

A pass decides for all ranks, so two views overlap here where they do on some rank.

Passes ask for the same views again and again, of Programs that differ in their ops alone: answers
hang on the steps of views, the shape of their buffer and the `World`, and are kept for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.errors import ProgramError
from interlace.ir.ops import Access
from interlace.ir.program import Program
from interlace.ir.sizes import Int, cached, greatest, never_above
from interlace.ir.types import (
    Buffer,
    Dim,
    DType,
    RankIndex,
    Table,
    TableEntry,
    Team,
    Where,
)
from interlace.ir.view import AsStrided, Box, Chunk, Slice, Step, View, varying

KEPT = 1 << 11
"""Answers that are kept of each kind."""

RNG_BUFFER = Buffer("rng", DType.u8, (1,))
"""Stands for the state that ops read and write when they draw random numbers."""


Touched = Sequence[tuple[tuple[Access, ...], tuple[Access, ...]]]
"""The reads and the writes of each op."""


def touched_by(program: Program) -> Touched:
    """The reads and the writes of each op of a Program."""
    return [(op.reads(), op.writes()) for op in program.ops]


class World:
    """Who runs Programs of these teams and tables: resolvers of rank-dependent values."""

    def __init__(
        self,
        teams: tuple[Team, ...],
        tables: tuple[Table, ...],
        ranks: tuple[int, ...] | None,
        named: frozenset[str],
    ) -> None:
        self._program = program = Program(teams=teams, tables=tables, ranks=ranks)
        self._wheres: dict[int, Where] = {}
        first: dict[tuple[int, ...], int] = {}
        for rank, where in zip(program.world, program.wheres(program.world), strict=True):
            places = where.members
            key = tuple(places[n].index if n in places else -1 for n in sorted(named))
            first.setdefault(key, rank)
        self.ranks = tuple(first.values())
        """Ranks such that every other one resolves all views as one of them does."""

    def where(self, rank: int) -> Where:
        """The resolver for global `rank`."""
        if rank not in self._wheres:
            self._wheres[rank] = self._program.where(rank)
        return self._wheres[rank]


_world = cached(64)(World)


def world_of(program: Program, touched: Touched | None = None) -> World:
    """The same for all Programs with the same teams, tables and ranks, and whose views name the
    same teams. `touched` are the accesses of the ops, where the caller has them."""
    if len(program.teams) < 2:
        named = frozenset(team.name for team in program.teams)
    else:
        views = (
            access.view
            for reads, writes in touched or touched_by(program)
            for access in (*reads, *writes)
            if access.view.steps
        )
        named = teams_of(program, views)
    return _world(program.teams, program.tables, program.ranks, named)


def teams_of(program: Program, views: Iterable[View] = ()) -> frozenset[str]:
    """The teams that these views, and the buffers of a Program, depend on."""
    buffers = {"rng": RNG_BUFFER, **program.buffers()}
    owners = {table.name: table.team for table in program.tables}
    found = {buffer.team for buffer in buffers.values() if buffer.team is not None}
    for view in (*map(View, buffers), *views):
        chunks = (step.parts for step in view.steps if isinstance(step, Chunk))
        found |= {owners[parts] for parts in chunks if isinstance(parts, str)}
        for value in varying(view, buffers[view.buffer]):
            found.add(value.team if isinstance(value, RankIndex) else owners[value.table])
    return frozenset(found)


def representatives(program: Program) -> tuple[int, ...]:
    """Ranks such that every other one resolves all views as one of them does."""
    return world_of(program).ranks


@dataclass(frozen=True, slots=True, eq=False)
class ViewExtent:
    """A view's bytes in its buffer: the box on each rank, and bounds that hold for all ranks."""

    world: World
    view: View
    buffer: Buffer
    boxes: tuple[Box | None, ...]
    """The box of each representative, or the one that all have."""
    start: Int
    """No rank's box begins before this byte,"""
    stop: Int
    """nor ends after this one."""
    full_start: Int
    """On every rank the box holds all bytes from here,"""
    full_stop: Int
    """to here (empty where a box has gaps)."""

    def meets(self, other: ViewExtent) -> bool:
        """True if two views of one buffer share a byte on some rank."""
        if never_above(other.stop, self.start) or never_above(self.stop, other.start):
            return False
        return self is other or _share_bytes(self, other)

    def covers(self, other: ViewExtent) -> bool:
        """True if this view certainly holds every byte of another."""
        return self is other or (
            never_above(self.full_start, other.start) and never_above(other.stop, self.full_stop)
        )

    def meets_at(self, other: ViewExtent, team: str, distance: int) -> bool:
        """True if a rank's view shares a byte with another view on the rank at a distance."""
        return _meet_at(self, other, team, distance)

    def box(self, rank: int) -> Box | None:
        """The box that is compared on a rank."""
        return compared_box(self.view, self.buffer, self.world.where(rank))


class Overlaps:
    """The extents of a Program's views."""

    def __init__(self, program: Program, touched: Touched | None = None) -> None:
        """`touched` are the accesses of the ops, where the caller has them."""
        self.buffers = {"rng": RNG_BUFFER, **program.buffers()}
        self._world = world_of(program, touched)
        self._extents: dict[tuple[str, tuple[Step, ...]], ViewExtent] = {}

    def size(self, buffer: Buffer) -> int:
        """The most bytes that a buffer spans on any rank, for any sizes of the class."""
        view, world = View(buffer.name), self._world
        uneven = any(isinstance(dim, TableEntry) for dim in buffer.shape)
        ranks = world.ranks if uneven else world.ranks[:1]
        hulls = (view.box(buffer, world.where(rank)).hull for rank in ranks)
        return max((greatest(stop) for _, stop in hulls), default=0)

    def extent(self, view: View) -> ViewExtent:
        """The extent of a view: one object for equal views."""
        key = view.buffer, view.steps
        found = self._extents.get(key)
        if found is None:
            buffer, world = self.buffers[view.buffer], self._world
            try:
                like = buffer.shape, buffer.strides, buffer.dtype
                found = self._extents[key] = _extent(world, *like, view.steps)
            except ProgramError:
                for rank in world.ranks:
                    view.box(buffer, world.where(rank))  # which says whose view it is
                raise
        return found


@cached(KEPT)
def _extent(
    world: World,
    shape: tuple[Dim, ...],
    strides: tuple[Int, ...] | None,
    dtype: DType,
    steps: tuple[Step, ...],
) -> ViewExtent:
    """The extent of any view of these steps of a buffer like that."""
    view, buffer = View("any", steps), Buffer("any", dtype, shape, strides=strides)
    varies = any(map(rank_dependent, steps)) or any(isinstance(dim, TableEntry) for dim in shape)
    ranks = world.ranks if varies else world.ranks[:1]
    boxes = tuple(compared_box(view, buffer, world.where(rank)) for rank in ranks)
    held = [box for box in boxes if box is not None]
    if not held:
        return ViewExtent(world, view, buffer, boxes, 0, 0, 0, 0)
    hulls = [box.hull for box in held]
    full = len(held) == len(boxes) and all(
        box.nbytes == stop - start for box, (start, stop) in zip(held, hulls, strict=True)
    )
    starts, stops = [start for start, _ in hulls], [stop for _, stop in hulls]
    inner = (max(starts), min(stops)) if full else (0, 0)
    return ViewExtent(world, view, buffer, boxes, min(starts), max(stops), *inner)


@cached(KEPT)
def _share_bytes(one: ViewExtent, other: ViewExtent) -> bool:
    count = max(len(one.boxes), len(other.boxes))
    stretched = (e.boxes * count if len(e.boxes) == 1 else e.boxes for e in (one, other))
    return any(_overlap(*pair) for pair in zip(*stretched, strict=True))


@cached(KEPT)
def _meet_at(one: ViewExtent, other: ViewExtent, team: str, distance: int) -> bool:
    """Compares the boxes of every rank with those of the rank so far away."""
    for rank in one.world.ranks:
        member = one.world.where(rank).members.get(team)
        if member is not None:
            peer = member.ranks[(member.index + distance) % len(member.ranks)]
            if _overlap(one.box(rank), other.box(peer)):
                return True
    return False


def _overlap(one: Box | None, other: Box | None) -> bool:
    return one is not None and other is not None and one.overlaps(other)


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


def rank_dependent(step: Step) -> bool:
    """True if a step may lead elsewhere on another rank."""
    match step:
        case Chunk(index, parts, _):
            return not isinstance(index, int) or isinstance(parts, str)
        case Slice(_, start, stop):
            return not (isinstance(start, int) and isinstance(stop, int))
        case _:
            return False
