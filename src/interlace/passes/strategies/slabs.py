"""An all-reduce behind a matmul, slab by slab: what one kernel makes of the next is under way.

The rows are cut in slabs, and each slab in a part for each rank, which sums it. Of every slab the
others' parts are computed first and put into their owners' slots, then the own part. Each slab but
the last is summed while the next is computed, into a slot that the peers fetch it from at once; so
all that follows the computation is the sum of the last slab and its way back.

    Slabs(emitter, strategy, "y", stage, full, width, dtype, count).run(compute)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from interlace.ir import Chunk, DType, Get, Index, Put, Slice, View
from interlace.passes.strategies.emitter import Emitter
from interlace.passes.strategies.table import NEAR_FIRST, Path, Strategy


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
