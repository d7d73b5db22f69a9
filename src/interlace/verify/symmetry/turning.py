"""Whether what a Program touches of its buffers turns with the rank.

    turning(sources, {"tp"})     # whether one rank's memory shows what every rank's does

Note [Turning views]
    Where ranks of a team stand for each other, each works in other bytes: rank 0 in `full[0]`, rank
    1 in `full[1]`. Rank 1's memory is rank 0's with the chunks renamed, if every view of the buffer
    is one whose bytes the renaming moves along: a chunk at a distance from the rank (and a part of
    it), as many as the team has ranks; or all that there is along that dimension. Chunks of chunks
    (`x[hosts.rank][tp.rank]`) are renamed level by level. What a fixed chunk or a slice takes does
    not move, so a buffer with both does not turn.

    A renaming keeps which boxes meet, and which cover another. It does not keep the hulls of boxes;
    buffers that share a storage are compared by those, so there a fold takes the hull of the whole
    buffer for any access of it, which is the same on all ranks: it may call a schedule faulty that
    is not, and then all ranks are looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from interlace.ir.program import Program
from interlace.ir.types import Index, RankIndex
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
from interlace.verify.happens_before.source import LoweredProgram, Version

Level = tuple[str, int]
"""A team whose rank counts the chunk, and how many there are."""
Storage = tuple[object, ...]
"""A buffer, or a take of a slot."""


@dataclass(slots=True)
class Cut:
    """What a view takes of one dimension of its buffer: a chunk of a chunk, and maybe less."""

    levels: tuple[Level, ...] = ()
    narrowed: bool = False
    """Whether it takes less than the whole of its chunk."""


def turning(sources: Sequence[LoweredProgram], moving: Collection[str]) -> frozenset[str]:
    """The teams among the moving ones by which some buffer does not turn: Note [Turning views]."""
    stuck: set[str] = set()
    for spots in _by_storage(sources).values():
        geometries = {(version.buffer.shape, version.buffer.dtype) for version, _, _ in spots}
        plain = all(version.buffer.strides is None for version, _, _ in spots)
        views = {(version.buffer.shape, view): program for version, view, program in spots}
        cuts = [_cuts(view, len(shape), program) for (shape, view), program in views.items()]
        for at in range(max(map(len, cuts), default=0)):
            stuck |= _unlike([cut[at] for cut in cuts if at < len(cut)], moving)
        by = {one.team for _, view, _ in spots for one in _indices(view)}
        if not plain or len(geometries) > 1 or any(map(_is_opaque, views)):
            stuck |= by & {*moving}
    return frozenset(stuck)


def arenas(source: LoweredProgram, moving: Collection[str]) -> set[str]:
    """The shared storages of a Program in which some view depends on a rank of these teams."""
    return {
        version.storage
        for version, view, _ in _spots(source)
        if version.shared and any(one.team in moving for one in _indices(view))
    }


def _spots(source: LoweredProgram) -> Iterator[tuple[Version, View, Program]]:
    """Every view that a Program touches, with its buffer."""
    known: set[tuple[int, View]] = set()
    for item in (*source.items, source.exit):
        for one in (item, *item.members):
            for touch in one.touches:
                key = touch.version, touch.spot.view
                if key not in known:
                    known.add(key)
                    yield source.versions[touch.version], touch.spot.view, source.program


def _by_storage(
    sources: Sequence[LoweredProgram],
) -> dict[Storage, list[tuple[Version, View, Program]]]:
    found: dict[Storage, list[tuple[Version, View, Program]]] = {}
    for source in sources:
        take: dict[int, int] = {}
        """Of each symmetric version: which take of its slot it is."""
        count: dict[Storage, int] = {}
        for item in source.sequence:
            if item.ordering.takes is not None and item.version >= 0:
                version = source.versions[item.version]
                slot = version.buffer.team, version.storage
                take[id(version)] = count[slot] = count.get(slot, -1) + 1
        for version, view, program in _spots(source):
            key: Storage = (source.number, id(version))
            if version.symmetric or version.registered:
                key = version.buffer.team, version.storage, take.get(id(version), -1)
            found.setdefault(key, []).append((version, view, program))
    return found


def _indices(view: View) -> Iterator[RankIndex]:
    """The ranks that a view's chunks are counted from."""
    for step in view.steps:
        if isinstance(step, Chunk) and isinstance(step.index, RankIndex):
            yield step.index


def _is_opaque(key: tuple[object, View]) -> bool:
    """Whether what a view takes is known for no dimension: a chunk by rank of other dimensions than
    the buffer's, or any box at all."""
    reshaped = False
    for step in key[1].steps:
        match step:
            case Reshape():
                reshaped = True
            case AsStrided():
                return True
            case Chunk(index=RankIndex()) if reshaped:
                return True
            case _:
                pass
    return False


def _unlike(cuts: Sequence[Cut], moving: Collection[str]) -> set[str]:
    """The moving teams by which one dimension does not turn."""
    chain = max((cut.levels for cut in cuts), key=len, default=())
    while chain and chain[-1][0] not in moving:
        chain = chain[:-1]
    for cut in cuts:
        depth = min(len(cut.levels), len(chain))
        if cut.levels[:depth] != chain[:depth] or (depth < len(chain) and cut.narrowed):
            return {name for one in cuts for name, _ in one.levels} & {*moving}
    return set()


def _cuts(view: View, num_dims: int, program: Program) -> list[Cut]:
    """What a view takes of each dimension of its buffer."""
    cuts = [Cut() for _ in range(num_dims)]
    dims: list[int] | None = [*range(num_dims)]
    """The dimension of the buffer that each of the view's is; None once that is not known."""

    def narrow(at: int) -> None:
        for cut in cuts if dims is None else [cuts[dims[at]]]:
            cut.narrowed = True

    for step in view.steps:
        match step:
            case Chunk(index=index, parts=parts, dim=dim):
                level = _level(index, parts, program)
                if level is None or dims is None or cuts[dims[dim]].narrowed:
                    narrow(dim)
                else:
                    cuts[dims[dim]].levels += (level,)
            case Slice(dim=dim):
                narrow(dim)
            case Select(dim=dim):
                narrow(dim)
                if dims is not None:
                    del dims[dim]
            case Permute(dims=order):
                dims = None if dims is None else [dims[at] for at in order]
            case Reshape():
                dims = None
            case AsStrided():
                dims = None
                narrow(0)
            case Expand(sizes=sizes):
                dims = dims if dims is not None and len(sizes) == len(dims) else None
            case Cast():
                pass
    return cuts


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
