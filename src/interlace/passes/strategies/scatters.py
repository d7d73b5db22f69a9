"""How the partial results of a scatter travel and are summed, chunk by chunk.

`compute(rank, matrix, within)` emits the rows of that rank (or some of them) into a matrix; each
transport has it compute the others' rows first, its own last (`beside`: and in between), and leaves
the sum of all ranks' parts of its rows in `out`. The order in which they are summed is the
strategy's (`table.py`).

    Scatter(emitter, strategy, stage, out, sizes, width, dtype).run(compute)

Note [Slabs]
    A large all-reduce behind a kernel is cut in slabs of rows, and each slab in a part for each
    rank, which sums it. Of every slab the others' parts are computed first and put into their
    owners' slots, then the own part. Each slab but the last is summed while the next is computed,
    into a slot that the peers fetch it from at once; so all that follows the computation is the sum
    of the last slab and its way back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from interlace.ir import (
    Call,
    Chunk,
    DType,
    FusedKernel,
    Get,
    Group,
    Index,
    Put,
    Recv,
    Send,
    Slice,
    View,
)
from interlace.ir.kernels import turns
from interlace.passes.strategies.emitter import Emitter
from interlace.passes.strategies.table import NEAR_FIRST, Path, Strategy


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
        own = pieces if self.beside else [None]
        lead = len(pieces) // 2 if self.beside else len(pieces)
        kernel = FusedKernel(kind="scatter_matmul", pieces=len(pieces), lead=lead)
        for k, number in turns(kernel, e.size):
            if not k:
                compute(e.rank, _cut(mine, own[number]), own[number])
                continue
            chunk, to, within = e.at(path.chunk.at(k)), e.at(path.to.at(k)), pieces[number]
            dst = _cut(self._rows(slots, e.rank, chunk), within)
            src = _cut(staged(chunk), within)
            compute(chunk, src, within)
            e.emit(Put(src=src, dst=dst, peer=to, team=e.team.name))
            e.notify(arrived, to, number + 1)
        for number, within in enumerate(pieces, start=1):
            for k in e.others:
                e.expect(arrived, e.at(path.source.at(k)), number)
            self._sum(slots, within)
        e.free(slots)


def _cut(view: View, within: Slice | None) -> View:
    """A view, or only some rows of it."""
    return view if within is None else view.then(within)


# slab by slab: Note [Slabs]


class ComputePart(Protocol):
    """Emits the rows of a rank's part of a slab into a matrix."""

    def __call__(self, slab: Slice, part: Chunk, into: View) -> None: ...


@dataclass(frozen=True, slots=True)
class Slabs:
    """The sum over all ranks of a matrix of rows of `width`, in `full`."""

    emitter: Emitter
    row: Strategy
    name: str
    stage: View
    """A matrix of all rows that parts may be computed into."""
    full: View
    rows: int
    """A multiple of `count` times the team's size."""
    width: int
    dtype: DType
    count: int
    small: bool
    """Whether the last slab goes back by one kernel, or by copies as the others."""

    def run(self, compute: ComputePart) -> None:
        """Emits the computation of the parts, their transfers, the sums and their way back."""
        e, path = self.emitter, self.row.scatter
        assert path is not None
        slots = self._alloc("slots", e.size, self.rows // e.size)
        copied = self.count - 1 if self.small else self.count
        sums = self._alloc("sums", copied * self._part_rows)
        arrived = e.names.new(f"{slots.buffer}_arrived")
        ready = e.names.new(f"{sums.buffer}_ready")
        for number in range(self.count):
            self._scatter(number, slots, arrived, path, compute)
            mine = self._part(number, e.rank)
            into = mine if number == copied else self._piece(sums, number)
            for k in e.others:
                e.expect(arrived, e.at(path.source.at(k)), number + 1)
            rows = self._piece(slots, number, dim=1)
            e.sum_slots(rows, into)
            if number < copied:
                self._gather(number, sums, ready)
            else:
                e.collective("all_gather", mine, self._slab(number), backend="peer")
        for number in range(copied):
            e.copy(self._piece(sums, number), self._part(number, e.rank))
        e.free(slots)
        e.free(sums)

    def _scatter(
        self, number: int, slots: View, arrived: str, path: Path, compute: ComputePart
    ) -> None:
        """The parts of a slab, of which the others' go to their owners."""
        e, slab = self.emitter, self._bounds(number)

        def slot(index: Index) -> View:
            """Where the part of that rank's making lies on its owner."""
            place = slots.chunk(index, e.size).view(self.rows // e.size, self.width)
            return self._piece(place, number)

        for k in e.others:
            chunk, to = e.at(path.chunk.at(k)), e.at(path.to.at(k))
            part = Chunk(chunk, e.size)
            src = self.stage.then(slab).then(part)
            compute(slab, part, src)
            e.emit(Put(src=src, dst=slot(e.rank), peer=to, team=e.team.name))
            e.notify(arrived, to, number + 1)
        compute(slab, Chunk(e.rank, e.size), slot(e.rank))

    def _gather(self, number: int, sums: View, ready: str) -> None:
        """The sums of a slab, each fetched from its owner."""
        e = self.emitter
        e.notify(ready, e.team.others, number + 1)
        for k in e.others:
            source = e.at(NEAR_FIRST.source.at(k))
            e.expect(ready, source, number + 1)
            dst = self._part(number, source)
            e.emit(Get(src=self._piece(sums, number), peer=source, team=e.team.name, dst=dst))

    @property
    def _part_rows(self) -> int:
        return self.rows // (self.count * self.emitter.size)

    def _bounds(self, number: int) -> Slice:
        rows = self.rows // self.count
        return Slice(0, number * rows, (number + 1) * rows)

    def _slab(self, number: int) -> View:
        return self.full.then(self._bounds(number))

    def _part(self, number: int, index: Index) -> View:
        """A rank's part of a slab of the result."""
        return self._slab(number).then(Chunk(index, self.emitter.size))

    def _piece(self, view: View, number: int, dim: int = 0) -> View:
        """What belongs to a slab of a matrix (or several) of the parts of all slabs."""
        rows = self._part_rows
        return view.slice(dim, number * rows, (number + 1) * rows)

    def _alloc(self, name: str, *shape: int) -> View:
        shape = (*shape, self.width)
        return self.emitter.alloc(f"{self.name}_{name}", self.dtype, shape, "symmetric")
