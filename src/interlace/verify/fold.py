"""A check of the ranks that stand for all others: it says that a set is sound, or says nothing.

    certified(sources, regions, turns)     # True: `check` on all ranks would find nothing

Where it finds anything at all, or cannot answer, all ranks are looked at, so that a verdict of
unsound and what is said of a fault never come from a fold.

Note [Edges from other ranks]
    A node stands for the same op on every rank that its rank stands for. What comes before it on
    another rank is the node of the rank that stands for that one, and the other rank: its clock
    there is the clock here with the chains renamed, as the map that carries the one rank to the
    other renames the ranks (turns.py). A clock has a place for each rank of `Turns.among`.

Note [A circle of nodes is a circle of ops]
    Follow a circle of nodes from an op: it leads to the same op on a rank that some map of finite
    order carries this one to. Follow it as often as that order, and it leads back to the op itself.
    So all nodes have an order exactly if all ops of all ranks have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

from interlace.ir.sizes import greatest
from interlace.verify.build import GraphBuilder
from interlace.verify.deadlock import launched_in_a_circle
from interlace.verify.graph import (
    Arrival,
    Clock,
    HappensBefore,
)
from interlace.verify.in_place import in_place
from interlace.verify.matching import mismatches
from interlace.verify.regions import ByteRegion, Regions
from interlace.verify.scales import takes_blocks
from interlace.verify.source import LoweredProgram
from interlace.verify.sweep import BufferLife, ByteAccess, Sweep
from interlace.verify.turns import Turns

if TYPE_CHECKING:
    from interlace.verify.explain import Explainer


class Unfit(Exception):
    """There is something to find: all ranks have to be looked at."""


@dataclass(slots=True, eq=False)
class Carried:
    """Renaming of chains by the map that carries a rank's representative to it."""

    to: Clock
    """The chain that each becomes."""
    back: Clock
    """The chain that becomes each."""
    rename: Callable[[Clock], Clock]
    """Positions of chains, under the new names."""


@dataclass(slots=True, eq=False)
class FoldedGraph(HappensBefore):
    """Nodes of ranks that stand for others: Note [Edges from other ranks]."""

    carried: Mapping[int, Carried] = field(default_factory=dict[int, Carried])
    """Renamings of chains, by rank."""
    copies: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Copy of a node on a rank that its own stands for, only to be compared; by node and rank."""
    originals: dict[int, tuple[int, Carried]] = field(
        default_factory=dict[int, tuple[int, Carried]]
    )
    """Original of each such copy, and the renaming of chains."""

    def awaited(self, node: int) -> list[int]:
        before = HappensBefore.awaited(self, node)
        if node in self.afar:
            return [*before, *(other for other, _ in self.afar[node])]
        return before

    def sequence(self) -> list[int]:
        """All nodes. Raises Unfit where something cannot finish."""
        order = HappensBefore.sequence(self)
        if len(order) < len(self.preds):
            raise Unfit("something waits in a circle")
        return order

    def arrivals(self, node: int) -> list[Arrival]:
        before = HappensBefore.arrivals(self, node)
        return before + [self.arrival(other, rank) for other, rank in self.afar.get(node, ())]

    def arrival(self, node: int, rank: int) -> Arrival:
        """A node, as it is on a rank that its own stands for."""
        clock, chain, position = self.clocks[node], self.chain[node], self.pos[node]
        assert clock is not None
        carried = self.carried[rank]
        return carried.rename(clock), carried.to[chain] if chain >= 0 else -1, position

    def copy(self, node: int, rank: int) -> int:
        if self.carried[rank].to[self.chain[node]] == self.chain[node]:
            return node
        made = self.copies.get((node, rank))
        if made is None:
            made = self.copies[node, rank] = self.add()
            carried = self.carried[rank]
            self.chain[made], self.pos[made] = carried.to[self.chain[node]], self.pos[node]
            self.originals[made] = node, carried
        return made

    def before(self, one: int, other: int) -> bool:
        at = self.chain[one]
        if self.chain[other] == at:
            return self.pos[one] < self.pos[self.begins.get(other, other)]
        if other in self.originals:
            other, carried = self.originals[other]
            at = carried.back[at]
        clock = self.clocks[self.begins.get(other, other)]
        assert clock is not None
        return clock[at] >= self.pos[one]


class _Carrier(dict[int, Carried]):
    """Makes the renaming for each rank when it is first asked for."""

    def __init__(self, turns: Turns, chains: Mapping[int, range]) -> None:
        self.turns, self.chains = turns, chains

    def __missing__(self, rank: int) -> Carried:
        to, back = (self.renamed(by) for by in (self.turns.carry(rank), self.turns.back(rank)))
        pick = itemgetter(*back) if len(back) > 1 else tuple[int, ...]
        made = self[rank] = Carried(to, back, pick)
        return made

    def renamed(self, by: Mapping[int, int]) -> Clock:
        """The chain that each chain becomes by a map of the ranks."""
        ranks = map(by.__getitem__, self.chains)
        return tuple(chain.from_iterable(map(self.chains.__getitem__, ranks)))


class FoldedBuilder(GraphBuilder):
    """Builds a FoldedGraph."""

    def __init__(self, sources: Sequence[LoweredProgram], regions: Regions, turns: Turns) -> None:
        super().__init__(sources, regions, turns)
        self.graph: FoldedGraph = FoldedGraph(self.graph.num_chains)
        self.graph.carried = _Carrier(turns, self.chains)


def certified(
    sources: Sequence[LoweredProgram],
    regions: Regions,
    turns: Turns,
) -> bool:
    """Returns True if a check of all ranks is proved to find nothing, not even for a remark."""
    if any(source.flaws for source in sources) or takes_blocks(sources):
        return False
    builder = FoldedBuilder(sources, regions, turns)
    try:
        builder.build()
        sweep = FoldedSweep(builder)
        if launched_in_a_circle(builder)[1]:
            return False
        among = [builder.everywhere[rank] for rank in turns.among]
        if in_place(among, regions, _refuse, turns.visited):
            return False
        if mismatches(builder, _refuse):
            return False
        sweep.run()
    except Unfit:
        return False
    return True


def _refuse() -> Explainer:
    """Ends the check at the first finding, before it is told."""
    raise Unfit("there is a finding")


class FoldedSweep(Sweep):
    """The walk over the memories of the ranks that stand for others; ends at the first fault.

    Note [Buffers that share a storage]
        They are compared by the hulls of their boxes, which do not turn with the rank; so here an
        access of one counts, for the others, as one of all its bytes.
    """

    def _hull(self, life: BufferLife, region: ByteRegion) -> tuple[int, int]:
        if life.content.memory.arena:
            return life.offset, life.offset + greatest(life.content.size)
        return super()._hull(life, region)

    def _fault(self, kind: str, first: ByteAccess | None, second: ByteAccess) -> None:
        raise Unfit(kind)
