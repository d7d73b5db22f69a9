"""A check of the ranks that stand for all others: it says that a set is sound, or says nothing.

    certified(sources, regions, turns)     # True: `check` on all ranks would find nothing

Where it finds anything at all, or cannot answer, all ranks are looked at, so that a verdict of
unsound and what is said of a fault never come from a fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from interlace.ir.sizes import greatest
from interlace.verify.build import GraphBuilder
from interlace.verify.deadlock import launched_in_a_circle
from interlace.verify.in_place import in_place
from interlace.verify.matching import mismatches
from interlace.verify.regions import ByteRegion, Regions
from interlace.verify.source import LoweredProgram, takes_blocks
from interlace.verify.sweep import BufferLife, ByteAccess, Sweep
from interlace.verify.turns import Turns

if TYPE_CHECKING:
    from interlace.verify.explain import Explainer


class Unfit(Exception):
    """There is something to find: all ranks have to be looked at."""


def certified(sources: Sequence[LoweredProgram], regions: Regions, turns: Turns) -> bool:
    """Returns True if a check of all ranks is proved to find nothing, not even for a remark."""
    if any(source.flaws for source in sources) or takes_blocks(sources):
        return False
    builder = GraphBuilder(sources, regions, turns)
    try:
        graph = builder.build()
        if len(graph.order) < len(graph.preds):
            return False  # something waits in a circle, or for what never comes
        sweep = FoldedSweep(builder)
        if launched_in_a_circle(builder)[1]:
            return False
        if in_place([*builder.everywhere.values()], regions, _refuse, turns.visited):
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
