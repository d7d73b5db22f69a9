"""Words: 32-bit counters in memory that all ranks of a team map, given out in runs of some.

    first = heap.take(4)                 # four words of this rank, zero
    heap.address(me, first + 2)          # what the own stream waits for
    heap.address(peer, theirs + 2)       # what a peer's word is called here

Values only grow, from run to run too, and are compared around: a word has reached a value when
their difference, as a signed 32-bit number, is not negative. So nothing is reset between runs.
"""

from __future__ import annotations

from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import PeerMemory
from interlace.errors import BackendError

HEAP_NBYTES = 2 << 20
RELEASED = 1 << 30
"""How far above its due a word is set to let go whoever waits for it."""


def reached(word: int, value: int) -> bool:
    """Whether a word has reached a value, as stream waits and kernels compare."""
    return (word - value) & 0xFFFFFFFF < 1 << 31


class WordHeap:
    """The words of one rank, where its peers can write them."""

    def __init__(self, driver: Driver, memory: PeerMemory) -> None:
        self.driver = driver
        self.memory = memory
        self._count = memory.nbytes // 4
        self._next = 0
        self._free: dict[int, list[int]] = {}

    def take(self, count: int) -> int:
        """The first of `count` words in a row, all zero."""
        count = -(-count // 8) * 8  # 32 bytes: words of two Executors share no sector
        spare = self._free.get(count)
        if spare:
            first = spare.pop()
            self.driver.fill(self.address(self.memory.me, first), 0, count)
            return first
        if self._next + count > self._count:
            raise BackendError(
                f"no signal words are left for {count} more: close Executors that are not needed"
            )
        first, self._next = self._next, self._next + count
        return first

    def give(self, first: int, count: int) -> None:
        """Gives words back."""
        self._free.setdefault(-(-count // 8) * 8, []).append(first)

    def address(self, member: int, word: int) -> int:
        """The address, here, of a word of a member."""
        return self.memory.bases[member] + 4 * word
