"""Transfers and sums of the partial results of a scatter, chunk by chunk; and the transfers of an
all-to-all after matmuls.

`compute(rank, matrix, within)` emits the rows of a rank (or some of them) into a matrix: those of
others first, the own last. The strategy gives the order of the sum.

    Scatter(emitter, strategy, stage, out, sizes, width, dtype).run(compute)

Note [Slabs]
    A large all-reduce behind a kernel is cut in slabs of rows, and each slab in a part for each
    rank, which sums it. The others' parts are computed first and put into their owners' slots.
    Each slab but the last is summed while the next is computed, into a slot that the peers fetch it
    from; after the computation only the sum of the last slab and its way back remain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from interlace.ir import Chunk, DType, Index, Slice, View
from interlace.ir.sizes import Int
from interlace.passes.strategies.emitter import Emitter, Pieces, cut, rank_at
from interlace.strategies import NEAR_FIRST, OWNERS, Path, Strategy


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
    sizes: tuple[Int, ...]
    width: Int
    dtype: DType
    pieces: Pieces = (None,)
    """Put: ranges of a rank's rows, each computed, moved and summed as one, to leave soon; None is
    all."""
    own: Pieces = (None,)
    """Ranges of the own rows, each computed and summed as one, so that all but the last are summed
    while others are computed: the pieces, the last of them maybe halved."""

    def run(self, compute: ComputeRows) -> None:
        """Emits the chunks' computation, their transfers and the sum."""
        path = self.row.scatter
        assert path is not None
        if self.row.transport == "messages":
            self._messages(path, compute)
        elif self.row.transport == "get":
            self._get(path, compute)
        else:
            self._put(path, compute)

    def _alloc(self, name: str, *shape: Int, kind: str = "local") -> View:
        shape = (*shape, self.width)
        return self.emitter.alloc(f"{self.name}_{name}", self.dtype, shape, kind)

    def _staged(self) -> Callable[[Index], View]:
        """Where the rows of each rank are computed."""
        stage = self.stage or self._alloc("parts", sum(self.sizes))
        return lambda index: self.emitter.part(stage, index, self.sizes)

    def _rows(self, matrices: View, index: Index, owner: Index) -> View:
        """Matrix `index` of several, as far as `owner` has rows."""
        e, largest = self.emitter, max(self.sizes)
        row = matrices.chunk(index, e.size).view(largest, self.width)
        return e.head(row, self.sizes, owner, largest)

    def _sum(self, slots: View, within: Slice | None = None) -> None:
        """Adds up what all made of the rank's own rows, or of some."""
        e = self.emitter
        slots, out = e.head(slots, self.sizes, e.rank, max(self.sizes), dim=1), self.out
        if within is not None:
            slots, out = slots.then(dataclasses.replace(within, dim=1)), out.then(within)
        e.sum_slots(slots, out)

    def _messages(self, path: Path, compute: ComputeRows) -> None:
        """Sends what came from one neighbour, plus this rank's part, to the other."""
        e, staged, largest = self.emitter, self._staged(), max(self.sizes)
        count = min(2, e.size - 1)
        buffers = [self._alloc(f"received_{i}", largest) for i in range(count)]
        received: View | None = None

        def add(mine: View, out: View) -> None:
            e.call("aten.add.out", (received, mine), out)

        for k, step in enumerate(e.steps(path), 1):
            rows = staged(step.chunk)
            compute(step.chunk, rows)
            if received is not None:
                add(rows, rows)
            following = rank_at(e.team, path.chunk.at(k + 1))
            received = e.head(buffers[k % count], self.sizes, following, largest)
            e.exchange(rows, step.to, received, step.source)
        compute(e.rank, staged(e.rank))
        add(staged(e.rank), self.out)

    def _get(self, path: Path, compute: ComputeRows) -> None:
        """Parts are computed into a slot that their owner fetches them from."""
        e, largest = self.emitter, max(self.sizes)
        parts = self._alloc("parts", e.size, largest, kind="symmetric")
        slots = self._alloc("slots", e.size, largest)
        ready = e.names.new(f"{parts.buffer}_ready")
        for step in e.steps(path):
            compute(step.chunk, self._rows(parts, step.chunk, step.chunk))
            e.notify(ready, step.to)
            into = self._rows(slots, step.source, e.rank)
            e.get(self._rows(parts, e.rank, e.rank), step.source, into, ready)
        compute(e.rank, self._rows(slots, e.rank, e.rank))
        self._sum(slots)
        e.free(parts)

    def _put(self, path: Path, compute: ComputeRows) -> None:
        """Parts are written into their owner's slot for this rank."""
        e, staged = self.emitter, self._staged()
        slots = self._alloc("slots", e.size, max(self.sizes), kind="symmetric")
        arrived = e.names.new(f"{slots.buffer}_arrived")
        mine, steps = self._rows(slots, e.rank, e.rank), list(e.steps(path))
        for step, (number, within) in product(steps, enumerate(self.pieces, start=1)):
            dst = cut(self._rows(slots, e.rank, step.chunk), within)
            src = cut(staged(step.chunk), within)
            compute(step.chunk, src, within)
            e.put(src, dst, step.to, arrived, number)
        for within in self.own:
            compute(e.rank, cut(mine, within), within)
        for number, within in enumerate(max(self.own, self.pieces, key=len), start=1):
            for step in steps:
                e.expect(arrived, step.source, min(number, len(self.pieces)))
            self._sum(slots, within)
        e.free(slots)


