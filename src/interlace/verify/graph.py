"""The happens-before graph of a run of all ranks, and a clock for every node of it.

A node is one point in time on one rank. Most ops are one node; what waits for other ranks (a
collective, a message, a group) is two, its begin and its end, and may touch its memory anywhere
between. Edges are what semantics.md says, and nothing else:

    stream order                 an op after the op before it on its stream
    Record -> Wait               the last Record listed before the Wait
    HostSync -> later ops        whatever their stream, because the host itself waited
    collective -> next one       of one (team, backend) on one rank, whatever their streams
    begin of a collective        on each member that contributes -> its end on each that needs it
    begin of a Send -> end of its Recv
    begin of a group -> its end  members lie between the two, and do not order each other
    fused -> parts -> its end    parts do not order each other, but are begun in order
    Notify -> Expect             the first Notify of the writer with a value that suffices
    Free -> Alloc                take n of a slot after every rank's Free of take n - 2

Note [Two extremes]
    A library may wait for more than it has to: all members of a broadcast, the Recv of a Send. What
    an op may have to wait for, but nobody can rely on, is in `blocks` and not in `preds`: deadlocks
    are sought with both, and order is what `preds` alone give.

Note [Meetings]
    The members of a collective meet in a node without a place: it comes after the begin of all who
    contribute, and before the end of all who need that. So a collective of n ranks has 2n edges,
    and the ends share one clock. The Frees of one take of a slot meet likewise, before the Allocs
    of the take after the next.

Note [Clocks]
    A chain is one stream of one rank. A node's clock has the position that each chain has surely
    reached when the node starts, so "a happens before b" is one comparison: clock(begin of b)[chain
    of a] >= position of a's end. Nodes that learn of no other chain share the clock of the one
    before them, as the members of a collective share that of its meeting.

Note [Edges from other ranks]
    A node stands for the same op on every rank that its rank stands for. What comes before it on
    another rank is the node of the rank that stands for that one, and the other rank: its clock
    there is the clock here with the chains renamed, as the map that carries the one rank to the
    other renames the ranks (turns.py).

Note [A circle of nodes is a circle of ops]
    Follow a circle of nodes from an op: it leads to the same op on a rank that some map of finite
    order carries this one to. Follow it as often as that order, and it leads back to the op itself.
    So all nodes have an order exactly if all ops of all ranks have one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from interlace.errors import ProgramError
from interlace.ir.types import Where
from interlace.verify.source import Item, LoweredProgram
from interlace.verify.turns import Turns

Part = tuple["RankPlace", Item]
MAX_WORDS = 200_000_000
"""Words of memory that one graph takes, at most: 1.6 GB, about as many as are counted here."""
PER_OP = 80
"""Words for an op of a rank."""


@dataclass(slots=True, eq=False)
class RankPlace:
    """One rank and its run: its LoweredProgram, what resolves its indices, its chains and nodes."""

    source: LoweredProgram
    rank: int
    where: Where
    chain: int = -1
    """The chain of its first stream; the others follow."""
    nodes: list[int] = field(default_factory=list[int])
    """The node at which each item is complete, by index; the return is the last."""
    takes: dict[int, int] = field(default_factory=dict[int, int])
    """Symmetric version -> which take of its slot this is."""


class IssuedOp(NamedTuple):
    """An op of one rank that orders ops of others: its begin and its end, often one node."""

    place: RankPlace
    item: Item
    begin: int
    end: int

    @property
    def source(self) -> LoweredProgram:
        """The Program that it is an op of."""
        return self.place.source


Clock = tuple[int, ...]
"""Position that each chain has reached."""
Arrival = tuple[Clock, int, int]
"""A node that another comes after: its clock, its chain and its position there."""


class Carried(NamedTuple):
    """Renaming of chains by the map that carries a rank's representative to it."""

    to: Clock
    """The chain that each becomes."""
    rename: Callable[[Clock], Clock]
    """Positions of chains, under the new names."""


class Carrier(dict[int, Carried]):
    """Makes the renaming for each rank when it is first asked for."""

    def __init__(self, turns: Turns, chains: Mapping[int, range]) -> None:
        self.turns, self.chains = turns, chains

    def __missing__(self, rank: int) -> Carried:
        to, back = (self.renamed(by) for by in (self.turns.carry(rank), self.turns.back(rank)))
        pick = itemgetter(*back) if len(back) > 1 else tuple[int, ...]
        made = self[rank] = Carried(to, pick)
        return made

    def renamed(self, by: Mapping[int, int]) -> Clock:
        """The chain that each chain becomes by a map of the ranks."""
        ranks = map(by.__getitem__, self.chains)
        return tuple(itertools.chain.from_iterable(map(self.chains.__getitem__, ranks)))


