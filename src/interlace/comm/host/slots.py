"""The pool of symmetric slots of a team: where symmetric buffers live, across runs and Programs.

A slot has two copies on every rank, used in turn: take n uses copy n % 2 once every rank has
given back take n - 2. Counts go on from run to run and from Program to Program, so that a rank
may be a run ahead of its peers without a barrier, and slots of one name are shared by all Executors
whose buffers fit into them.

    pool.ensure("1", {"s0": 1 << 20}, timeout_s=60)    # all ranks, while they prepare
    slot = pool.slots["s0", 1 << 20]
    take, slot.takes = slot.takes, slot.takes + 1       # the number of a take
    slot.take(take, wait, where)                        # its copy: slot.copies[member][take % 2]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from interlace.comm.host.shared_memory import PAGE, Segment, align, share
from interlace.comm.host.signals import BoundedWait, tell
from interlace.comm.rendezvous.board import Board

Members = Callable[[list[int]], str]


class Slot:
    """Two copies of a block of memory on every rank, and the counts of what was given back."""

    def __init__(
        self, name: str, nbytes: int, segments: tuple[Segment, ...], me: int, at: int, cell: int
    ) -> None:
        self.name, self.nbytes, self.me = name, nbytes, me
        self.takes = 0
        """The number of the next take, which every rank counts alike; `take` waits for its copy."""
        self._cells = [[(segment.cells, cell + n) for segment in segments] for n in (0, 1)]
        """Cells in which each rank says how often it has given a copy back, by copy."""
        self.copies = [
            tuple(segment.bytes(at + copy * align(nbytes), nbytes) for copy in (0, 1))
            for segment in segments
        ]
        """`copies[member][copy]`: that rank's memory, as bytes."""

    def take(self, number: int, wait: BoundedWait, where: Members) -> None:
        """Returns when every rank has given back the take before the last, of the same copy."""
        missing = lambda late: f"slot {self.name} was not given back; {where(late)}"  # noqa: E731
        wait.for_marks(self._cells[number % 2], number // 2, missing)

    def free(self, number: int) -> None:
        tell([self._cells[number % 2][self.me]], number // 2 + 1)

    def reset(self) -> None:
        self.takes = 0
        for copy in (0, 1):
            cell, at = self._cells[copy][self.me]
            cell[at] = 0


class SlotPool:
    """The slots of a team, by name and size. What no rank holds goes with the next `ensure`."""

    def __init__(self, board: Board, topic: str = "") -> None:
        self._board = board
        self.topic = topic
        self.slots: dict[tuple[str, int], Slot] = {}
        self.holders: dict[tuple[str, int], int] = {}

    @property
    def nbytes(self) -> int:
        return sum(2 * align(slot.nbytes) for slot in self.slots.values())

    def ensure(self, topic: str, wanted: Mapping[str, int], timeout_s: float) -> dict[str, Slot]:
        """The slots of these names, large enough on every rank; all ranks call it, under a new
        topic."""
        idle = [list(key) for key in self.slots if not self.holders.get(key)]
        topic, told = f"{self.topic}/{topic}", {"slots": dict(wanted), "idle": idle}
        notes = self._board.exchange(f"{topic}/slots", told, timeout_s)
        sizes: dict[str, int] = {}
        for name, nbytes in (item for note in notes for item in note["slots"].items()):
            sizes[name] = max(sizes.get(name, 0), nbytes)
        idle_here = [{(name, size) for name, size in note["idle"]} for note in notes]
        unused = set.intersection(*idle_here)
        for name, nbytes in sizes.items():
            if (name, nbytes) not in self.slots:  # one that is held, if it is large enough
                held = [n for other, n in self.slots.keys() - unused if other == name]
                sizes[name] = min((n for n in held if n >= nbytes), default=nbytes)
        gone = sorted(unused - set(sizes.items()))
        if gone:
            self._drop(topic, gone, timeout_s)
        missing = sorted(key for key in sizes.items() if key not in self.slots)
        if missing:
            self._add(topic, missing, timeout_s)
        for name in wanted:
            key = name, sizes[name]
            self.holders[key] = self.holders.get(key, 0) + 1
        return {name: self.slots[name, sizes[name]] for name in wanted}

    def let_go(self, slot: Slot) -> None:
        key = slot.name, slot.nbytes
        if self.holders.get(key):
            self.holders[key] -= 1

    def _drop(self, topic: str, keys: list[tuple[str, int]], timeout_s: float) -> None:
        """Forgets slots that nobody holds; all ranks do it together."""
        for key in keys:
            del self.slots[key]
            self.holders.pop(key, None)

    def _add(self, topic: str, keys: list[tuple[str, int]], timeout_s: float) -> None:
        at = align(16 * len(keys), PAGE)
        total = at + sum(2 * align(nbytes) for _, nbytes in keys)
        shared = share(self._board, topic, total, {}, timeout_s)
        for index, (name, nbytes) in enumerate(keys):
            facts = name, nbytes, shared.segments, shared.me, at, 2 * index
            self.slots[name, nbytes] = Slot(*facts)
            at += 2 * align(nbytes)

    def reset(self) -> None:
        for slot in self.slots.values():
            slot.reset()
