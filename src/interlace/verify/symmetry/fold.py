"""Checks a set by the ranks that stand for others; says that it is sound, or says nothing.

    fold = fold_of(sources, regions)         # None: nothing can be folded
    certified(fold, explainer)               # True: `check` on all ranks would find nothing

A fold certifies. Where it finds anything at all, or cannot answer, all ranks are looked at, so that
a verdict of unsound and what is said of a fault never come from a fold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.ir.sizes import greatest
from interlace.verify.accesses.memory import ByteAccess, Memory
from interlace.verify.accesses.regions import Regions
from interlace.verify.accesses.sweep import AccessFault, BufferLife, Sweep
from interlace.verify.accesses.unwritten import Unwritten
from interlace.verify.deadlock import launched_in_a_circle
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.graph import RankPlace
from interlace.verify.happens_before.source import Item, LoweredProgram, Touch, Version
from interlace.verify.in_place import in_place
from interlace.verify.matching import mismatches
from interlace.verify.scales import takes_blocks
from interlace.verify.symmetry.automorphisms import Turns
from interlace.verify.symmetry.order import FoldedBuilder, Unfit


def certified(sources: Sequence[LoweredProgram], regions: Regions, turns: Turns) -> bool:
    """Returns True if a check of all ranks is proved to find nothing, not even for a remark."""
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
        if mismatches(builder, explainer):
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
        super().__init__(builder.graph, builder.regions, builder.slot)
        self.builder, self.folded = builder, builder.graph
        self._storages: dict[tuple[RankPlace, str], _Storage] = {}
        self._tenants: dict[BufferLife, _Tenant] = {}

    def _memory(self, place: RankPlace, version: Version) -> Memory:
        return Memory()

    def _occupy(self, node: int, place: RankPlace, life: BufferLife) -> None:
        """Sees that what had the bytes before is done with them before this node."""
        tenant = self._tenants.get(life)
        if tenant is None:
            key = place, life.version.storage
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

    def _free(self, node: int, place: RankPlace, item: Item) -> None:
        life = self.life(place, item.version)
        if life.version.shared and life.content.size > 0:
            self._occupy(node, place, life)
        super()._free(node, place, item)

    def _fault(self, kind: str, first: ByteAccess | None, second: ByteAccess) -> None:
        self.faults[kind,] = [AccessFault(kind, first, second)]
        raise Unfit(kind)

    def _touch(self, node: int, place: RankPlace, item: Item, touch: Touch) -> None:
        life = self.life(place, touch.version)
        if touch.peer is None or touch.team is None or life.slot is None:
            if life.version.shared and item.does(touch, place.where):
                region = self.regions.at(touch.spot, place.where)
                if not region.empty:
                    self._occupy(node, place, life)
            super()._touch(node, place, item, touch)
            return
        builder, where = self.builder, place.where
        if life.alloc >= 0 or life.version.free >= 0:
            region = self.regions.at(touch.spot, where)
            if not region.empty:
                own = ByteAccess(
                    region.start, region.stop, region, life.content, node, place, item, touch.write
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
            self._compare(ByteAccess(lo, hi, region, content, at, place, item, write), 0)


@dataclass(slots=True, eq=False)
class _Tenant:
    """A buffer that shares its storage."""

    after: Sequence[int]
    """The last accesses of those that had its bytes before."""
    last: dict[int, int] = field(default_factory=dict[int, int])
    """Its own last access on each chain."""
    gone: bool = False
    """Another buffer has some of its bytes now."""


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