def combine(
    e: Emitter,
    row: Strategy,
    name: str,
    out: View,
    shape: tuple[Int, ...],
    dtype: DType,
    compute: ComputeRows,
) -> None:
    """Emits the chunks of an all-to-all after matmuls, and their transfers into `out`: each leaves
    for its owner as soon as it is computed, the rank's own last. Nothing is summed."""

    def alloc(part: str, kind: str) -> View:
        return e.alloc(f"{name}_{part}", dtype, shape, kind)

    transport, steps = row.transport, e.steps(OWNERS)
    parts = alloc("parts", "symmetric" if transport == "get" else "local")
    slots = alloc("slots", "symmetric") if transport == "put" else parts
    signal = "" if transport == "messages" else e.names.new(f"{slots.buffer}_ready")
    for step in steps:
        rows, into = parts.chunk(step.to, e.size), out.chunk(step.source, e.size)
        compute(step.to, rows)
        if transport == "messages":
            e.exchange(rows, step.to, into, step.source)
        elif transport == "put":
            e.put(rows, slots.chunk(e.rank, e.size), step.to, signal)
        else:
            e.notify(signal, step.to)
            e.get(parts.chunk(e.rank, e.size), step.source, into, signal)
    compute(e.rank, out.chunk(e.rank, e.size))
    for step in steps if transport == "put" else ():
        e.expect(signal, step.source)
        e.copy(slots.chunk(step.source, e.size), out.chunk(step.source, e.size))
    if transport != "messages":
        e.free(slots)


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
    rows: Int
    """A multiple of `count` times the team's size."""
    width: Int
    dtype: DType
    count: int
    small: bool
    """True if the last slab goes back by one kernel, False for copies as of the others."""

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
            for step in e.steps(path):
                e.expect(arrived, step.source, number + 1)
            e.sum_slots(self._piece(slots, number, dim=1), into)
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

        for step in e.steps(path):
            part = Chunk(step.chunk, e.size)
            src = self.stage.then(slab).then(part)
            compute(slab, part, src)
            e.put(src, slot(e.rank), step.to, arrived, number + 1)
        compute(slab, Chunk(e.rank, e.size), slot(e.rank))

    def _gather(self, number: int, sums: View, ready: str) -> None:
        """The sums of a slab, each fetched from its owner."""
        e = self.emitter
        e.notify(ready, e.team.others, number + 1)
        for step in e.steps(NEAR_FIRST):
            dst = self._part(number, step.source)
            e.get(self._piece(sums, number), step.source, dst, ready, number + 1)

    @property
    def _part_rows(self) -> Int:
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
        """The rows of one slab in a matrix (or several) of the parts of all slabs."""
        rows = self._part_rows
        return view.slice(dim, number * rows, (number + 1) * rows)

    def _alloc(self, name: str, *shape: Int) -> View:
        shape = (*shape, self.width)
        return self.emitter.alloc(f"{self.name}_{name}", self.dtype, shape, "symmetric")
