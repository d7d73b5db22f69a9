"""A check by the ranks that stand for all others: it says that a set is sound, or says nothing.

Where it finds anything at all, or cannot answer, all ranks are looked at, so that a verdict of
unsound and what is said of a fault never come from a fold.
"""

from __future__ import annotations

from typing import NoReturn

from interlace.ir.sizes import greatest
from interlace.verify.regions import ByteRegion
from interlace.verify.sweep import BufferLife, ByteAccess, Content, Sweep


class Unfit(Exception):
    """There is something to find: all ranks have to be looked at."""


def refuse() -> NoReturn:
    """Ends the check at the first finding, before it is told."""
    raise Unfit("there is a finding")


class FoldedSweep(Sweep):
    """The walk over the memories of the ranks that stand for others; ends at the first fault.

    Note [Buffers that share a storage]
        They are compared by the hulls of their boxes, which do not turn with the rank; so here an
        access of one counts, for the others, as one of all its bytes, and takes all of theirs.
    """

    def _hull(self, life: BufferLife, region: ByteRegion) -> tuple[int, int]:
        if life.content.memory.arena:
            return life.offset, life.offset + greatest(life.content.size)
        return super()._hull(life, region)

    def _lose(self, content: Content, lo: int, hi: int) -> None:
        content.lose(0, greatest(content.size))

    def _fault(self, kind: str, first: ByteAccess | None, second: ByteAccess) -> None:
        raise Unfit(kind)
