"""Words: 32-bit counters that all ranks of a team map, and what waits for them.

    space = CudaSpace(side, "3/tp", ("ready",), span=2, uses=True, gets=(), timeout_s=60)
    space.theirs("ready", [1])           # the words that this rank raises on member 1
    space.begin()                        # a run: values count from `space.base` on
    access = WordAccess(driver)
    access.fill(address, value=1 << 30, count=8)    # DriverHeldUpError if it takes too long
    access.rest(timeout_s=10)           # after it no abandoned call can write any more

Values only grow, from run to run too: a word has reached a value when their difference, as a signed
32-bit number, is not negative. So nothing is reset between runs. A value v of a signal is the
number base + v; the base grows by the span of a run, on which all ranks have agreed.

Note [Held up]
    A stream that waits for a word in device memory is released by a write of that word, a call of
    the driver on a stream of ours. Such a call may not return while other streams wait:

    - a thread of the caller's that waits in the driver may hold a lock that other calls need: it
      launches into a full queue, copies memory that is not pinned, or frees device memory;
    - streams are more than the hardware has queues (CUDA_DEVICE_MAX_CONNECTIONS=1: one for all):
      what stands behind a stream that waits, waits too.

    Whether events are done can always be asked, so the watchdog still finds the stall. A call here
    runs in a thread of its own, for a bounded time. If the driver is still held up some seconds
    after a run has failed, the watchdog ends the process with a report, as NCCL's does: peers have
    the error by then, and torchrun sees the exit code. An abandoned call may still write later;
    `rest` waits for that, and after it words count anew.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlace.comm.cuda.driver import Driver, relax_captures
from interlace.comm.cuda.memory import PeerMemory
from interlace.comm.rendezvous.board import Note
from interlace.comm.rendezvous.patience import Errand
from interlace.errors import BackendError, CommTimeoutError

if TYPE_CHECKING:
    from interlace.comm.cuda.side import CudaSide

HEAP_NBYTES = 2 << 20
RELEASED = 1 << 30
"""Amount above its due by which a word is set to release every wait for it."""


def reached(word: int, value: int) -> bool:
    """True if a word has reached a value, as stream waits and kernels compare."""
    return (word - value) & 0xFFFFFFFF < 1 << 31


class WordHeap:
    """The words of one rank, where its peers can write them."""

    def __init__(self, driver: Driver, memory: PeerMemory) -> None:
        self.driver, self.memory = driver, memory
        self._next, self._count = 0, memory.nbytes // 4
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
        self._free.setdefault(-(-count // 8) * 8, []).append(first)

    def address(self, member: int, word: int) -> int:
        """The address, here, of a word of a member."""
        return self.memory.bases[member] + 4 * word


class CudaSpace:
    """The words of one Executor on one team."""

    def __init__(
        self,
        side: CudaSide,
        topic: str,
        signals: Sequence[str],
        span: int,
        uses: bool,
        gets: Sequence[str],
        timeout_s: float,
        raises: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`raises` has the last values of a run that this rank tells each member, by signal."""
        self.side = side
        self.num_words = len(signals) * side.size
        self._first = side.heap.take(self.num_words) if self.num_words else 0
        mine = {name: self._first + i * side.size for i, name in enumerate(signals)}
        last = {name: list(values) for name, values in (raises or {}).items()}
        note: Note = {"signals": mine, "span": span, "uses": uses, "gets": list(gets)}
        place = f"{side.team.topic}/device space/{topic}"
        try:
            told = {**note, "raises": last}
            self._notes = side.team.board.exchange(place, told, timeout_s)
        except BaseException:
            if self.num_words:
                side.heap.give(self._first, self.num_words)  # no peer heard of them
            raise
        self.span = max(int(note["span"]) for note in self._notes)
        self.uses = any(note["uses"] for note in self._notes)
        """True if any rank's Program reaches into peers' memory or is reached into."""
        self.gotten = frozenset(slot for note in self._notes for slot in note["gets"])
        """The slots that any rank reads from its peers' memory."""
        self.base = 0
        self._local: list[tuple[int, int]] = []
        side.spaces.add(self)

    def begin(self) -> int:
        """The next run: what its signals' values count from."""
        self.base = (self.base + self.span) & 0xFFFFFFFF
        return self.base

    def own(self, signal: str, member: int) -> int:
        """The address of this rank's word that the member raises; members' words are in a row."""
        side = self.side
        return side.heap.address(side.me, self._notes[side.me]["signals"][signal] + member)

    def theirs(self, signal: str, members: Sequence[int]) -> list[int]:
        """The words that this rank raises on these members; one that never looks has none."""
        side = self.side
        found = [(member, self._notes[member]["signals"].get(signal)) for member in members]
        return [
            side.heap.address(member, first + side.team.seen_by(member))
            for member, first in found
            if first is not None
        ]

    def last(self, signal: str, member: int) -> int:
        """Value to which the member raises its word here in a run, as it told; 0: not at all."""
        values = self._notes[member]["raises"].get(signal)
        return int(values[self.side.team.seen_by(member)]) if values else 0

    def value(self, signal: str, member: int) -> int:
        side = self.side
        return side.access.read(self.own(signal, member), 1)[0]

    def local(self, count: int) -> int:
        """The address of words of this rank's own, zero, for its kernels and streams."""
        first = self.side.heap.take(count)
        self._local.append((first, count))
        return self.side.heap.address(self.side.me, first)

    def release(self) -> None:
        """Sets every word of this rank high enough for whoever waits for it."""
        if self.num_words:
            side, value = self.side, self.base + self.span + RELEASED
            address = side.heap.address(side.me, self._first)
            side.access.fill(address, value, self.num_words)

    def reset(self) -> None:
        self.base = 0
        words = [(self._first, self.num_words)] if self.num_words else []
        for first, count in words + self._local:
            self.side.driver.fill(self.side.heap.address(self.side.me, first), 0, count)

    def close(self) -> None:
        self.side.spaces.discard(self)
        if self.num_words:
            self.side.heap.give(self._first, self.num_words)
        for first, count in self._local:
            self.side.heap.give(first, count)
        self.num_words, self._local = 0, []


