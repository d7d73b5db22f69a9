"""The `pipeline` strategy: one smaller collective for each of several slices of every rank's rows.

A slice of a gather brings some rows of every rank, which lie apart in the result; a slice of a
scatter needs some rows of every owner. Where the rows of a slice form stacks of one height they are
taken as stacks; else stretch by stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from interlace.ir import DType, View
from interlace.passes.sites.rows import RowLayout
from interlace.passes.strategies.chunks import ChunkPlace, Pick
from interlace.passes.strategies.emitter import Emitter

Rows = Callable[[Pick, ChunkPlace], None]
"""What computes with the rows that a pick names, which lie (or shall lie) in a place."""


@dataclass(frozen=True, slots=True)
class Slices:
    """A site cut into `count` slices."""

    emitter: Emitter
    name: str
    layout: RowLayout
    width: int
    dtype: DType
    count: int

    def bounds(self, i: int) -> list[tuple[int, int]]:
        """The rows of each rank's shard that slice `i` holds."""
        return [
            (rows * i // self.count, rows * (i + 1) // self.count) for rows in self.layout.shard
        ]

    def stretches(self, i: int) -> Iterator[tuple[int, int, int]]:
        """(row in the slice, row in the matrix, rows) of what slice `i` holds, padding left out."""
        layout, position, first = self.layout, 0, 0
        height = sum(layout.rows)
        for rank, (low, high) in enumerate(self.bounds(i)):
            rows, pitch = layout.rows[rank], layout.pitch[rank]
            for b in range(layout.batch):
                start, stop = max(low, b * pitch), min(high, b * pitch + rows)
                if start < stop:
                    yield (
                        position + start - low,
                        b * height + first + start - b * pitch,
                        stop - start,
                    )
            position += high - low
            first += rows

    def pieces(self, i: int, matrix: View) -> Iterator[tuple[Pick, ChunkPlace]]:
        """The rows of slice `i`, as few picks as will do, and where they lie in its matrix."""
        e, layout, bounds = self.emitter, self.layout, self.bounds(i)
        even = not layout.padded and len(set(layout.rows)) == 1
        if layout.batch == 1 and even:
            pick = Pick.slice(e, e.size, layout.rows[0], *bounds[0])
            yield pick, pick.shaped(matrix, self.width)
            return
        for at, row, count in self.stretches(i):
            pick = Pick.slice(e, 1, layout.total, row, row + count)
            yield pick, pick.shaped(matrix.slice(0, at, at + count), self.width)

    def gather(self, shard: View, full: View | None, take: Rows) -> None:
        """Gathers each slice, and has its rows taken; fills `full` as well if it is given."""
        e = self.emitter
        sizes = self.layout.shard
        for i in range(self.count):
            bounds = self.bounds(i)
            counts = tuple(high - low for low, high in bounds)
            if not sum(counts):
                continue
            gathered = e.alloc(f"{self.name}_{i}", self.dtype, (sum(counts), self.width))
            mine = self._own(shard, bounds)
            e.collective("all_gather", mine, gathered, splits=self._splits(counts))
            for pick, place in self.pieces(i, gathered):
                take(pick, place)
            if full is not None and len(set(sizes)) == 1:
                stacked = full.view(e.size, sizes[0], self.width).slice(1, *bounds[0])
                e.copy(gathered.view(e.size, -1, self.width), stacked)
                continue
            for rank, (low, high) in enumerate(bounds):
                if full is not None and low < high:
                    whole = e.part(full, rank, sizes).slice(0, low, high)
                    e.copy(e.part(gathered, rank, counts), whole)

    def scatter(self, out: View, compute: Rows) -> None:
        """Computes each slice and reduces it into its rows of `out`."""
        e = self.emitter
        for i in range(self.count):
            bounds = self.bounds(i)
            counts = tuple(high - low for low, high in bounds)
            if not sum(counts):
                continue
            parts = e.alloc(f"{self.name}_{i}", self.dtype, (sum(counts), self.width))
            if self.layout.padded:
                e.call("aten.zeros.out", ((sum(counts), self.width),), parts)
            for pick, place in self.pieces(i, parts):
                compute(pick, place)
            mine = self._own(out, bounds)
            reduce, splits = e.serial.reduce, self._splits(counts)
            e.collective("reduce_scatter", parts, mine, reduce=reduce, splits=splits)

    def _own(self, shard: View, bounds: list[tuple[int, int]]) -> View:
        e = self.emitter
        low, high = zip(*bounds, strict=True)
        return shard.slice(0, e.dim(low, e.rank), e.dim(high, e.rank))

    def _splits(self, counts: tuple[int, ...]) -> str | None:
        even = len(set(counts)) == 1
        return None if even else self.emitter.names.table(self.emitter.team.name, counts)
