"""How the partial results of a scatter travel and are summed, chunk by chunk.

`compute(rank, matrix, within)` emits the rows of that rank (or some of them) into a matrix; each
transport has it compute the others' rows first, its own last (`beside`: and in between), and leaves
the sum of all ranks' parts of its rows in `out`. The order in which they are summed is the
strategy's (`table.py`).

    Scatter(emitter, strategy, stage, out, sizes, width, dtype).run(compute)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from interlace.ir import Call, DType, Get, Group, Index, Put, Recv, Send, Slice, View
from interlace.passes.strategies.emitter import Emitter
from interlace.passes.strategies.table import Path, Strategy


class ComputeRows(Protocol):
    """Emits the rows of a rank, or only those `within` them, into a matrix."""

    def __call__(self, index: Index, shard: View, within: Slice | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Scatter:
    """A reduction of which each rank keeps `sizes[rank]` rows of `width`, in `out`."""

    emitter: Emitter
    row: Strategy
    name: str
    stage: View | None
    """A matrix of all ranks' rows that chunks may be computed into; None: make one."""
    out: View
    sizes: tuple[int, ...]
    width: int
    dtype: DType
    parts: int = 1
    """Put: pieces that each rank's rows are computed, travel and are summed in, to leave soon."""
    beside: bool = False
    """Put: whether the own rows are computed in these pieces too, so that all but the last can be
    summed while others are computed: between those of the last other rank, half of them behind."""

    def run(self, compute: ComputeRows) -> None:
        """Emits the chunks' computation, their transfers and the sum."""
        path = self.row.scatter
        if path is None:
            self._roots(compute)
        elif self.row.accumulates:
            self._accumulate(path, compute)
        elif self.row.transport == "messages":
            self._messages(path, compute)
        elif self.row.transport == "get":
            self._get(path, compute)
        else:
            self._put(path, compute)

    def _alloc(self, name: str, *shape: int, kind: str = "local") -> View:
        shape = (*shape, self.width)
        return self.emitter.alloc(f"{self.name}_{name}", self.dtype, shape, kind)

    def _staged(self) -> Callable[[Index], View]:
        """Where the rows of each rank are computed."""
        stage = self.stage or self._alloc("parts", sum(self.sizes))
        return lambda index: self.emitter.part(stage, index, self.sizes)

    def _pieces(self) -> list[Slice | None]:
        """Which rows of a rank are computed, put and summed together; None is all."""
        if self.parts == 1:
            return [None]
        rows = self.sizes[0]  # all are equal
        bounds = [rows * i // self.parts for i in range(self.parts + 1)]
        return [Slice(0, start, stop) for start, stop in pairwise(bounds)]

    def _rows(self, matrices: View, index: Index, owner: Index) -> View:
        """Matrix `index` of several, as far as `owner` has rows."""
        e, largest = self.emitter, max(self.sizes)
        row = matrices.chunk(index, e.size).view(largest, self.width)
        return e.head(row, self.sizes, owner, largest)

    def _sum(self, slots: View, within: Slice | None = None) -> None:
        e, largest, out = self.emitter, max(self.sizes), self.out
        mine = e.head(slots, self.sizes, e.rank, largest, dim=1)
        if within is not None:
            mine, out = mine.then(dataclasses.replace(within, dim=1)), out.then(within)
        e.sum_slots(mine, out)

    def _roots(self, compute: ComputeRows) -> None:
        """One reduction a rank, in the order of the ranks."""
        e, staged = self.emitter, self._staged()
        even = len(set(self.sizes)) == 1
        reduced = None if even else self._alloc("sums", sum(self.sizes))
        for root in (root for root, size in enumerate(self.sizes) if size):
            compute(root, staged(root))
            dst = self.out if reduced is None else e.part(reduced, root, self.sizes)
            e.collective("reduce", staged(root), dst, root=root, reduce=e.serial.reduce)
        if reduced is not None:
            e.copy(e.part(reduced, e.rank, self.sizes), self.out)

    def _messages(self, path: Path, compute: ComputeRows) -> None:
        e, staged = self.emitter, self._staged()
        slots = self._alloc("slots", e.size, max(self.sizes))
        for k in e.others:
            chunk, source = e.at(path.chunk.at(k)), e.at(path.source.at(k))
            compute(chunk, staged(chunk))
            send = Send(src=staged(chunk), peer=e.at(path.to.at(k)), **e.between)
            recv = Recv(dst=self._rows(slots, source, e.rank), peer=source, **e.between)
            e.emit(Group(ops=(send, recv)))
        compute(e.rank, self._rows(slots, e.rank, e.rank))
        self._sum(slots)

    def _accumulate(self, path: Path, compute: ComputeRows) -> None:
        """What came from one neighbour, plus my part, goes to the other."""
        e, staged, largest = self.emitter, self._staged(), max(self.sizes)
        count = min(2, e.size - 1)
        buffers = [self._alloc(f"received_{i}", largest) for i in range(count)]
        received: View | None = None

        def add(mine: View, out: View) -> None:
            assert received is not None
            e.emit(Call(fn="aten.add.out", args=(received, mine), outs=(out,)))

        for k in e.others:
            chunk, source = e.at(path.chunk.at(k)), e.at(path.source.at(k))
            compute(chunk, staged(chunk))
            if received is not None:
                add(staged(chunk), staged(chunk))
            following = e.at(path.chunk.at(k + 1))
            send = Send(src=staged(chunk), peer=e.at(path.to.at(k)), **e.between)
            received = e.head(buffers[k % count], self.sizes, following, largest)
            e.emit(Group(ops=(send, Recv(dst=received, peer=source, **e.between))))
        compute(e.rank, staged(e.rank))
        add(staged(e.rank), self.out)

    def _get(self, path: Path, compute: ComputeRows) -> None:
        """Parts are computed into a slot that their owner fetches them from."""
        e, largest = self.emitter, max(self.sizes)
        parts = self._alloc("parts", e.size, largest, kind="symmetric")
        slots = self._alloc("slots", e.size, largest)
        ready = e.names.new(f"{parts.buffer}_ready")
        for k in e.others:
            chunk, source = e.at(path.chunk.at(k)), e.at(path.source.at(k))
            compute(chunk, self._rows(parts, chunk, chunk))
            e.notify(ready, e.at(path.to.at(k)))
            e.expect(ready, source)
            mine = self._rows(parts, e.rank, e.rank)
            into = self._rows(slots, source, e.rank)
            e.emit(Get(src=mine, peer=source, team=e.team.name, dst=into))
        compute(e.rank, self._rows(slots, e.rank, e.rank))
        self._sum(slots)
        e.free(parts)

    def _put(self, path: Path, compute: ComputeRows) -> None:
        """Parts are written into their owner's slot for this rank."""
        e, staged = self.emitter, self._staged()
        slots = self._alloc("slots", e.size, max(self.sizes), kind="symmetric")
        arrived = e.names.new(f"{slots.buffer}_arrived")
        pieces = self._pieces()
        mine = self._rows(slots, e.rank, e.rank)
        own = [(e.rank, _cut(mine, within), within) for within in pieces]
        if not self.beside:
            own = [(e.rank, mine, None)]
        lead = len(pieces) // 2 if self.beside else len(pieces)
        for k in e.others:
            chunk, to = e.at(path.chunk.at(k)), e.at(path.to.at(k))
            into = self._rows(slots, e.rank, chunk)
            for number, within in enumerate(pieces, start=1):
                if k == e.others[-1] and number > lead:
                    compute(*own.pop(0))
                src, dst = _cut(staged(chunk), within), _cut(into, within)
                compute(chunk, src, within)
                e.emit(Put(src=src, dst=dst, peer=to, team=e.team.name))
                e.notify(arrived, to, number)
        for rows in own:
            compute(*rows)
        for number, within in enumerate(pieces, start=1):
            for k in e.others:
                e.expect(arrived, e.at(path.source.at(k)), number)
            self._sum(slots, within)
        e.free(slots)


def _cut(view: View, within: Slice | None) -> View:
    """A view, or only some rows of it."""
    return view if within is None else view.then(within)
