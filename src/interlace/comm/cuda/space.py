"""What one Executor needs of a team's device side: words for its signals, and of its own.

    space = CudaSpace(side, "3/tp", ("ready",), span=2, uses=True, gets=(), time_out_s=60)
    space.theirs("ready", 1)       # the word that this rank raises on member 1
    space.own("ready", 1)          # the word that member 1 raises here
    space.begin()                  # a run: values count from `space.base` on

A value v of a signal is the number base + v; the base grows by the span of a run, which all ranks
have agreed on, so words go on from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interlace.comm.cuda.side import CudaSide
from interlace.comm.cuda.words import RELEASED
from interlace.comm.rendezvous.board import Note


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
        time_out_s: float,
        raises: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """`raises` has the last values of a run that this rank tells each member, by signal."""
        self.side = side
        self.num_words = len(signals) * side.size
        self._first = side.heap.take(self.num_words) if self.num_words else 0
        mine = {name: self._first + i * side.size for i, name in enumerate(signals)}
        last = {name: list(values) for name, values in (raises or {}).items()}
        note: Note = {"signals": mine, "span": span, "uses": uses, "gets": list(gets)}
        note["raises"] = last
        team = side.team
        place, rank = f"{team.topic}/device space/{topic}", team.ranks[side.me]
        try:
            self._notes = team.board.exchange(place, team.ranks, rank, note, time_out_s)
        except BaseException:
            if self.num_words:
                side.heap.give(self._first, self.num_words)  # no peer heard of them
            raise
        self.span = max(int(note["span"]) for note in self._notes)
        self.uses = any(note["uses"] for note in self._notes)
        """Whether any rank's Program reaches into peers' memory or is reached into."""
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
            side.heap.address(member, first + side.me)
            for member, first in found
            if first is not None
        ]

    def last(self, signal: str, member: int) -> int:
        """How far the member raises its word here in a run, as it told; 0: not at all."""
        values = self._notes[member]["raises"].get(signal)
        return int(values[self.side.me]) if values else 0

    def value(self, signal: str, member: int) -> int:
        """What the member's word here holds now."""
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
        """As if never run."""
        self.base = 0
        words = [(self._first, self.num_words)] if self.num_words else []
        for first, count in words + self._local:
            self.side.driver.fill(self.side.heap.address(self.side.me, first), 0, count)

    def close(self) -> None:
        """Gives the words back."""
        self.side.spaces.discard(self)
        if self.num_words:
            self.side.heap.give(self._first, self.num_words)
        for first, count in self._local:
            self.side.heap.give(first, count)
        self.num_words, self._local = 0, []