@dataclass(slots=True, eq=False)
class HappensBefore:
    """Nodes by number, each with its predecessors and the op that it is a point of."""

    num_chains: int
    preds: list[list[int]] = field(default_factory=list[list[int]])
    part: list[Part | None] = field(default_factory=list["Part | None"])
    """The op that the node is a point of; None for a meeting."""
    chain: list[int] = field(default_factory=list[int])
    """The node's chain; -1 for a meeting."""
    pos: list[int] = field(default_factory=list[int])
    afar: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    """Node -> what it comes after on ranks that others stand for: the node, and the rank."""
    carried: Mapping[int, Carried] = field(default_factory=dict[int, "Carried"])
    """Renamings of chains, by rank that another stands for."""
    copies: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Copy of a node on a rank that its own stands for, only to be compared; by node and rank."""
    begins: dict[int, int] = field(default_factory=dict[int, int])
    """End of an op -> its begin, where the two are apart."""
    blocks: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Node -> what it may have to wait for though it is not ordered by it: Note [Two extremes]."""
    never: dict[int, str] = field(default_factory=dict[int, str])
    """Node -> what it waits for that never comes."""
    places: list[RankPlace] = field(default_factory=list[RankPlace])
    clocks: list[Clock | None] = field(default_factory=list["Clock | None"])
    order: list[int] = field(default_factory=list[int])
    """The nodes that can finish, in an order in which they can."""
    words: int = 0
    """Words of memory that the graph takes, as far as they were counted."""

    def add(self) -> int:
        """A node without predecessors or place."""
        self.preds.append([])
        self.part.append(None)
        self.chain.append(-1)
        self.pos.append(0)
        return len(self.preds) - 1

    def awaited(self, node: int) -> list[int]:
        """All that must be done before a node can be."""
        before = self.preds[node]
        if node not in self.blocks and node not in self.afar:
            return before
        afar = (other for other, _ in self.afar.get(node, ()))
        return [*before, *self.blocks.get(node, ()), *afar]

    def solve(self) -> None:
        """Fills `order` and `clocks`; what cannot finish is left out of them."""
        self.order, self.clocks = self.sequence(), [None] * len(self.preds)
        start = (0,) * self.num_chains
        for node in self.order:
            before = self.preds[node]
            known = self.clocks[before[-1]] if before else start
            alone = len(before) == 1 and self.chain[before[-1]] == self.chain[node]
            shares = (not before or alone) and node not in self.afar
            self.clocks[node] = known if shares else self._joined(self.arrivals(node))

    def arrivals(self, node: int) -> list[Arrival]:
        """The nodes before a node."""
        here = [
            (clock, self.chain[other], self.pos[other])
            for other in self.preds[node]
            if (clock := self.clocks[other]) is not None
        ]
        return here + [self.arrival(other, rank) for other, rank in self.afar.get(node, ())]

    def arrival(self, node: int, rank: int) -> Arrival:
        """A node, as it is on a rank that its own stands for."""
        clock, chain, position = self.clocks[node], self.chain[node], self.pos[node]
        assert clock is not None
        carried = self.carried[rank]
        return carried.rename(clock), carried.to[chain] if chain >= 0 else -1, position

    def sequence(self) -> list[int]:
        """The nodes that can finish, in an order in which they can."""
        count = len(self.preds)
        followers: list[list[int]] = [[] for _ in range(count)]
        waiting = [0] * count
        for node in range(count):
            before = self.awaited(node)
            waiting[node] = len(before) + (node in self.never)
            for other in before:
                followers[other].append(node)
        order = [node for node in range(count) if not waiting[node]]
        for node in order:  # grows while it is walked
            for other in followers[node]:
                waiting[other] -= 1
                if not waiting[other]:
                    order.append(other)
        return order

    def _joined(self, arrivals: list[Arrival]) -> Clock:
        """The clock after several nodes: their clocks, and the nodes themselves."""
        clocks = list({id(clock): clock for clock, _, _ in arrivals}.values())
        reached = list(map(max, *clocks)) if len(clocks) > 1 else [*clocks[0]]
        for _, chain, position in arrivals:
            if chain >= 0 and position > reached[chain]:
                reached[chain] = position
        joined = tuple(reached)
        known = next((clock for clock in clocks if clock == joined), None)
        if known is None:
            self.take(len(joined))
        return known or joined

    def take(self, words: int) -> None:
        """Counts memory. Raises ProgramError where that is too much."""
        self.words += words
        if self.words > MAX_WORDS:
            raise ProgramError(
                f"the order of all ops on {self.num_chains:,} streams, those of all ranks, takes "
                f"more than {MAX_WORDS * 8:,} bytes: check the schedule on fewer ranks, or with "
                "fewer streams or ops"
            )

    def copy(self, node: int, rank: int) -> int:
        """A node for an op of this node's rank as it is on another, which its own stands for."""
        carried, chain = self.carried[rank], self.chain[node]
        if carried.to[chain] == chain:
            return node
        twin = self.copies.get((node, rank))
        if twin is None:
            clock = self.clocks[self.begins.get(node, node)]
            assert clock is not None
            twin = self.copies[node, rank] = self.add()
            self.chain[twin], self.pos[twin] = carried.to[chain], self.pos[node]
            self.clocks.append(carried.rename(clock))
        return twin

    def before(self, one: int, other: int) -> bool:
        """True if op `one` has ended before op `other` begins, in every run of the programs."""
        other = self.begins.get(other, other)
        at = self.chain[one]
        if self.chain[other] == at:
            return self.pos[one] < self.pos[other]
        clock = self.clocks[other]
        if clock is None:
            return False
        return clock[at] >= self.pos[one]
