"""How the rows of a gather travel, chunk by chunk: messages, one-sided copies or broadcasts.

Every transport hands each chunk, as soon as it is there, to `take(rank, matrix)`, the local one
first. A fused gather hands all chunks to one take, then to the next. In order they cannot deadlock:
what a rank waits for stands earlier in the list of its peer.

    Gather(emitter, strategy, shard, full, sizes, width, dtype).run(take)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from interlace.ir import DType, Get, Group, Index, Put, Recv, Send, View
from interlace.passes.strategies.emitter import Emitter
from interlace.passes.strategies.table import NEAR_FIRST, Path, Strategy

Take = Callable[[Index, View], None]


def _together(takes: Sequence[Take]) -> Take:
    """All of them for each chunk."""

    def take(index: Index, rows: View) -> None:
        for each in takes:
            each(index, rows)

    return take


@dataclass(frozen=True, slots=True)
class Gather:
    """A gather of one shard a rank: `shard` is a matrix of `sizes[rank]` rows of `width`."""

    emitter: Emitter
    row: Strategy
    shard: View
    full: View
    """The matrix of all shards, one after another. Peers put into a slot of their own instead."""
    sizes: tuple[int, ...]
    width: int
    dtype: DType
    whole: bool = True
    """Whether the full matrix is needed beyond the chunks,"""
    in_place: bool = False
    """and whether the shard is its part of the full matrix already."""
    slot: View | None = None
    """What `show` gave: the shard is in a slot that its peers can read."""

    def show(self) -> tuple[Gather, View]:
        """The same gather, from a shard that is yet to be computed into the view that this gives.

        Peers fetch it from there, whatever the strategy; that moves the fewest bytes.
        """
        slot = self._slot("shard")
        shard = self.emitter.head(slot, self.sizes, self.emitter.rank, max(self.sizes))
        return replace(self, slot=slot, shard=shard, in_place=False), shard

    def run(self, *takes: Take) -> None:
        """Emits the transfers."""

        take = _together(takes)
        if self.slot is not None:
            self._get(NEAR_FIRST, take)
            return
        if self.row.cut == "roots":
            self._roots(take)
            return
        path = self.row.gather
        assert path is not None
        match self.row.transport:
            case "messages":
                self._messages(path, take)
            case "get":
                self._get(path, take)
            case _:
                every = (*takes, self._keep) if self.whole else takes
                # a kernel that takes all chunks must not be held up by another matmul
                self._put(path, every if self.row.name == "fused" else (_together(every),))

    def part(self, index: Index) -> View:
        """A rank's part of the full matrix."""
        return self.emitter.part(self.full, index, self.sizes)

    def _keep(self, index: Index, rows: View) -> None:
        """Puts a chunk in its place in the full matrix, where it is not there yet."""
        if index != self.emitter.rank or not self.in_place:
            self.emitter.copy(rows, self.part(index))

    def _local(self, take: Take) -> None:
        take(self.emitter.rank, self.shard)
        if self.whole:
            self._keep(self.emitter.rank, self.shard)

    def _slot(self, name: str, *shape: int) -> View:
        name = f"{self.full.buffer}_{name}"
        return self.emitter.alloc(
            name, self.dtype, (*shape, max(self.sizes), self.width), "symmetric"
        )

    def _roots(self, take: Take) -> None:
        e, shown = self.emitter, None
        if len(set(self.sizes)) > 1:  # source and destination have one size on all ranks
            shown = e.alloc(f"{self.full.buffer}_shown", self.dtype, (sum(self.sizes), self.width))
            e.copy(self.shard, e.part(shown, e.rank, self.sizes))
        for root in (root for root, size in enumerate(self.sizes) if size):
            src = self.shard if shown is None else e.part(shown, root, self.sizes)
            e.collective("broadcast", src, self.part(root), root=root)
            take(root, self.part(root))

    def _messages(self, path: Path, take: Take) -> None:
        e = self.emitter
        self._local(take)
        for k in e.others:
            sent, chunk = path.sent.at(k), e.at(path.chunk.at(k))
            piece = self.part(e.at(sent)) if sent else self.shard
            send = Send(src=piece, peer=e.at(path.to.at(k)), **e.between)
            recv = Recv(dst=self.part(chunk), peer=e.at(path.source.at(k)), **e.between)
            e.emit(Group(ops=(send, recv)))
            take(chunk, self.part(chunk))

    def _get(self, path: Path, take: Take) -> None:
        """Each rank shows its shard; its peers fetch it in the order in which they need them."""
        e, largest = self.emitter, max(self.sizes)
        slot = self.slot or self._slot("shard")
        ready = e.names.new(f"{slot.buffer}_ready")
        e.copy(self.shard, e.head(slot, self.sizes, e.rank, largest))
        e.notify(ready, e.team.others)
        if self.slot is None:
            self._local(take)
        for k in e.others:
            chunk, source = e.at(path.chunk.at(k)), e.at(path.source.at(k))
            e.expect(ready, source)
            piece = e.head(slot, self.sizes, chunk, largest)
            e.emit(Get(src=piece, peer=source, team=e.team.name, dst=self.part(chunk)))
            take(chunk, self.part(chunk))
        if self.slot is not None:  # nothing waits for the rank's own rows
            self._local(take)
        e.free(slot)

    def _put(self, path: Path, takes: Sequence[Take]) -> None:
        """Each rank writes its shard into its peers' slots, in the order in which they need it."""
        e, largest = self.emitter, max(self.sizes)
        slots = self._slot("slots", e.size)

        def place(index: Index) -> View:
            row = slots.chunk(index, e.size).view(largest, self.width)
            return e.head(row, self.sizes, index, largest)

        arrived = e.names.new(f"{slots.buffer}_arrived")
        for k in e.others:
            to = e.at(path.to.at(k))
            e.emit(Put(src=self.shard, dst=place(e.rank), peer=to, team=e.team.name))
            e.notify(arrived, to)
        for take in takes:
            take(e.rank, self.shard)
            for k in e.others:
                chunk = e.at(path.chunk.at(k))
                e.expect(arrived, e.at(path.source.at(k)))
                take(chunk, place(chunk))
        e.free(slots)
