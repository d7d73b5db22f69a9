"""Checks a set by the ranks that stand for others; says that it is sound, or says nothing.

    fold = fold_of(sources, regions)         # None: nothing can be folded
    certified(fold, explainer)               # True: `check` on all ranks would find nothing

A fold certifies. Where it finds anything at all, or cannot answer, all ranks are looked at, so that
a verdict of unsound and what is said of a fault never come from a fold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from interlace.ir.ops import Collective, Recv, Send
from interlace.ir.order import Signal, Slot, TeamKey
from interlace.ir.sizes import greatest
from interlace.ir.types import TableEntry
from interlace.ir.view import Chunk
from interlace.verify.accesses.memory import ByteAccess, Memory
from interlace.verify.accesses.regions import Regions
from interlace.verify.accesses.sweep import AccessFault, BufferLife, Sweep
from interlace.verify.accesses.unwritten import Unwritten
from interlace.verify.deadlock import launched_in_a_circle
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.graph import Frame, IssuedOp
from interlace.verify.happens_before.source import Item, LoweredProgram, Touch, Version
from interlace.verify.in_place import in_place
from interlace.verify.matching import Matcher, facts_of, shared_names
from interlace.verify.scales import takes_blocks
from interlace.verify.symmetry.automorphisms import Turns
from interlace.verify.symmetry.order import FoldedBuilder, Unfit

PER_MEMBER = 16
"""Steps that comparing what one member of a collective says counts as."""


def certified(sources: Sequence[LoweredProgram], regions: Regions, turns: Turns) -> bool:
    """Whether a check of all ranks would find nothing, not even for a remark."""
    if any(source.flaws for source in sources) or takes_blocks(sources):
        return False
    builder = FoldedBuilder(sources, regions, turns)
    try:
        graph = builder.build()
        sweep = FoldedSweep(builder)
        explainer = Explainer(sources, Unwritten(sweep))
        if launched_in_a_circle(builder)[1]:
            return False
        among = [builder.everywhere[rank] for rank in turns.among]
        if in_place(among, regions, explainer, turns.visited):
            return False
        _Agreement(builder, explainer).run()
        if shared_names(builder, explainer):
            return False
        sweep.run()
    except Unfit:
        return False
    assert graph is sweep.graph
    return not sweep.faults


class FoldedSweep(Sweep):
    """The walk over the memories of the ranks that stand for others; ends at the first fault.

    What a peer does there is done by that rank from which the peer's own place leads here.

    Note [Buffers that share a storage]
        They are compared by the hulls of their boxes, which do not turn with the rank. So here
        every access of one has to come after all accesses of the one that had some of its bytes
        before, which then is touched no more. Then no two of them conflict, and nothing is read
        that another has overwritten. (The last access on each chain comes after the others there,
        and the first before them.)
    """

    def __init__(self, builder: FoldedBuilder) -> None:
        super().__init__(
            builder.graph, builder.regions, lambda frame, at: builder.slot(frame.place, at)
        )
        self.builder, self.folded = builder, builder.graph
        self._storages: dict[tuple[Frame, str], _Storage] = {}
        self._tenants: dict[BufferLife, _Tenant] = {}

    def _memory(self, frame: Frame, version: Version) -> Memory:
        return Memory()

    def _occupy(self, node: int, frame: Frame, life: BufferLife) -> None:
        """Sees that what had the bytes before is done with them before this node."""
        tenant = self._tenants.get(life)
        if tenant is None:
            key = frame, life.version.storage
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage(self._bounds(*key))
            tenant = self._tenants[life] = storage.let(life)
        chain = self.graph.chain[node]
        if tenant.gone:
            raise Unfit("a buffer is used after another has taken its bytes")
        if chain not in tenant.last and not all(
            self.graph.before(done, node) for done in tenant.after
        ):
            raise Unfit("buffers that share a storage, in no order")
        tenant.last[chain] = node

    def _free(self, node: int, frame: Frame, item: Item) -> None:
        life = self.life(frame, item.version)
        if life.version.shared and life.content.size > 0:
            self._occupy(node, frame, life)
        super()._free(node, frame, item)

    def _fault(self, kind: str, first: ByteAccess | None, second: ByteAccess) -> None:
        self.faults[kind,] = [AccessFault(kind, first, second)]
        raise Unfit(kind)

    def _touch(self, node: int, frame: Frame, item: Item, touch: Touch) -> None:
        life = self.life(frame, touch.version)
        if touch.peer is None or touch.team is None or life.slot is None:
            if life.version.shared and item.does(touch, frame.place.where):
                region = self.regions.at(touch.spot, frame.place.where)
                if not region.empty:
                    self._occupy(node, frame, life)
            super()._touch(node, frame, item, touch)
            return
        builder, place, where = self.builder, frame.place, frame.place.where
        if life.alloc >= 0 or life.version.free >= 0:
            region = self.regions.at(touch.spot, where)
            if not region.empty:
                own = ByteAccess(
                    region.start, region.stop, region, life.content, node, frame, item, touch.write
                )
                self._check_life(life, own)
        target = where.peer(touch.team, touch.peer)
        owner, rank = builder.first(target), builder.turns.back(target)[place.rank]
        there = builder.everywhere[rank].where
        region = self.regions.at(touch.spot, there)
        if not region.empty:
            slot = builder.meetings.slot(there, life.version.buffer)
            content = self._copy(slot, life.take, owner, life.version, life.content.size)
            at = self.folded.copy(node, rank)
            lo, hi, write = region.start, region.stop, touch.write
            self._compare(ByteAccess(lo, hi, region, content, at, frame, item, write), 0)


@dataclass(slots=True, eq=False)
class _Tenant:
    """A buffer that shares its storage."""

    after: Sequence[int]
    """The last accesses of those that had its bytes before."""
    last: dict[int, int] = field(default_factory=dict[int, int])
    """By chain: its own."""
    gone: bool = False
    """Whether another has some of its bytes now."""


class _Storage:
    """Who has each cell of a storage."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.last: list[_Tenant | None] = [None] * (len(bounds) - 1)

    def let(self, life: BufferLife) -> _Tenant:
        """Gives a buffer its bytes."""
        first = bisect_left(self.bounds, life.offset)
        end = bisect_left(self.bounds, life.offset + greatest(life.content.size))
        before = {one for cell in range(first, end) if (one := self.last[cell]) is not None}
        for one in before:
            one.gone = True
        tenant = _Tenant(sorted({node for one in before for node in one.last.values()}))
        self.last[first:end] = [tenant] * (end - first)
        return tenant


