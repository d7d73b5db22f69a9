"""Which takes of a slot may lie in the same memory, within a run, though no rank waits for it.

    places = shared_places([program])        # {("s0", 0): 0, ("s0", 1): 0, ("s0", 2): 1}

A slot that a Program takes more than once in a run needs memory for one of the takes only, where
the Program's own signals, messages and collectives order all that any rank does to one take before
all that any does to the next. That is read off the graph of a run in which every take has a slot of
its own, so that no rank awaits a Free of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from interlace.ir.ops import Alloc
from interlace.ir.program import Program
from interlace.verify.build import GraphBuilder
from interlace.verify.graph import HappensBefore, RankPlace
from interlace.verify.regions import Regions
from interlace.verify.source import lower

Take = tuple[str, int]
"""A slot, and which of its takes in a run."""


def shared_places(programs: Sequence[Program]) -> dict[Take, int]:
    """The number of the memory that each take has. The Programs run together, and are sound."""
    regions, takes = Regions(), dict[str, Take]()
    sources = [
        lower(_apart(program, takes), regions, False, k) for k, program in enumerate(programs)
    ]
    graph = GraphBuilder(sources, regions).build()
    used: dict[tuple[Take, int], list[int]] = defaultdict(list)
    """Nodes that read or write a take, by the take and the rank whose memory it is."""
    for place in graph.places:
        for node, version, rank in _uses(place):
            buffer = place.source.versions[version].buffer
            used[takes[str(buffer.storage)], rank].append(node)
    ranks = sorted({rank for _, rank in used})
    places: dict[Take, int] = {}
    held: dict[str, list[list[Take]]] = defaultdict(list)
    """Takes in each memory, by slot. All of them count: a rank may not use the last."""
    for take in sorted(set(takes.values())):
        memories = held[take[0]]
        free = (
            place
            for place, others in enumerate(memories)
            if all(
                _ordered(graph, used[other, rank], used[take, rank])
                for other in others
                for rank in ranks
            )
        )
        place = places[take] = next(free, len(memories))
        if place == len(memories):
            memories.append([])
        memories[place].append(take)
    return places


def _apart(program: Program, takes: dict[str, Take]) -> Program:
    """The Program with a slot for each take."""
    count: dict[str, int] = defaultdict(int)
    ops = list(program.ops)
    for index, op in enumerate(ops):
        buffer = op.ordering().takes
        if buffer is not None and buffer.kind == "symmetric":
            slot = buffer.storage or buffer.name
            take = slot, count[slot]
            count[slot] += 1
            storage = f"{slot}#{take[1]}"
            takes[storage] = take
            ops[index] = Alloc(buffer=replace(buffer, storage=storage), stream=op.stream)
    return program.replace(ops=tuple(ops))


def _uses(place: RankPlace) -> Iterator[tuple[int, int, int]]:
    """Yields a rank's accesses to slots: the node, the version, and the rank whose memory it is."""
    source, where = place.source, place.where
    for item in source.items:
        for one in (item, *item.members):
            for touch in one.touches:
                version = source.versions[touch.version]
                if version.symmetric and one.does(touch, where):
                    rank = place.rank
                    if touch.peer is not None and touch.team is not None:
                        rank = where.peer(touch.team, touch.peer)
                    node = place.nodes[one.place if item.is_fused else item.place]
                    yield node, touch.version, rank


def _ordered(graph: HappensBefore, earlier: Sequence[int], later: Sequence[int]) -> bool:
    return all(graph.before(one, other) for one in earlier for other in later)
