"""Writes a site with a strategy: what is declared, which transport, and which rows it computes.

ops = write(values, names, site, STRATEGIES["ring", None], chunks=0, number=1)
"""

from __future__ import annotations

from dataclasses import replace

from interlace.ir import Buffer, Call, Chunk, Collective, DType, Index, Op, Slice, View
from interlace.passes.sites.cone import result_of
from interlace.passes.sites.recognise import EXCHANGE, GatherSite, MatmulSite, ScatterSite
from interlace.passes.sites.rows import RowLayout
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.chunks import (
    ChunkPlace,
    Compute,
    Pick,
    in_shard,
    matrix,
    zero_padding,
)
from interlace.passes.strategies.emitter import Emitter, Names
from interlace.passes.strategies.gathers import Dispatch, Gather, Take
from interlace.passes.strategies.pieces import (
    by_kernel,
    collective_of,
    part_bytes,
    pieces,
    slabs,
    slices,
    sums_beside,
    unfusable,
)
from interlace.passes.strategies.scatters import Combine, Scatter, Slabs
from interlace.passes.strategies.slices import Slices
from interlace.strategies import Strategy

EXCHANGED = (
    *(DType.f64, DType.f32, DType.bf16, DType.f16),
    *(DType.i64, DType.i32, DType.i16, DType.i8, DType.u8),
)
"""What the exchange kernel adds up."""


def refusal(values: Dataflow, site: MatmulSite, row: Strategy) -> str:
    """Why a strategy cannot serve a site; empty where it can."""
    op = collective_of(values, site)
    if not site.layout.total:
        return "it has no rows"
    if op.kind == EXCHANGE and row.alone:
        return row.alone
    if row.cut == "slices" and slices(values, site, 0) < 2:
        return "each rank has a single row"
    if op.reduce not in (None, "sum") and row.transport != "collectives":
        return f"it adds up, and the collective takes the {op.reduce}"
    if row.name == "exchange" and op.reduce is not None and op.src is not None:
        if (dtype := values.box(op.src).dtype) not in EXCHANGED:
            return f"its kernel does not reduce {dtype}"
    return unfusable(values, site) if row.name == "fused" else ""


def write(
    values: Dataflow,
    names: Names,
    site: MatmulSite,
    row: Strategy,
    chunks: int,
    number: int | None,
) -> list[Op]:
    """The ops of a site, overlapped by the strategy of this row."""
    op = collective_of(values, site)
    if row.cut == "whole":
        serial = (values.program.ops[i] for i in site.ops)
        return [replace(one, backend="peer") if one is op else one for one in serial]
    emitter = Emitter(names, values.program.team(op.team), op, number)
    writer = _Writer(values, emitter, row, chunks)
    if isinstance(site, GatherSite):
        (writer.dispatch if op.kind == EXCHANGE else writer.gather)(site, op)
    elif op.kind == EXCHANGE:
        writer.combine(site, op)
    elif op.kind == "all_reduce":
        writer.all_reduce(site, op)
    else:
        writer.reduce_scatter(site, op)
    return emitter.ops