class _Agreement:
    """Whether ranks agree on what they meet in; raises Unfit where they do not."""

    def __init__(self, builder: FoldedBuilder, explainer: Explainer) -> None:
        self.builder, self.meetings = builder, builder.meetings
        self.matcher = Matcher(builder, explainer)

    def run(self) -> None:
        self.collectives()
        self.messages()
        self.slots()
        self.signals()
        self.registered()

    def collectives(self) -> None:
        """All members of each, those too between which order is not sought."""
        builder = self.builder
        known: set[tuple[object, ...]] = set()
        standing: dict[TeamKey, Counter[int]] = {}
        for queue, members in [*self.meetings.queues.items()]:
            place = builder.everywhere[next(iter(members))]
            ranks = place.where.member(queue[0].name).ranks
            if queue[0] not in standing:
                builder.regions.spend(len(ranks))
                standing[queue[0]] = Counter(map(builder.first, ranks))
            firsts = standing[queue[0]]
            mine = {first: builder.queue(queue, first) for first in firsts}
            for k in range(len(next(iter(members.values())))):
                key = (queue, *(_said(mine[first][k]) for first in firsts))
                if key in known:
                    continue
                known.add(key)
                met, counts = [mine[first][k] for first in firsts], [*firsts.values()]
                if not all(map(_sized_alike, met)):
                    builder.regions.spend(PER_MEMBER * len(ranks))
                    met = [builder.on(mine[builder.first(rank)][k], rank) for rank in ranks]
                    counts = [1] * len(met)
                if self.matcher.differs(met, counts) is not None:
                    raise Unfit("members of a collective that disagree")

    def messages(self) -> None:
        builder = self.builder
        for send, sender, recv, receiver in builder.matched():
            one, two = builder.on(send, sender), builder.on(recv, receiver)
            src, dst = self.matcher.box(one, "src"), self.matcher.box(two, "dst")
            assert src is not None
            assert dst is not None
            ops = send.item.op, recv.item.op
            assert isinstance(ops[0], Send)
            assert isinstance(ops[1], Recv)
            alike = src.numel == dst.numel and src.dtype == dst.dtype
            if not alike or ops[0].backend != ops[1].backend:
                raise Unfit("ends of a message that disagree")

    def slots(self) -> None:
        for slot, members in [*self.meetings.taken.items()]:
            standing = {self.builder.first(rank) for rank in slot[0].ranks}
            for k, taken in enumerate(next(iter(members.values()))):
                size = self.matcher.nbytes(taken)
                for rank in standing:
                    if self.matcher.nbytes(self.builder.takes(slot, rank)[k]) != size:
                        raise Unfit("takes of a slot that disagree")

    def signals(self) -> None:
        awaited = {signal for signal, *_ in self.meetings.awaited}
        for (signal, _), raised in self.meetings.raised.items():
            for (value, one), (higher, two) in pairwise(raised):
                if higher <= value or not self.builder.graph.before(one.end, two.end):
                    raise Unfit("a signal that does not grow")
            if self._of_reader(signal) not in awaited:
                raise Unfit("a signal that nobody awaits")

    def _of_reader(self, signal: Signal) -> Signal:
        """The signal as the rank that stands for its reader reads it."""
        name, team, writer, reader = signal
        first, turns = self.builder.first(reader), self.builder.turns
        return name, self.builder.key(first, team.name), turns.back(reader)[writer], first

    def registered(self) -> None:
        """Parameters that peers reach: alike on all ranks of a team."""
        has: dict[Slot, dict[int, tuple[str, str]]] = {}
        for frame in self.builder.graph.frames:
            for number, version in enumerate(frame.place.source.versions):
                if version.registered:
                    slot = self.builder.slot(frame.place, number)
                    facts = facts_of(frame, version, self.builder.regions)
                    has.setdefault(slot, {})[frame.place.rank] = facts
        for (team, name), by_rank in has.items():
            wanted = next(iter(by_rank.values()))
            for rank in team.ranks:
                first = self.builder.first(rank)
                other = has.get((self.builder.key(first, team.name), name), {}).get(first)
                if other != wanted:
                    raise Unfit("registered parameters that differ")


def _sized_alike(at: IssuedOp) -> bool:
    """Whether a collective says the same on all ranks that its own stands for: where a rank chooses
    which chunk its views are, and no table how large that is. (Its root is the same for all of
    them, or their team is not turned.)"""
    return not any(
        any(isinstance(value, TableEntry) for value in touch.spot.by_rank)
        or any(
            isinstance(step, Chunk) and isinstance(step.parts, str)
            for step in touch.spot.view.steps
        )
        for touch in at.item.touches
    )


def _said(at: IssuedOp) -> tuple[object, ...]:
    """What a collective says, the same for all that agree or disagree alike."""
    op = at.item.op
    assert isinstance(op, Collective)
    spots = tuple((touch.spot.key, touch.write) for touch in at.item.touches)
    return at.source.number, op.kind, op.reduce, op.root, op.splits, spots
