"""The happens-before graph of all ranks, over several runs, and a clock for every node of it.

A node is one point in time: an op, or a rendezvous of the ops of several ranks (a collective, a
send with its receive). Edges are what the model of a schedule says, and nothing else:

    stream order                 an op after the op before it on its stream
    Record -> Wait               the last Record listed before the Wait
    HostSync -> later ops        whatever their stream, because the host itself waited
    collective -> next one       of one (team, backend), by list order, whatever their stream
    group -> members -> its end  members do not order each other
    fused -> parts -> its end    parts do not order each other, but are begun in order
    Notify -> Expect             the first Notify of the writer with a value that suffices
    Free -> Alloc                take n of a slot after every rank's Free of take n - 2
    end of run -> next run       on the same rank; ranks are not joined

Note [Clocks]
    A chain is one stream of one rank. A node's clock says how far each chain has surely come when
    the node starts, so "a happens before b" is one comparison: clock(b)[chain of a] >= position of
    a. Nodes whose only predecessor is the one before them on the chain share its clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from interlace.ir.types import Where
from interlace.verify.source import Item, Source

Part = tuple["Frame", Item]
TeamKey = tuple[str, tuple[int, ...]]
"""A team: its name and the global ranks of this instance of it."""


@dataclass(slots=True, eq=False)
class Place:
    """One rank: its Source, what resolves its indices, and where its chains begin."""

    source: Source
    rank: int
    where: Where
    chain: int
    """The chain of its first stream; the others follow."""


@dataclass(slots=True, eq=False)
class Frame:
    """One run on one rank."""

    place: Place
    run: int
    nodes: list[int]
    """The node at which each item is complete, by index; the return is the last."""
    takes: dict[int, int] = field(default_factory=dict[int, int])
    """Symmetric version -> which take of its slot this is, counted over all runs."""


@dataclass(slots=True, eq=False)
class Graph:
    """Nodes by number, each with its predecessors and the parts (frame, item) it is made of."""

    num_chains: int = 0
    preds: list[list[int]] = field(default_factory=list[list[int]])
    parts: list[list[Part]] = field(default_factory=list[list[Part]])
    chain: list[int] = field(default_factory=list[int])
    """The node's chain (one of them, for a rendezvous); -1 for a rendezvous of group members."""
    pos: list[int] = field(default_factory=list[int])
    marks: dict[int, list[tuple[int, int]]] = field(
        default_factory=dict[int, list[tuple[int, int]]]
    )
    """Rendezvous -> its (chain, position) on every rank."""
    ends: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Group member -> the ends of the groups that it is in."""
    queued: dict[int, int] = field(default_factory=dict[int, int])
    """First member of a part of a Fused -> last member of the part before: it may come no sooner,
    though nothing orders what the two parts touch."""
    never: dict[int, str] = field(default_factory=dict[int, str])
    """Node -> what it waits for that never comes."""
    frames: list[Frame] = field(default_factory=list[Frame])
    clocks: list[tuple[int, ...] | None] = field(default_factory=list[tuple[int, ...] | None])
    order: list[int] = field(default_factory=list[int])
    """The nodes that can finish, in an order in which they can."""

    def add(self) -> int:
        """A node without parts, predecessors or place."""
        self.preds.append([])
        self.parts.append([])
        self.chain.append(-1)
        self.pos.append(0)
        return len(self.preds) - 1

    def awaited(self, node: int) -> list[int]:
        """All that must be done before a node can be."""
        before = self.preds[node]
        return [*before, self.queued[node]] if node in self.queued else before

    def solve(self) -> None:
        """Fills `order` and `clocks`; what cannot finish is left out of them."""
        preds, count = self.preds, len(self.preds)
        followers: list[list[int]] = [[] for _ in range(count)]
        waiting = [0] * count
        for node, before in enumerate(preds):
            waiting[node] = len(before)
            for other in before:
                followers[other].append(node)
        for node, other in self.queued.items():
            waiting[node] += 1
            followers[other].append(node)
        for node in self.never:
            waiting[node] += 1
        self.clocks = [None] * count
        order = [node for node in range(count) if not waiting[node]]
        for node in order:  # grows while it is walked
            self.clocks[node] = self._clock(node)
            for other in followers[node]:
                waiting[other] -= 1
                if not waiting[other]:
                    order.append(other)
        self.order = order

    def _clock(self, node: int) -> tuple[int, ...]:
        before, chain = self.preds[node], self.chain
        clocks, marks = self.clocks, self.marks
        own = marks.get(node)
        if len(before) == 1 and own is None and chain[before[0]] == chain[node] >= 0:
            shared = clocks[before[0]]
            assert shared is not None
            return shared
        bases = {clock for other in before if (clock := clocks[other]) is not None}
        if not bases:
            clock = [0] * self.num_chains
        elif len(bases) == 1:
            clock = list(bases.pop())
        else:
            clock = list(map(max, *bases))
        for other in before:
            if chain[other] >= 0 and other not in marks:
                at = chain[other]
                if self.pos[other] > clock[at]:
                    clock[at] = self.pos[other]
        for at, position in own or ():
            clock[at] = position
        return tuple(clock)

    def before(self, one: int, other: int) -> bool:
        """Whether `one` is complete before `other` starts, in every run of the programs."""
        at = self.chain[one]
        if at < 0:
            return any(end == other or self.before(end, other) for end in self.ends[one])
        if self.chain[other] == at:
            return self.pos[one] < self.pos[other]
        clock = self.clocks[other]
        return clock is not None and clock[at] >= self.pos[one]