class _Writer:
    def __init__(self, values: Dataflow, emitter: Emitter, row: Strategy, chunks: int) -> None:
        self.values, self.emitter, self.row, self.chunks = values, emitter, row, chunks
        self.compute = Compute(emitter, values)

    def declare(self, name: str, kind: str) -> None:
        """Allocates a buffer of the serial Program, unless the caller gives it."""
        buffer: Buffer = self.values.buffers[name]
        if buffer.kind != "output":
            self.emitter.declare(buffer, kind)

    def full(self, name: str, rows: int, width: int) -> View:
        """A buffer of the serial Program as a matrix."""
        view = View(name)
        return matrix(view, self.values.box(view), rows, width)

    def shard(self, view: View, width: int) -> View:
        """A shard (whose rows may differ between ranks) as a matrix."""
        sizes = self.values.box(view).sizes
        return view if len(sizes) == 2 and sizes[1] == width else view.view(-1, width)

    # gathers

    def gather(self, site: GatherSite, op: Collective) -> None:
        """An all-gather and the matmuls of its rows."""
        e, layout, width = self.emitter, site.layout, site.width
        assert op.src is not None and op.dst is not None  # noqa: PT018
        self.declare_results(site)
        name = op.dst.buffer
        sliced = self.row.cut == "slices"
        if site.whole:
            self.declare(name, self.values.buffers[name].kind)
        elif not sliced and self.row.transport != "put":
            self.declare(name, "local")
        full = self.full(name, sum(layout.shard), width)
        shard = self.shard(op.src, width)
        dtype = self.values.buffers[name].dtype
        if sliced:
            count = slices(self.values, site, self.chunks)
            cut = Slices(e, f"{name}_slice", layout, width, dtype, count)
            whole = full if site.whole else None

            def all_matmuls(pick: Pick, place: ChunkPlace) -> None:
                for i in site.matmuls:
                    self.matmul(i, pick, place)

            cut.gather(shard, whole, all_matmuls)
            return

        def taking(i: int) -> Take:
            def take(index: Index, rows: View) -> None:
                place = in_shard(e, rows, layout, index, width)
                self.matmul(i, Pick.ranks(e, layout, index), place)

            return take

        gather = Gather(e, self.row, shard, full, layout.shard, width, dtype, site.whole)
        gather.run(*map(taking, site.matmuls))

    def matmul(self, i: int, pick: Pick, rows: ChunkPlace) -> None:
        """What a matmul makes of some rows."""
        op = self.values.program.ops[i]
        result = result_of(op)
        assert isinstance(op, Call) and result is not None  # noqa: PT018
        box = self.values.box(result)
        self.compute.matmul(op, rows, pick.cut(result, box, box.sizes[-1]), pick)

    def declare_results(self, site: GatherSite) -> None:
        """Declares what the matmuls of a gather make."""
        for i in site.matmuls:
            result = result_of(self.values.program.ops[i])
            assert result is not None
            self.declare(result.buffer, "fresh")

    # all-to-alls

    def dispatch(self, site: GatherSite, op: Collective) -> None:
        """An all-to-all and the matmuls of what it brings."""
        assert op.src is not None and op.dst is not None  # noqa: PT018
        self.declare_results(site)
        name = op.dst.buffer
        if site.whole:
            self.declare(name, self.values.buffers[name].kind)
        elif self.row.transport != "put":
            self.declare(name, "local")

        def take(index: Index, rows: View) -> None:
            pick = Pick.ranks(self.emitter, site.layout, index)
            for i in site.matmuls:
                self.matmul(i, pick, self.part(rows, op, site.layout, index, site.width))

        box, sizes = self.values.box(op.dst), site.layout.shard
        ends = self.emitter, self.row, op.src, View(name)
        Dispatch(*ends, sizes, site.width, box.dtype, site.whole, shape=box.sizes).run(take)

    def combine(self, site: ScatterSite, op: Collective) -> None:
        """Matmuls and the all-to-all of what they make."""
        assert op.dst is not None
        self.redeclare(op.dst.buffer)
        self.stage(site, in_place=False)
        layout, cone = site.layout, site.cone

        def compute(index: Index, rows: View) -> None:
            if layout.padded:
                zero_padding(self.emitter, rows, layout, cone.width)
            place = self.part(rows, op, layout, index, cone.width)
            self.compute.cone(cone, Pick.ranks(self.emitter, layout, index), place)

        box = self.values.box(op.dst)
        Combine(self.emitter, self.row, cone.value, box.sizes, box.dtype).run(op.dst, compute)

    def part(
        self, rows: View, op: Collective, layout: RowLayout, index: Index, width: int
    ) -> ChunkPlace:
        """Where the rows of one rank's part of an all-to-all lie."""
        assert op.dst is not None
        first, *rest = self.values.box(op.dst).sizes
        sizes = (first // self.emitter.size, *rest)
        if layout.batch > 1 and not layout.padded:
            stacks = layout.batch, layout.rows[0], width
            return ChunkPlace(rows.view(-1, width), rows if sizes == stacks else rows.view(*stacks))
        shard = rows if sizes == (layout.shard[0], width) else rows.view(-1, width)
        return in_shard(self.emitter, shard, layout, index, width)

    # reductions

    def stage(self, site: ScatterSite, in_place: bool) -> View | None:
        """Declares what others use; the cone's value as a matrix, if chunks may lie in it."""
        cone = site.cone
        overwritten = self.row.accumulates and cone.value in cone.used
        in_place = in_place and not overwritten
        for i in cone.ops:
            result = result_of(self.values.program.ops[i])
            assert result is not None
            if result.buffer in cone.used:
                self.declare(result.buffer, "fresh")
            elif result.buffer == cone.value and in_place:
                self.declare(result.buffer, "local")
        return self.full(cone.value, cone.rows, cone.width) if in_place else None

    def reduce_scatter(self, site: ScatterSite, op: Collective) -> None:
        """Matmuls and the reduce-scatter of what they make."""
        e, layout, cone = self.emitter, site.layout, site.cone
        assert op.dst is not None
        self.redeclare(op.dst.buffer)
        dtype = self.values.box(op.dst).dtype
        out = self.shard(op.dst, cone.width)
        if self.row.cut == "slices":
            self.stage(site, in_place=False)
            count = slices(self.values, site, self.chunks)
            cut = Slices(e, f"{cone.value}_slice", layout, cone.width, dtype, count)
            cut.scatter(out, lambda pick, place: self.compute.cone(cone, pick, place))
            return
        local = self.row.transport != "get"
        stage = self.stage(site, local and layout.batch == 1 and not layout.padded)

        def rows(index: Index, shard: View, within: Slice | None = None) -> None:
            zero_padding(e, shard, layout, cone.width)
            place = in_shard(e, shard, layout, index, cone.width)
            self.compute.cone(cone, Pick.ranks(e, layout, index, within), place)

        self.scatter(site, stage, out, layout.shard, dtype).run(rows)

    def scatter(
        self, site: ScatterSite, stage: View | None, out: View, sizes: tuple[int, ...], dtype: DType
    ) -> Scatter:
        """The reduction of a site into `out`."""
        layout, count, beside = site.layout, 1, False
        if self.row.name == "fused":
            count = pieces(self.values, site, self.chunks, fused=True)
            beside = sums_beside(self.values, site, count)
        elif layout.batch == 1 and not layout.padded and len(set(layout.rows)) == 1:
            count = pieces(self.values, site, 0)
        cone = site.cone
        return Scatter(
            *(self.emitter, self.row, cone.value, stage, out, sizes, cone.width, dtype, count),
            beside=beside,
        )

    def all_reduce(self, site: ScatterSite, op: Collective) -> None:
        """Matmuls and the all-reduce of what they make: a reduce-scatter, then a gather."""
        e, layout, cone = self.emitter, site.layout, site.cone
        assert op.dst is not None
        name = op.dst.buffer
        self.redeclare(name)
        dtype = self.values.box(op.dst).dtype
        full = self.full(name, cone.rows, cone.width)
        stage = self.stage(site, self.row.transport != "get")
        if self.row.cut == "slices":
            assert stage is not None
            count = slices(self.values, site, self.chunks)
            for i in range(count):
                start, stop = cone.rows * i // count, cone.rows * (i + 1) // count
                pick = Pick.slice(e, 1, cone.rows, start, stop)
                part = stage.slice(0, start, stop)
                self.compute.cone(cone, pick, ChunkPlace(part, part))
                dst = full.slice(0, start, stop)
                e.collective("all_reduce", part, dst, reduce=op.reduce)
            return

        sizes, fused = layout.rows, self.row.name == "fused"
        count = slabs(self.values, site, self.chunks) if fused else 0
        if count:
            assert stage is not None
            self.in_slabs(site, stage, full, count)
            return

        def rows(index: Index, shard: View, within: Slice | None = None) -> None:
            pick = Pick.ranks(e, layout, index, within)
            self.compute.cone(cone, pick, ChunkPlace(shard, shard))

        if self.row.cut == "roots":
            assert stage is not None
            sums = e.alloc(f"{cone.value}_sums", dtype, (cone.rows, cone.width))
            for root in (root for root, size in enumerate(sizes) if size):
                part, total = e.part(stage, root, sizes), e.part(sums, root, sizes)
                rows(root, part)
                e.collective("reduce", part, total, root=root, reduce=op.reduce)
                e.collective("broadcast", total, e.part(full, root, sizes), root=root)
            return
        mine = e.part(full, e.rank, sizes)
        if fused and by_kernel(part_bytes(self.values, site)):
            # Quicker than a copy from each peer behind a signal: one kernel does all.
            self.scatter(site, stage, mine, sizes, dtype).run(rows)
            e.collective("all_gather", mine, full, backend="peer")
            return
        gather = Gather(
            *(e, self.row, mine, full, sizes, cone.width, dtype),
            in_place=True,
        )
        if self.row.transport in ("get", "put"):  # peers fetch the sum from where it is made
            gather, mine = gather.show()
        self.scatter(site, stage, mine, sizes, dtype).run(rows)
        gather.run(lambda index, view: None)

    def in_slabs(self, site: ScatterSite, stage: View, full: View, count: int) -> None:
        """An all-reduce in slabs: the others' parts of one travel while the next is computed."""
        e, cone, sizes = self.emitter, site.cone, site.layout.rows
        dtype = self.values.buffers[cone.value].dtype

        def compute(slab: Slice, part: Chunk, into: View) -> None:
            pick = Pick(1, cone.rows, slab, sizes, part.index, part)
            self.compute.cone(cone, pick, ChunkPlace(into, into))

        Slabs(
            *(e, self.row, cone.value, stage, full, cone.rows, cone.width, dtype, count),
            small=by_kernel(part_bytes(self.values, site) // count),
        ).run(compute)

    def redeclare(self, name: str) -> None:
        """Allocates a buffer as the serial Program does."""
        self.declare(name, self.values.buffers[name].kind)