PATIENCE_S = 0.5


class DriverHeldUpError(BackendError):
    """The CUDA driver did not return from a call in time."""


class WordAccess:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._abandoned: list[Errand] = []

    def read(self, address: int, count: int) -> list[int]:
        """32-bit words of this rank's part of the memory, as they are now."""
        return self._call(lambda: self._driver.read(address, count))

    def fill(self, address: int, value: int, count: int) -> None:
        """Sets 32-bit words of this rank's part, and returns when they are set."""
        self._call(lambda: self._driver.fill(address, value & 0xFFFFFFFF, count))

    def rest(self, timeout_s: float) -> None:
        """Returns when no abandoned call is under way any more."""
        deadline = time.monotonic() + timeout_s
        calls = list(self._abandoned)
        if not all([call.is_back(max(0.0, deadline - time.monotonic())) for call in calls]):
            raise CommTimeoutError(
                f"a call of the CUDA driver has not returned after {timeout_s:g} s, and may write "
                "signal words at any time: end this process"
            )
        if calls:
            driver = self._driver
            driver.finish(driver.private_stream(), max(1.0, deadline - time.monotonic()))
        for call in calls:
            with contextlib.suppress(ValueError):  # another thread rests too
                self._abandoned.remove(call)

    def _call(self, action: Callable[[], Any]) -> Any:
        """Returns the driver's result; raises `DriverHeldUpError` if it is not there in time."""
        if not all(call.is_back(0) for call in self._abandoned):
            raise DriverHeldUpError("the CUDA driver is held up: an earlier call has not returned")

        def act() -> Any:
            relax_captures()
            return action()

        try:
            call = Errand(act)
        except RuntimeError as error:
            if sys.is_finalizing():
                return act()
            raise DriverHeldUpError(f"no thread can be started: {error}") from error
        if call.is_back(PATIENCE_S):
            return call.result()
        self._abandoned.append(call)
        raise DriverHeldUpError(
            f"the CUDA driver is held up: a call has not returned in {PATIENCE_S:g} s"
        )


@dataclass(frozen=True, slots=True)
class Area:
    """One area on every rank; exchanges of a team use it one after another."""

    memory: PeerMemory
    stage_nbytes: int
    flag_nbytes: int
    words_nbytes: int
    stop_at: int
    """Where among the words a 1 ends a call that waits."""

    @property
    def stages(self) -> list[int]:
        return list(self.memory.bases)

    @property
    def flags(self) -> list[int]:
        return [base + self.stage_nbytes for base in self.memory.bases]

    @property
    def words(self) -> int:
        return self.memory.bases[self.memory.me] + self.stage_nbytes + self.flag_nbytes

    def stop(self, access: WordAccess) -> None:
        """Ends the call under way, with results that nobody may use."""
        access.fill(self.words + self.stop_at, 1, 1)

    def reset(self) -> None:
        count = (self.flag_nbytes + self.words_nbytes) // 4
        self.memory.driver.fill(self.words - self.flag_nbytes, 0, count)


def area_nbytes(stage_nbytes: int) -> int:
    """The staging memory that is made for exchanges of so many bytes: a power of two."""
    return max(8 << 20, 1 << (stage_nbytes - 1).bit_length())
