"""The ranks that are visited for all of a set, by the maps of ir/symmetry.py.

    turns = Turns.of(sources)
    turns.first[1023], turns.folded        # (0, ("dp", "tp")): rank 0 stands for rank 1023
    turns.carry(9)[0]                      # 9: by the map that carries 0 there

Note [Turning views]
    Where ranks of a team stand for each other, each works in other bytes: rank 0 in `full[0]`, rank
    1 in `full[1]`. Rank 1's memory is rank 0's with the chunks renamed, if every view of the buffer
    is one whose bytes the renaming moves along: a chunk at a distance from the rank (and a part of
    it), as many as the team has ranks; or all that there is along that dimension. Chunks of chunks
    (`x[hosts.rank][tp.rank]`) are renamed level by level. What a fixed chunk or a slice takes does
    not move, so a buffer with both does not turn.

    A renaming keeps which boxes meet, and which cover another. It does not keep the hulls of boxes;
    by those only buffers that share a storage are compared: Note [Buffers that share a storage] in
    fold.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from interlace.ir.ops import MessageEnd, SignalLevel
from interlace.ir.program import Program
from interlace.ir.symmetry import Actor, Map, counted_from, standing, turns_of
from interlace.ir.types import Buffer, Dim, Index, Others, RankIndex, TableEntry
from interlace.ir.view import (
    AsStrided,
    Cast,
    Chunk,
    Expand,
    Permute,
    Reshape,
    Select,
    Slice,
    View,
)
from interlace.verify.regions import Spot
from interlace.verify.report import Symmetry
from interlace.verify.source import LoweredProgram, Version

Level = tuple[str, int]
"""A team whose rank counts the chunk, and how many there are."""
Place = tuple[object, ...]
"""A buffer, or a take of a slot."""


@dataclass(slots=True)
class DimensionCut:
    """Part of one dimension of its buffer that a view takes: a chunk of a chunk, and maybe less."""

    levels: tuple[Level, ...] = ()
    narrowed: bool = False
    """The view takes less than the whole of its chunk."""


def turning(sources: Sequence[LoweredProgram], moving: Collection[str]) -> frozenset[str]:
    """The teams among the moving ones by which some buffer does not turn: Note [Turning views]."""
    stuck: set[str] = set()
    seen: set[frozenset[tuple[int, int]]] = set()
    for used in _by_place(sources, moving):
        views = {(source.number, spot.key): (spot, source) for spot, source in used}
        if (key := frozenset(views)) in seen:
            continue
        seen.add(key)
        buffers = {(spot.buffer.shape, spot.buffer.dtype) for spot, _ in used}
        by = {team for spot, _ in used for team in _teams(spot)} & {*moving}
        plain = all(spot.buffer.strides is None for spot, _ in used)
        cuts = [_cuts_of(spot, source.program) for spot, source in views.values()]
        if not plain or len(buffers) > 1 or None in cuts:
            stuck |= by
            continue
        for dim in zip(*(cut for cut in cuts if cut is not None), strict=True):
            stuck |= _unlike(dim, moving)
    return frozenset(stuck)


def spots_of(source: LoweredProgram) -> Iterator[tuple[Version, Spot]]:
    """Every view that a Program touches, with its buffer."""
    known: set[int] = set()
    for item in (*source.items, source.exit):
        for one in (item, *item.members):
            for touch in one.touches:
                if id(touch.spot) not in known:
                    known.add(id(touch.spot))
                    yield source.versions[touch.version], touch.spot


def _by_place(
    sources: Sequence[LoweredProgram], moving: Collection[str]
) -> Iterator[list[tuple[Spot, LoweredProgram]]]:
    """The views of each buffer that has some which depend on a rank of these teams."""
    found: dict[Place, list[tuple[Spot, LoweredProgram]]] = {}
    depend: set[Place] = set()
    for source in sources:
        take: dict[int, int] = {}
        """The take of its slot, for each symmetric version (by its id)."""
        count: dict[Place, int] = {}
        for item in source.sequence:
            if item.ordering.takes is not None and item.version >= 0:
                version = source.versions[item.version]
                slot = version.buffer.team, version.storage
                take[id(version)] = count[slot] = count.get(slot, -1) + 1
        for version, spot in spots_of(source):
            place: Place = (source.number, id(version))
            if version.symmetric:
                place = version.buffer.team, version.storage, take.get(id(version), -1)
            found.setdefault(place, []).append((spot, source))
            if spot.by_rank and any(team in moving for team in _teams(spot)):
                depend.add(place)
    return (found[place] for place in depend)


def _teams(spot: Spot) -> Iterator[str]:
    """The teams whose ranks a view's chunks are counted from."""
    return (index.team for index in spot.by_rank if isinstance(index, RankIndex))


