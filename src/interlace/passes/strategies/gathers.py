"""Transfers of the chunks of a gather, or of an all-to-all before matmuls, to this rank.

Every transport hands each chunk to `take(rank, matrix)` as soon as it is there, the local one
first. A fused gather hands all chunks to one take, then to the next. In order they cannot deadlock:
what a rank waits for stands earlier in the list of its peer.

    Gather(emitter, strategy, shard, full, sizes, width, dtype).run(take)
    Dispatch(emitter, strategy, shard, full, sizes, width, dtype, shape=shape).run(take)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from interlace.ir import DType, Index, Slice, View
from interlace.ir.sizes import Int
from interlace.passes.strategies.emitter import Emitter, PathStep, Pieces, cut
from interlace.passes.strategies.pieces import TO_OTHERS, TO_THE_FIRST
from interlace.strategies import NEAR_FIRST, Path, Strategy


class TakeRows(Protocol):
    """Emits what is made of the rows of a rank, or only of those `within` them."""

    def __call__(self, index: Index, rows: View, within: Slice | None = None) -> None: ...


def _together(takes: Sequence[TakeRows]) -> TakeRows:
    """All of them for each chunk."""

    def take(index: Index, rows: View, within: Slice | None = None) -> None:
        for each in takes:
            each(index, rows, within)

    return take


def _joined(pieces: Pieces) -> Slice | None:
    """All rows of pieces that follow one another."""
    first, last = pieces[0], pieces[-1]
    return None if first is None or last is None else Slice(0, first.start, last.stop)


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather of one shard a rank: `shard` is a matrix of `sizes[rank]` rows of `width`."""

    emitter: Emitter
    row: Strategy
    shard: View
    full: View
    """The matrix of all shards, one after another. Peers put into a slot of its own, unless it
    `lies` in one."""
    sizes: tuple[Int, ...]
    width: Int
    dtype: DType
    whole: bool = True
    """True if the full matrix is needed beyond the chunks."""
    in_place: bool = False
    """True if the shard is its part of the full matrix already."""
    slot: View | None = None
    """Slot that `show` made: the shard lies in it, and peers can read it."""
    pieces: Pieces = (None,)
    """Ranges of a rank's rows that a kernel awaits one by one; None is all."""
    lies: bool = False
    """Put: True if the full matrix lies in a slot: Note [Where a gathered tensor lies] in
    whole.py."""

    def show(self) -> tuple[Gather, View]:
        """The same gather, from a shard that is yet to be computed into the view that this gives.

        Peers fetch it from there, whatever the strategy; that moves the fewest bytes.
        """
        slot, shard = self._shown()
        return replace(self, slot=slot, shard=shard, in_place=False), shard

    def run(self, *takes: TakeRows) -> None:
        """Emits the transfers."""
        take, path = _together(takes), self.path
        if self.slot is not None:
            self._get(NEAR_FIRST, take)
            return
        assert path is not None
        if self.row.transport == "messages":
            self._messages(path, take)
        elif self.row.transport == "get":
            self._get(path, take)
        else:
            kept = (self._keep,) if self.whole and not self.lies else ()
            # a kernel that takes all chunks must not be held up by another matmul
            if self.row.fuses:
                self._put(path, takes, kept)
            else:
                self._put(path, (), (_together((*takes, *kept)),))

    @property
    def path(self) -> Path | None:
        """The way that chunks go."""
        return self.row.gather

    @property
    def own(self) -> View:
        """The rank's own chunk."""
        return self.shard

    def part(self, index: Index) -> View:
        """A rank's part of the full matrix."""
        return self.emitter.part(self.full, index, self.sizes)

    def _leaving(self, step: PathStep) -> View:
        """The chunk that leaves at a step."""
        return self.shard if step.sent == self.emitter.rank else self.part(step.sent)

    def _place(self, slots: View, index: Index) -> View:
        """Where a rank's chunk lies in a slot for the chunks of all."""
        if self.lies:
            return self.part(index)
        row = slots.chunk(index, self.emitter.size).view(max(self.sizes), self.width)
        return self._head(row, index)

    def _slots(self) -> View:
        """A slot for the chunks of all."""
        return self._slot("slots", self.emitter.size, max(self.sizes), self.width)

    def _shown(self) -> tuple[View, View]:
        """A slot that peers fetch from, and where this rank's rows lie in it."""
        slot = self.slot or self._slot("shard", max(self.sizes), self.width)
        return slot, self._head(slot, self.emitter.rank)

    def _fetched(self, slot: View, step: PathStep) -> View:
        """Rows to fetch from a peer's slot at a step."""
        return self._head(slot, step.chunk)

    def _slot(self, name: str, *shape: Int) -> View:
        return self.emitter.alloc(f"{self.full.buffer}_{name}", self.dtype, shape, "symmetric")

    def _head(self, view: View, index: Index) -> View:
        return self.emitter.head(view, self.sizes, index, max(self.sizes))

    # transports

    def _keep(self, index: Index, rows: View, within: Slice | None = None) -> None:
        """Puts a chunk in its place in the full matrix, where it is not there yet."""
        if index != self.emitter.rank or not self.in_place:
            self.emitter.copy(rows, cut(self.part(index), within))

    def _local(self, take: TakeRows) -> None:
        take(self.emitter.rank, self.own)
        if self.whole:
            self._keep(self.emitter.rank, self.own)

    def _messages(self, path: Path, take: TakeRows) -> None:
        self._local(take)
        for step in self.emitter.steps(path):
            rows = self.part(step.chunk)
            self.emitter.exchange(self._leaving(step), step.to, rows, step.source)
            take(step.chunk, rows)

    def _get(self, path: Path, take: TakeRows) -> None:
        """Each rank shows its rows; its peers fetch them in the order in which they need them."""
        e = self.emitter
        slot, mine = self._shown()
        ready = e.names.new(f"{slot.buffer}_ready")
        e.own(self.shard, mine)
        e.notify(ready, e.team.others)
        if self.slot is None:
            self._local(take)
        for step in e.steps(path):
            rows = self.part(step.chunk)
            e.get(self._fetched(slot, step), step.source, rows, ready)
            take(step.chunk, rows)
        if self.slot is not None:  # nothing waits for the rank's own rows
            self._local(take)
        e.free(slot)

    def _put(self, path: Path, kernels: Sequence[TakeRows], others: Sequence[TakeRows]) -> None:
        """Each rank writes its rows into its peers' slots, in the order in which they need them;
        kernels take them in pieces: Note [Rows that come in time] in pieces.py."""
        e, steps = self.emitter, self.emitter.steps(path)
        slots = self.full if self.lies else self._slots()
        arrived, count = e.names.new(f"{slots.buffer}_arrived"), len(self.pieces)
        for step in steps:
            together = TO_THE_FIRST if step is steps[0] else TO_OTHERS
            came = 0
            for number in together if count > 1 else (1,):
                within = _joined(self.pieces[came : came + number])
                came += number
                to = cut(self._place(slots, e.rank), within)
                e.put(cut(self._leaving(step), within), to, step.to, arrived, came)
        if self.lies:
            self._keep(e.rank, self.own)
        for take in others:
            take(e.rank, self.own)
            for step in steps:
                e.expect(arrived, step.source, count)
                take(step.chunk, self._place(slots, step.chunk))
        for take in kernels:
            take(e.rank, self.own)
            for step in steps:
                for number, within in enumerate(self.pieces, start=1):
                    e.expect(arrived, step.source, number)
                    take(step.chunk, cut(self._place(slots, step.chunk), within), within)
        if not self.lies:
            e.free(slots)


@dataclass(frozen=True, slots=True)
class Dispatch(Gather):
    """An all-to-all before matmuls: `shard` and `full` hold even chunks, one for each rank.

    Tokens go to the ranks of their experts, each chunk to its owner directly. Nothing is summed, so
    all strategies give the same bits.
    """

    shape: tuple[Int, ...] = ()
    """The sizes of both tensors."""

    @property
    def path(self) -> Path | None:
        """The way that chunks go."""
        return NEAR_FIRST

    @property
    def own(self) -> View:
        """The rank's own chunk."""
        return self._chunk(self.shard, self.emitter.rank)

    def _chunk(self, view: View, index: Index) -> View:
        return view.chunk(index, self.emitter.size)

    def _leaving(self, step: PathStep) -> View:
        return self._chunk(self.shard, step.to)

    def _place(self, slots: View, index: Index) -> View:
        return self._chunk(slots, index)

    def _slots(self) -> View:
        return self._slot("slots", *self.shape)

    def _shown(self) -> tuple[View, View]:
        slot = self._slot("shown", *self.shape)
        return slot, slot

    def _fetched(self, slot: View, step: PathStep) -> View:
        return self._chunk(slot, self.emitter.rank)
