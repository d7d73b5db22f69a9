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
    A chain is one stream of one rank. A node's clock says how far each chain has surely come when
    the node starts, so "a happens before b" is one comparison: clock(begin of b)[chain of a] >=
    position of a's end. Nodes whose only predecessor is the one before them on the chain share its
    clock. A clock is a tuple for all chains, which many nodes have in common, and what came since:
    so what ranks do by themselves costs the same however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from interlace.errors import ProgramError
from interlace.ir.types import Where
from interlace.verify.source import Item, LoweredProgram

Part = tuple["RankPlace", Item]
MAX_WORDS = 200_000_000
"""Words of memory that one graph takes, at most: 1.6 GB, about as many as are counted here."""
PER_OP, PER_SINCE = 80, 8
"""Words for an op of a rank, and for each chain that a clock holds apart from its base."""
MAX_SINCE = 128
"""Chains that a clock holds apart from its base, at most."""


@dataclass(slots=True, eq=False)
class RankPlace:
    """One rank and its run: its LoweredProgram, what resolves its indices, its chains and nodes."""

    source: LoweredProgram
    rank: int
    where: Where
    chain: int
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


class Clock(NamedTuple):
    """Position that each chain has reached: that in `since` if present, else that in `base`."""

    base: tuple[int, ...]
    """Many clocks have one and the same."""
    since: dict[int, int]


Arrival = tuple[Clock, int, int]
"""A node that another comes after: its clock, its chain and its position there."""


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
    begins: dict[int, int] = field(default_factory=dict[int, int])
    """End of an op -> its begin, where the two are apart."""
    blocks: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Node -> what it may have to wait for though it is not ordered by it: Note [Two extremes]."""
    after_meeting: set[int] = field(default_factory=set[int])
    """Ends of collectives that come after nothing but a meeting which their begin is part of."""
    never: dict[int, str] = field(default_factory=dict[int, str])
    """Node -> what it waits for that never comes."""
    places: list[RankPlace] = field(default_factory=list[RankPlace])
    clocks: list[Clock | None] = field(default_factory=list["Clock | None"])
    made_from: dict[int, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict[int, tuple[tuple[int, ...], ...]]
    )
    """Bases that a base is nowhere behind, by its id (the clocks keep it alive)."""
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
        return [*before, *self.blocks[node]] if node in self.blocks else before

    def solve(self) -> None:
        """Fills `order` and `clocks`; what cannot finish is left out of them."""
        self.order, self.clocks = self.sequence(), [None] * len(self.preds)
        start = Clock((0,) * self.num_chains, {})
        for node in self.order:
            before = self.preds[node]
            known = self.clocks[before[-1]] if before else start
            alone = len(before) == 1 and self.chain[before[-1]] == self.chain[node]
            shares = (not before or alone) and node not in self.afar
            shares = shares or node in self.after_meeting
            self.clocks[node] = known if shares else self._joined(self.arrivals(node))

    def arrivals(self, node: int) -> list[Arrival]:
        """The nodes before a node."""
        return [
            (clock, self.chain[other], self.pos[other])
            for other in self.preds[node]
            if (clock := self.clocks[other]) is not None
        ]

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
        clocks = {id(clock): clock for clock, _, _ in arrivals}
        bases = {id(clock.base): clock.base for clock in clocks.values()}
        base = self._joined_base(list(bases.values()))
        since: dict[int, int] = {}
        for _, chain, position in arrivals:
            if chain >= 0 and position > base[chain] and position > since.get(chain, 0):
                since[chain] = position
        for clock in clocks.values():
            for chain, position in clock.since.items():
                if position > base[chain] and position > since.get(chain, 0):
                    since[chain] = position
        if not since or len(since) <= MAX_SINCE < self.num_chains:
            self.take(PER_SINCE * (1 + len(since)))
            return Clock(base, since)
        full = list(base)
        for chain, position in since.items():
            full[chain] = position
        return Clock(self._new_base(full, base), {})

    def _joined_base(self, bases: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The furthest of several bases for each chain: one of them, where that is known."""
        tops = [bases.pop()]
        for other in bases:
            if self._includes(other, tops[-1]):
                tops[-1] = other
            elif not self._includes(tops[-1], other):
                tops.append(other)
        if len(tops) > 2:
            return self._new_base(map(max, *tops), *tops)
        one, other = tops[0], tops[-1]
        if one is other:
            return one
        return self._new_base([a if a > b else b for a, b in zip(one, other, strict=True)], *tops)

    def _new_base(self, positions: Iterable[int], *earlier: tuple[int, ...]) -> tuple[int, ...]:
        base = tuple(positions)
        self.words += len(base)  # `take` looks at it for the next clock
        if self.num_chains > MAX_SINCE:
            self.made_from[id(base)] = earlier
        return base

    def take(self, words: int) -> None:
        """Counts memory. Raises ProgramError where that is too much."""
        self.words += words
        if self.words > MAX_WORDS:
            raise ProgramError(
                f"the order of all ops on {self.num_chains:,} streams, those of all ranks, takes "
                f"more than {MAX_WORDS * 8:,} bytes: check the schedule on fewer ranks, or with "
                "fewer streams or ops"
            )

    def _includes(self, base: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """True if a base is known to be nowhere behind another: made from it, or once removed."""
        for one in self.made_from.get(id(base), ()):
            if one is other or any(two is other for two in self.made_from.get(id(one), ())):
                return True
        return False

    def before(self, one: int, other: int) -> bool:
        """True if op `one` has ended before op `other` begins, in every run of the programs."""
        other = self.begins.get(other, other)
        at = self.chain[one]
        if self.chain[other] == at:
            return self.pos[one] < self.pos[other]
        clock = self.clocks[other]
        if clock is None:
            return False
        return clock.since.get(at, clock.base[at]) >= self.pos[one]