def _unlike(cuts: Sequence[DimensionCut], moving: Collection[str]) -> set[str]:
    """The moving teams by which one dimension does not turn."""
    chain: tuple[Level, ...] = ()
    for cut in cuts:  # the longest that ends at a moving team
        ends = [depth for depth, (team, _) in enumerate(cut.levels, 1) if team in moving]
        chain = max(chain, cut.levels[: max(ends, default=0)], key=len)
    for cut in cuts:
        depth = min(len(cut.levels), len(chain))
        if cut.levels[:depth] != chain[:depth] or (depth < len(chain) and cut.narrowed):
            return {name for one in cuts for name, _ in one.levels} & {*moving}
    return set()


class Axis(NamedTuple):
    """One dimension of a view, in terms of its buffer's dimensions."""

    size: int
    """-1 where it is not a number."""
    of: tuple[int, ...]
    """The buffer's dimensions that it runs over."""
    lead: int | None
    """The one of them whose chunks its chunks are; None: chunks of it are of none."""


def _cuts_of(spot: Spot, program: Program) -> list[DimensionCut] | None:
    try:
        return _cuts(spot.view, spot.buffer, program)
    except (IndexError, ValueError):  # a step that does not fit: where all ranks are visited,
        return None  # this is a ProgramError


def _cuts(view: View, buffer: Buffer, program: Program) -> list[DimensionCut] | None:
    """The cut of each dimension of a view's buffer; None where a chunk by rank is of none."""
    cuts = [DimensionCut() for _ in buffer.shape]
    left = [_number(size) for size in buffer.shape]
    """Size of each dimension within its levels."""
    axes = [Axis(size, (dim,), dim) for dim, size in enumerate(left)]
    for step in view.steps:
        match step:
            case Chunk(index=RankIndex() as index, parts=parts, dim=dim):
                level, (size, of, lead) = _level(index, parts, program), axes[dim]
                if level is None or lead is None or any(cuts[at].narrowed for at in of):
                    return None
                if left[lead] >= 0 and left[lead] % level[1]:
                    return None
                cuts[lead].levels += (level,)
                left[lead] = left[lead] // level[1] if left[lead] >= 0 else -1
                axes[dim] = Axis(size // level[1] if size >= 0 else -1, of, lead)
            case Chunk(dim=dim) | Slice(dim=dim) | Select(dim=dim):
                for at in axes[dim].of:
                    cuts[at].narrowed = True
                axes[dim] = axes[dim]._replace(size=-1)
                if isinstance(step, Select):
                    del axes[dim]
            case Permute(dims=order):
                axes = [axes[at] for at in order]
            case Reshape(sizes=sizes):
                axes = _reshaped(axes, [_number(size) for size in sizes])
            case Expand(sizes=sizes):
                every = tuple(dim for axis in axes for dim in axis.of)
                axes = [Axis(-1, every, None) for _ in sizes]
            case Cast():
                axes[-1:] = [axis._replace(size=-1) for axis in axes[-1:]]
            case AsStrided():
                return None
    return cuts


def _reshaped(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    """The axes after a view of other sizes. A chunk of one that begins where an old one does is the
    same part of what both run over. Where sizes are not known, nothing is."""
    every = tuple(dim for axis in axes for dim in axis.of)
    total, known = prod([axis.size for axis in axes]), prod([size for size in sizes if size != -1])
    if sizes.count(-1) > 1 or known < 1 or total < 1 or any(axis.size < 0 for axis in axes):
        return [Axis(-1, every, None) for _ in sizes]
    mapped: list[Axis] = []
    at = 1
    for size in [total // known if size == -1 else size for size in sizes]:
        of, lead, begin = list[int](), None, 1
        for axis in axes:
            if begin < at * size and at < begin * axis.size:
                of += axis.of
            if begin == at and axis.size > 1:
                lead = axis.lead
            begin *= axis.size
        mapped.append(Axis(size, tuple(of), lead))
        at *= size
    return mapped


def _number(size: Dim) -> int:
    return size if isinstance(size, int) else -1


def _level(index: Index, parts: int | str, program: Program) -> Level | None:
    """The level of a chunk by rank, one of as many as the team has ranks; None for any other."""
    if not isinstance(index, RankIndex):
        return None
    count = parts
    if isinstance(count, str):
        values = next(table.values for table in program.tables if table.name == count)
        if len({*values}) > 1:
            return None
        count = len(values)
    return (index.team, count) if count == program.team(index.team).size else None


MOST = 2048
"""Ranks that are folded, at most: each knows how far each of them has come."""


@dataclass(slots=True, eq=False)
class Turns:
    """The maps, and which rank stands for each."""

    folded: tuple[str, ...]
    """The teams that are turned."""
    first: Map
    """Rank that stands for each rank, by rank in ascending order."""
    _turns: Sequence[Map]
    """The turn of each folded team."""
    _steps: dict[int, tuple[int, Map]] = field(default_factory=dict[int, tuple[int, Map]])
    """For each rank, one nearer to the rank that stands for both, and the map from there."""
    _carry: dict[int, Map] = field(default_factory=dict[int, Map])
    _back: dict[int, Map] = field(default_factory=dict[int, Map])

    @classmethod
    def of(cls, sources: Sequence[LoweredProgram]) -> Turns | None:
        """The Turns of a set that runs together; None where nothing can be folded."""
        if all(len(source.ranks) < 2 for source in sources):
            return None  # a turn takes a rank to another one of its Program
        if sum(len(source.ranks) for source in sources) > MOST:
            return None
        actors = [Actor(s.program, s.ranks, _ends(s), {*_told_apart(s)}) for s in sources]
        turns, members = turns_of(actors, lambda moving: turning(sources, moving))
        if not turns:
            return None
        maps = [turn.to for turn in turns.values()]
        found = cls(tuple(turns), standing(maps, sorted(members.wheres)), maps)
        found.spread()
        return found

    def carry(self, rank: int) -> Map:
        """A map that takes the rank which stands for this one to it."""
        path = [rank]
        while path[-1] not in self._carry:
            path.append(self._steps[path[-1]][0])
        while len(path) > 1:
            carried, (at, (_, step)) = self._carry[path.pop()], (path[-1], self._steps[path[-1]])
            self._carry[at] = dict(
                zip(carried, map(step.__getitem__, carried.values()), strict=True)
            )
        return self._carry[rank]

    def back(self, rank: int) -> Map:
        """The map that takes this rank to the one that stands for it."""
        found = self._back.get(rank)
        if found is None:
            carried = self.carry(rank)
            found = self._back[rank] = dict(zip(carried.values(), carried, strict=True))
        return found

    def told(self) -> Symmetry:
        """The symmetry as a report has it."""
        return Symmetry(self.visited, self.folded)

    @property
    def visited(self) -> tuple[int, ...]:
        """The ranks that stand for others, or for themselves alone."""
        return tuple(sorted({*self.first.values()}))

    def spread(self) -> None:
        """Finds the way to each rank."""
        maps = [*self._turns, *({to: at for at, to in turn.items()} for turn in self._turns)]
        for rank in self.visited:
            self._carry[rank] = {one: one for one in self.first}
            reached = [rank]
            for at in reached:  # grows while it is walked
                for step in maps:
                    if step[at] not in self._steps and step[at] not in self._carry:
                        self._steps[step[at]] = at, step
                        reached.append(step[at])


def _told_apart(source: LoweredProgram) -> Iterator[str]:
    """The teams whose ranks a Program tells apart by roots, and by entries of tables."""
    teams = {table.name: table.team for table in source.program.tables}
    uneven = {table.name for table in source.program.tables if len({*table.values}) > 1}
    spots = (spot for _, spot in spots_of(source))
    for spot in (*(version.spot for version in source.versions), *spots):
        for entry in spot.by_rank:
            if isinstance(entry, TableEntry) and not isinstance(entry.index, int):
                if entry.table in uneven or entry.index.team != teams.get(entry.table):
                    yield entry.index.team
    for item in source.items:
        for one in (item, *item.members):
            op = one.collective
            if op is not None and op.root is not None:
                yield op.team
                yield from counted_from(op.root)


def _ends(source: LoweredProgram) -> set[tuple[str, Index | Others]]:
    """The single ranks that a rank has to do with."""
    found: set[tuple[str, Index | Others]] = set()
    seen: set[int] = set()
    for item in source.items:
        for one in (item, *item.members):
            found |= {(t.team, t.peer) for t in one.touches if t.team and t.peer is not None}
            order = one.ordering
            if id(order) not in seen:  # ops that are alike have one
                seen.add(id(order))
                ends: list[MessageEnd | SignalLevel] = [*order.messages]
                ends += [level for level in (order.raises, order.expects) if level is not None]
                found |= {(end.team, end.peer) for end in ends if end.team}
    return found
