"""Chunks of rows of a site's matrices: a rank's rows, or (`pipeline`) a slice of every rank's rows.

A `RowBlock` says which rows of the full matrices are meant; a `ChunkPlace` is where a chunk's rows
lie.
Where a chunk has rows in each of several stacks, each stack gets a matmul of its own, or, where
those would be small, the rows are packed.

    >>> pick = RowBlock.ranks(emitter, layout, emitter.rank + 1)
    >>> compute.matmul(call, lhs, pick.of(View("y"), 64), pick)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from interlace.ir import Arg, Box, Call, Chunk, Copy, DType, Index, Slice, TableEntry, View
from interlace.ir.operators import POINTWISE, Operator, is_kind, matmul_of
from interlace.ir.sizes import Int, fixed
from interlace.passes.sites.cone import Cone, blocks_of, lhs_of, made_by, operand_kind
from interlace.passes.sites.rows import RowLayout
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.emitter import Emitter

DIRECT_ROWS = 128
"""Stacks of at least this many rows get a matmul each; smaller ones are packed into one."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk lies: as one matrix (`flat`), if it is one, and with its stacks (`rows`)."""

    flat: View | None
    rows: View


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of each of `stacks` stacks of `height` rows."""

    stacks: Int
    height: Int
    step: Chunk | Slice
    counts: tuple[Int, ...]
    """Rows in all stacks, for each `index`."""
    index: Index
    within: Chunk | Slice | None = None
    """Only some of them; where there is one stack."""

    @classmethod
    def ranks(
        cls, emitter: Emitter, layout: RowLayout, index: Index, within: Slice | None = None
    ) -> RowBlock:
        """The rows of one rank, or some `within` them."""
        step = emitter.chunk(index, layout.rows)
        counts = tuple([layout.batch * rows for rows in layout.rows])
        if within is not None:
            start, stop = within.start, within.stop
            assert not isinstance(start, TableEntry) and not isinstance(stop, TableEntry)  # noqa: PT018
            counts = (stop - start,) * emitter.size
        return cls(layout.batch, sum(layout.rows), step, counts, index, within)

    @classmethod
    def slice(cls, emitter: Emitter, stacks: Int, height: Int, start: Int, stop: Int) -> RowBlock:
        """The same rows of every stack, on all ranks."""
        counts = (stacks * (stop - start),) * emitter.size
        return cls(stacks, height, Slice(0, start, stop), counts, 0)

    @property
    def empty(self) -> bool:
        """True if there are no such rows on any rank."""
        return isinstance(self.index, int) and not self.counts[self.index]

    def of(self, matrix: View, width: Int) -> ChunkPlace:
        """These rows of a full matrix, given with two dimensions."""
        if self.stacks == 1:
            view = self.along(matrix, 0)
            view = view if self.within is None else view.then(self.within)
            return ChunkPlace(view, view)
        stacked = matrix.view(self.stacks, self.height, width)
        return ChunkPlace(None, self.along(stacked, 1))

    def along(self, view: View, dim: int) -> View:
        """These rows of one stack, or of each, along a dimension."""
        step = self.step
        return view.then(step if step.dim == dim else dataclasses.replace(step, dim=dim))

    def cut(self, view: View, box: Box, width: Int) -> ChunkPlace:
        """These rows of a value: of a full matrix, or of its stacks as they are."""
        if self.stacks > 1 and box.sizes == (self.stacks, self.height, width):
            return ChunkPlace(None, self.along(view, 1))
        return self.of(matrix(view, box, self.stacks * self.height, width), width)

    def packed(self, emitter: Emitter, matrix: View, width: Int) -> ChunkPlace:
        """These rows lying together at the head of a matrix of `max(counts)` rows."""
        flat = emitter.head(matrix, self.counts, self.index, max(self.counts))
        return self.shaped(flat, width)

    def shaped(self, flat: View, width: Int) -> ChunkPlace:
        """The place of a chunk that is one matrix."""
        return ChunkPlace(flat, flat if self.stacks == 1 else flat.view(self.stacks, -1, width))


def in_shard(
    emitter: Emitter, shard: View, layout: RowLayout, index: Index, width: Int
) -> ChunkPlace:
    """The rows of a rank in its shard (a matrix), which may have padding between."""
    pitch = layout.pitch[0]
    if layout.batch == 1:
        flat = emitter.head(shard, layout.rows, index, pitch) if layout.padded else shard
        return ChunkPlace(flat, flat)
    if not layout.padded:
        return ChunkPlace(shard, shard.view(layout.batch, -1, width))
    stacked = shard.view(layout.batch, pitch, width)
    return ChunkPlace(None, emitter.head(stacked, layout.rows, index, pitch, dim=1))


def zero_padding(emitter: Emitter, shard: View, layout: RowLayout, width: Int) -> None:
    """Zeros for the rows of a shard that may be padding (before the others are computed)."""
    least, pitch = min(layout.rows), max(layout.pitch)
    if layout.padded and least < pitch:
        view = shard.view(layout.batch, pitch, width).slice(1, least, pitch)
        sizes = (layout.batch, pitch - least, width)
        emitter.call("aten.zeros.out", (sizes,), view)


def matrix(view: View, box: Box, rows: Int, width: Int) -> View:
    """A value as a matrix of `rows` rows."""
    return view if box.sizes == (rows, width) else view.view(rows, width)


def _select(i: int) -> Callable[[View], View]:
    return lambda view: view.select(0, i)


class Compute:
    """Emits the computation of a site, chunk by chunk."""

    def __init__(self, emitter: Emitter, values: Dataflow) -> None:
        self.emitter, self.values = emitter, values

    def matmul(self, op: Call, lhs: ChunkPlace, out: ChunkPlace, pick: RowBlock) -> None:
        """The rows that `pick` names of a matmul's result, from `lhs` into `out`."""
        if pick.empty:
            return
        spec = matmul_of(op.fn)
        assert spec is not None
        if spec.batched:
            self._batched(op, spec, lhs.rows, out.rows, pick)
            return
        rows = self.values.box(lhs_of(op)).sizes[0]
        cut = {i: self._rows_of(op.args[i], pick, rows) for i in spec.rows if i < len(op.args)}
        cut_args = {i: place for i, place in cut.items() if place is not None}

        def call(left: View, right: View, row: Callable[[View], View], stacks: Int = 1) -> None:
            args: list[Arg] = list(op.args)
            args[spec.lhs] = left
            for i, place in cut_args.items():
                args[i] = row(place.rows)
            if spec.blocks is not None and blocks_of(op) > 1:
                height = rows // blocks_of(op)
                args[spec.blocks] = stacks * max(max(pick.counts) // pick.stacks // height, 1)
            same = {"stream": op.stream, "kwargs": op.kwargs}
            self.emitter.emit(Call, op.loc, fn=spec.into, args=tuple(args), outs=(right,), **same)

        if pick.stacks == 1:
            call(lhs.rows, out.rows, lambda view: view)
        elif lhs.flat is not None and out.flat is not None and not cut_args:
            call(lhs.flat, out.flat, lambda view: view, pick.stacks)
        elif cut_args or min(pick.counts) >= DIRECT_ROWS * pick.stacks:
            for i in range(pick.stacks):
                stack = _select(i)
                call(stack(lhs.rows), stack(out.rows), stack)
        else:
            self._packed(op, lhs, out, pick, call)

    def _batched(self, op: Call, spec: Operator, left: View, right: View, pick: RowBlock) -> None:
        """The same of several stacks, each times a matrix of its own: all of them in one call."""

        def stacked(view: View, width: Int) -> View:
            return view if pick.stacks > 1 else view.view(1, -1, width)

        args: list[Arg] = list(op.args)
        args[spec.lhs] = stacked(left, self.values.box(lhs_of(op)).sizes[-1])
        for i in spec.rows:
            arg = args[i]
            sizes = self.values.box(arg).sizes if isinstance(arg, View) else ()
            if isinstance(arg, View) and len(sizes) > 1 and sizes[-2] == pick.height > 1:
                args[i] = pick.along(arg, len(sizes) - 2)
        out = stacked(right, self.values.box(made_by(op)).sizes[-1])
        self.emitter.like(op, fn=spec.into, args=tuple(args), outs=(out,), fresh=())

    def _packed(
        self,
        op: Call,
        lhs: ChunkPlace,
        out: ChunkPlace,
        pick: RowBlock,
        call: Callable[[View, View, Callable[[View], View], Int], None],
    ) -> None:
        """The same with the rows packed into one matrix, where they are none."""

        def packed(view: View, place: ChunkPlace) -> ChunkPlace:
            box = self.values.box(view)
            name, width = f"{view.buffer}_rows", box.sizes[1]
            return place if place.flat else self._scratch(name, box.dtype, pick, width)

        left = packed(lhs_of(op), lhs)
        self.emitter.copy(lhs.rows, left.rows, op.loc)
        right = packed(made_by(op), out)
        assert left.flat is not None and right.flat is not None  # noqa: PT018
        call(left.flat, right.flat, lambda view: view, pick.stacks)
        self.emitter.copy(right.rows, out.rows, op.loc)

    def _rows_of(self, arg: Arg, pick: RowBlock, rows: Int) -> ChunkPlace | None:
        """An argument with one row for each row of the result, cut; None if it is passed whole."""
        if not isinstance(arg, View):
            return None
        sizes = self.values.box(arg).sizes
        return pick.of(arg, sizes[1]) if len(sizes) == 2 and sizes[0] == rows > 1 else None

    def _scratch(self, name: str, dtype: DType, pick: RowBlock, width: Int) -> ChunkPlace:
        buffer = self.emitter.scratch(name, dtype, (max(pick.counts), width))
        return pick.packed(self.emitter, buffer, width)

    def cone(self, cone: Cone, pick: RowBlock, target: ChunkPlace) -> None:
        """The rows that `pick` names of the cone's value, into `target`."""
        if pick.empty:
            return
        places: dict[str, ChunkPlace] = {}
        for i in cone.ops:
            op = self.values.calls[i]
            name, box = made_by(op).buffer, self.values.box(made_by(op))
            width = box.numel // cone.rows
            if name in cone.used:
                place = pick.cut(View(name), box, width)
            elif name == cone.value:
                place = target
            else:
                place = self._scratch(f"{name}_chunk", box.dtype, pick, width)
            places[name] = place
            if matmul_of(op.fn):
                lhs = self.values.box(lhs_of(op))
                self.matmul(op, pick.cut(lhs_of(op), lhs, lhs.sizes[-1]), place, pick)
            else:
                self._pointwise(op, box, places, place, pick, cone)
        self.emitter.copy(places[cone.value].rows, target.rows)

    def _pointwise(
        self,
        op: Call,
        box: Box,
        places: dict[str, ChunkPlace],
        out: ChunkPlace,
        pick: RowBlock,
        cone: Cone,
    ) -> None:
        rows = cone.rows

        def cut(arg: Arg) -> Arg:
            if not isinstance(arg, View):
                return arg
            here = self.values.box(arg)
            if here.sizes == box.sizes and arg.buffer in places and self.values.whole(arg):
                return places[arg.buffer].rows
            match operand_kind(self.values, arg, box.sizes, rows, cone.stacks):
                case "rows" | "column":
                    return pick.cut(arg, here, here.numel // rows).rows
                case "stack":
                    return arg
                case _:
                    return arg if len(here.sizes) <= 1 else arg.view(here.numel)

        if is_kind(op.fn, "cast"):
            src = cut(op.args[0])
            assert isinstance(src, View)
            self.emitter.emit(Copy, op.loc, src=src, dst=out.rows)
            return
        kwargs = tuple((key, cut(value)) for key, value in op.kwargs)
        args = tuple(map(cut, op.args))
        changed = {"fn": POINTWISE[op.fn], "args": args, "kwargs": kwargs}
        self.emitter.like(op, **changed, outs=(out.rows,), fresh=())


Rows = Callable[[RowBlock, ChunkPlace], None]
"""Emits the computation on the rows that a pick names, which lie (or shall lie) in a place."""


@dataclass(frozen=True, slots=True)
class Slices:
    """A site cut into `count` slices of every rank's rows, of which all have as many."""

    emitter: Emitter
    name: str
    layout: RowLayout
    width: Int
    dtype: DType
    count: int

    def bounds(self, i: int) -> tuple[Int, Int]:
        """The rows of each rank's shard that slice `i` holds."""
        rows = self.layout.shard[0]
        return rows * i // self.count, rows * (i + 1) // self.count

    def pieces(self, i: int, matrix: View) -> Iterator[tuple[RowBlock, ChunkPlace]]:
        """The rows of slice `i`, as few picks as will do, and where they lie in its matrix."""
        e, layout = self.emitter, self.layout
        rows, (low, high) = layout.rows[0], self.bounds(i)
        if layout.batch == 1:
            pick = RowBlock.slice(e, e.size, rows, low, high)
            yield pick, pick.shaped(matrix, self.width)
            return
        for rank, stack in product(range(e.size), range(fixed(layout.batch))):
            start, stop = max(low, stack * rows), min(high, (stack + 1) * rows)
            if start < stop:
                first = ((e.size - 1) * stack + rank) * rows + start
                at, count = rank * (high - low) + start - low, stop - start
                pick = RowBlock.slice(e, 1, layout.total, first, first + count)
                yield pick, pick.shaped(matrix.slice(0, at, at + count), self.width)

    def gather(self, shard: View, full: View | None, take: Rows) -> None:
        """Gathers each slice, and has its rows taken; fills `full` as well if it is given."""
        e = self.emitter
        for i in range(self.count):
            low, high = self.bounds(i)
            gathered = e.alloc(f"{self.name}_{i}", self.dtype, (e.size * (high - low), self.width))
            e.collective("all_gather", shard.slice(0, low, high), gathered)
            for pick, place in self.pieces(i, gathered):
                take(pick, place)
            if full is not None:
                stacked = full.view(e.size, self.layout.shard[0], self.width).slice(1, low, high)
                e.copy(gathered.view(e.size, -1, self.width), stacked)

    def scatter(self, out: View, compute: Rows) -> None:
        """Computes each slice and reduces it into its rows of `out`."""
        e = self.emitter
        for i in range(self.count):
            low, high = self.bounds(i)
            parts = e.alloc(f"{self.name}_{i}", self.dtype, (e.size * (high - low), self.width))
            for pick, place in self.pieces(i, parts):
                compute(pick, place)
            mine = out.slice(0, low, high)
            e.collective("reduce_scatter", parts, mine, reduce=e.serial.reduce)
