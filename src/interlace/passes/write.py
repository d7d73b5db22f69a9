"""Writes a site with a strategy: what is declared, which transport, and which rows it computes.

ops = write(values, names, site, STRATEGIES["ring", None], chunks=0, number=1)
"""

from __future__ import annotations

from interlace.ir import Buffer, Call, Collective, Index, Op, View
from interlace.passes.chunks import Compute, Pick, Place, in_shard, matrix, zero_padding
from interlace.passes.cone import result_of
from interlace.passes.emitter import Emitter, Names
from interlace.passes.gathers import Gather
from interlace.passes.recognise import GatherSite, ScatterSite
from interlace.passes.scatters import Scatter
from interlace.passes.slices import Slices
from interlace.passes.strategies import Strategy
from interlace.passes.values import Values

DEFAULT_SLICES = 4


def refusal(values: Values, site: GatherSite | ScatterSite, row: Strategy) -> str:
    """Why a strategy cannot serve a site; empty where it can."""
    op = _collective(values, site)
    if not site.layout.total:
        return "it has no rows"
    if row.cut == "slices" and slices(values, site, 0) < 2:
        return "each rank has a single row"
    if op.reduce not in (None, "sum") and row.transport != "collectives":
        return f"it adds up, and the collective takes the {op.reduce}"
    return ""


def slices(values: Values, site: GatherSite | ScatterSite, chunks: int) -> int:
    """How many slices `pipeline` cuts a site into: as asked, or a few; a row each at least."""
    whole = _collective(values, site).kind == "all_reduce"
    rows = site.layout.total if whole else max(site.layout.shard)
    return min(chunks or DEFAULT_SLICES, rows)


def _collective(values: Values, site: GatherSite | ScatterSite) -> Collective:
    op = values.program.ops[site.collective]
    assert isinstance(op, Collective)
    return op


def write(
    values: Values,
    names: Names,
    site: GatherSite | ScatterSite,
    row: Strategy,
    chunks: int,
    number: int | None,
) -> list[Op]:
    """The ops of a site, overlapped by the strategy of this row."""
    op = _collective(values, site)
    emitter = Emitter(names, values.program.team(op.team), op, number)
    writer = _Writer(values, emitter, row, chunks)
    if isinstance(site, GatherSite):
        writer.gather(site, op)
    elif op.kind == "all_reduce":
        writer.all_reduce(site, op)
    else:
        writer.reduce_scatter(site, op)
    return emitter.ops


class _Writer:
    def __init__(self, values: Values, emitter: Emitter, row: Strategy, chunks: int) -> None:
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
        for i in site.matmuls:
            result = result_of(self.values.program.ops[i])
            assert result is not None
            self.declare(result.buffer, "fresh")
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
            cut.gather(shard, whole, lambda pick, place: self.matmuls(site, pick, place))
            return

        def take(index: Index, rows: View) -> None:
            place = in_shard(e, rows, layout, index, width)
            self.matmuls(site, Pick.ranks(e, layout, index), place)

        Gather(e, self.row, shard, full, layout.shard, width, dtype, site.whole).run(take)

    def matmuls(self, site: GatherSite, pick: Pick, rows: Place) -> None:
        """What the matmuls make of some rows."""
        for i in site.matmuls:
            op = self.values.program.ops[i]
            result = result_of(op)
            assert isinstance(op, Call) and result is not None  # noqa: PT018
            out = pick.of(result, self.values.box(result).sizes[1])
            self.compute.matmul(op, rows, out, pick)

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

        def rows(index: Index, shard: View) -> None:
            zero_padding(e, shard, layout, cone.width)
            place = in_shard(e, shard, layout, index, cone.width)
            self.compute.cone(cone, Pick.ranks(e, layout, index), place)

        scatter = Scatter(
            *(e, self.row, cone.value, stage, out, layout.shard, cone.width, dtype),
        )
        scatter.run(rows)

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
                self.compute.cone(cone, pick, Place(part, part))
                dst = full.slice(0, start, stop)
                e.collective("all_reduce", part, dst, reduce=op.reduce)
            return

        def rows(index: Index, part: View) -> None:
            self.compute.cone(cone, Pick.ranks(e, layout, index), Place(part, part))

        sizes = layout.rows
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
        Scatter(e, self.row, cone.value, stage, mine, sizes, cone.width, dtype).run(rows)
        gather = Gather(
            *(e, self.row, mine, full, sizes, cone.width, dtype),
            in_place=True,
        )
        gather.run(lambda index, view: None)

    def redeclare(self, name: str) -> None:
        """Allocates a buffer as the serial Program does."""
        self.declare(name, self.values.buffers[name].kind)
