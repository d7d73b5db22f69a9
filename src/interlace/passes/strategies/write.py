"""Writes a site with a strategy: what is declared, and which rows it computes.

ops = write(values, names, site, STRATEGIES["ring", None], chunks=0, number=1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from interlace.cost import Machine
from interlace.ir import Chunk, Collective, DType, Index, Op, Program, Site, Slice, View
from interlace.ir.kernels import bias_of, ill_scaled, legible, unfit
from interlace.ir.operators import matmul_of
from interlace.ir.sizes import Int
from interlace.passes.find_sites import Analysis, in_blocks, without_moves
from interlace.passes.sites.cone import Cone, lhs_of, made_by, result_of
from interlace.passes.sites.recognise import EXCHANGE, GatherSite, MatmulSite, ScatterSite
from interlace.passes.sites.rows import balanced_sizes
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.chunks import (
    ChunkPlace,
    Compute,
    RowBlock,
    Slices,
    in_shard,
    matrix,
    zero_padding,
)
from interlace.passes.strategies.emitter import Emitter, Names, Pieces
from interlace.passes.strategies.pieces import (
    by_kernel,
    halved,
    part_bytes,
    pieces,
    slabs,
    slices,
    sums_beside,
)
from interlace.passes.strategies.transfers import (
    Dispatch,
    Gather,
    OnRows,
    Scatter,
    Slabs,
    combine,
)
from interlace.passes.strategies.whole import by_copies, lifted, lifts, unmovable
from interlace.strategies import STRATEGIES, Strategy, row_of

EXCHANGED = (
    *(DType.f64, DType.f32, DType.bf16, DType.f16),
    *(DType.i64, DType.i32, DType.i16, DType.i8, DType.u8),
)
"""Types of elements that the exchange kernel adds up."""
COPIES = STRATEGIES["copies", None]


def refusal(
    values: Dataflow, site: MatmulSite, strategy: Strategy, machine: Machine | None = None
) -> str:
    """Why a strategy cannot serve a site (on that machine, where one is given); empty where it
    can."""
    op = site.op
    team = values.program.team(op.team)
    if not site.layout.total:
        return "it has no rows"
    if strategy.peers and team.hosts is not None:
        return f"team {team.name} spans hosts, which share no memory"
    if op.kind == EXCHANGE and strategy.alone:
        return strategy.alone
    if strategy.sliced and op.kind != "all_reduce" and not site.layout.even:
        return "its rows are not dealt evenly to the ranks"
    if strategy.sliced and slices(values, site, 0) < 2:
        return "each rank has a single row"
    if strategy.copies:
        return unmovable(values, op)
    if op.reduce not in (None, "sum") and strategy.adds:
        return f"it adds up, and the collective takes the {op.reduce}"
    if strategy.whole and op.reduce is not None and op.src is not None:
        if (dtype := values.box(op.src).dtype) not in EXCHANGED:
            return f"its kernel does not reduce {dtype}"
    if not strategy.fuses:
        return ""
    specs = (matmul_of(values.calls[i].fn) for i in site.calls)
    packed = any(spec is not None and spec.blocks is not None for spec in specs)
    if machine is not None and not (machine.packed_kernels if packed else machine.kernels):
        return unfusable(values, site) or "the GPUs have no such kernel"
    return unfusable(values, site)


def unfusable(values: Dataflow, site: MatmulSite) -> str:
    """Why a site's matmuls cannot run as one kernel each, empty where they can."""
    layout = site.layout
    if layout.batch != 1 or not layout.even:
        return "its rows are not dealt evenly to the ranks, in one stack"
    if not layout.rows[0]:
        return "a rank has no rows"
    if isinstance(site, ScatterSite) and (len(site.calls) > 1 or site.cone.used):
        return "more than one matmul makes what it reduces, or others use that as well"
    return next(filter(None, (_unfusable_matmul(values, site, i) for i in site.calls)), "")


def _unfusable_matmul(values: Dataflow, site: MatmulSite, index: int) -> str:
    op = values.calls[index]
    spec, result = matmul_of(op.fn), result_of(op)
    if spec is None or not spec.fusable or result is None:
        return "the kernel does mm, addmm and float8_mm only"
    if not legible(op, spec):
        return f"{op.fn} has arguments that the kernel does not take"
    rows = site.layout.rows
    why = ill_scaled(op, isinstance(site, GatherSite), rows[0], len(rows))
    if why:
        return why
    right, bias = op.args[spec.lhs + 1], bias_of(op, spec)
    assert isinstance(right, View)
    added = values.box(bias) if isinstance(bias, View) else None
    factors = values.box(lhs_of(op)), values.box(right)
    return unfit(*factors, values.box(result), added, spec.blocks is not None)


def write(
    values: Dataflow,
    names: Names,
    site: MatmulSite,
    strategy: Strategy,
    chunks: int,
    number: int | None,
    kernels: bool = False,
) -> tuple[list[Op], dict[str, str]]:
    """The ops of a site, overlapped by a strategy, and which buffers become slots of
    their teams (`lifted`); `kernels` as of `Emitter`."""
    op = site.op
    if strategy.whole:
        listed = [values.program.ops[i] for i in site.ops]
        at = next(i for i, one in enumerate(listed) if one is op)
        made, slots = write_whole(values, names, op, strategy, number)
        return [*listed[:at], *made, *listed[at + 1 :]], slots
    emitter = Emitter(names, values.program.team(op.team), op, number, kernels)
    writer = _Writer(values, emitter, site, strategy, chunks)
    if isinstance(site, GatherSite):
        writer.gather(site)
    elif op.kind == "all_reduce":
        writer.all_reduce(site)
    else:
        writer.scatter(site)
    return emitter.ops, writer.slots


def write_whole(
    values: Dataflow, names: Names, op: Collective, strategy: Strategy, number: int | None
) -> tuple[list[Op], dict[str, str]]:
    """The ops in place of a collective that a strategy leaves in one piece, and which buffers
    become slots of their teams (`lifted`)."""
    if not strategy.copies:
        return [replace(op, backend="peer")], {}
    slots = {op.dst.buffer: op.team} if op.dst is not None and lifts(values, op) else {}
    return by_copies(values, names, op, number), slots


def written(analysis: Analysis, sites: Mapping[int, Site], gpu: bool) -> Program:
    """The Program whose sites are overlapped as the Sites of these numbers say."""
    program, values = analysis.program, analysis.values
    names = values.names.copy()
    blocks: dict[int, tuple[int, ...]] = {}
    made: dict[int, list[Op]] = {}
    overlapped: list[MatmulSite] = []
    slots: dict[str, str] = {}
    for found in analysis.found:
        at = found.collective
        number = program.ops[at].site
        site = sites.get(number) if number is not None else None
        row = row_of(site.strategy, site.protocol) if site is not None else None
        if site is None or row is None:
            continue
        if row.whole:
            made[at], raised = write_whole(values, names, values.collectives[at], row, number)
        else:
            assert found.site is not None, "a collective alone is never cut"
            blocks[at] = found.site.ops
            overlapped.append(found.site)
            count = site.chunks or 0
            made[at], raised = write(values, names, found.site, row, count, number, gpu)
        slots |= raised
    placed = in_blocks(without_moves(analysis.before, overlapped), blocks)
    assert placed is not None, "find_sites lets no sites pass that depend on one another"
    ops: list[Op] = []
    for block in placed:
        new = next((made[i] for i in block if i in made), None)
        ops += new if new is not None else [program.ops[i] for i in block]
    listed = tuple(sites[site.id] for site in program.sites)
    return program.replace(ops=lifted(ops, slots), sites=listed, tables=tuple(names.tables))


class _Writer:
    """Writes one site."""

    def __init__(
        self, values: Dataflow, emitter: Emitter, site: MatmulSite, strategy: Strategy, chunks: int
    ) -> None:
        self.values, self.emitter, self.strategy, self.chunks = values, emitter, strategy, chunks
        self.site, self.op, self.layout = site, site.op, site.layout
        self.compute = Compute(emitter, values)
        self.slots: dict[str, str] = {}
        assert site.op.src is not None and site.op.dst is not None  # noqa: PT018
        self.src, self.dst, self.box = site.op.src, site.op.dst, values.box(site.op.dst)

    def declare(self, name: str, kind: str = "") -> None:
        """Allocates a buffer of the serial Program, unless the caller gives it."""
        buffer = self.values.buffers[name]
        if buffer.kind != "output":
            self.emitter.declare(buffer, kind or buffer.kind)

    def full(self, name: str, rows: Int, width: Int) -> View:
        """A buffer of the serial Program as a matrix."""
        return matrix(View(name), self.values.box(View(name)), rows, width)

    def shard(self, view: View, width: Int) -> View:
        """A shard (whose rows may differ between ranks) as a matrix."""
        sizes = self.values.box(view).sizes
        return view if len(sizes) == 2 and sizes[1] == width else view.view(-1, width)

    def pieces(self, halve: bool = False) -> Pieces:
        """Ranges of a rank's rows that go together; the last maybe in halves."""
        count = pieces(self.values, self.site, self.strategy, self.chunks)
        rows = self.layout.rows[0]  # where there are several, all are equal
        bounds = [rows * i // count for i in range(count + 1)]
        if halve:
            bounds.insert(count, rows * (2 * count - 1) // (2 * count))
        return tuple(Slice(0, *ends) for ends in pairwise(bounds)) if count > 1 else (None,)

    def slices(self, name: str, width: Int) -> Slices:
        """The site cut into slices."""
        count = slices(self.values, self.site, self.chunks)
        return Slices(self.emitter, f"{name}_slice", self.layout, width, self.box.dtype, count)

    def rows(self, index: Index, within: Slice | None) -> RowBlock:
        """The rows of one rank, or some of them."""
        return RowBlock.ranks(self.emitter, self.layout, index, within)

    def place(self, rows: View, index: Index, width: Int) -> ChunkPlace:
        """Where the rows of one rank lie in its shard, or in its part of an all-to-all."""
        layout = self.layout
        if self.op.kind != EXCHANGE:
            return in_shard(self.emitter, rows, layout, index, width)
        first, *rest = self.box.sizes
        sizes = (first // self.emitter.size, *rest)
        if layout.batch > 1 and not layout.padded:
            stacks = layout.batch, layout.rows[0], width
            return ChunkPlace(rows.view(-1, width), rows if sizes == stacks else rows.view(*stacks))
        shard = rows if sizes == (layout.shard[0], width) else rows.view(-1, width)
        return in_shard(self.emitter, shard, layout, index, width)

    # before matmuls

    def gather(self, site: GatherSite) -> None:
        """An all-gather, or an all-to-all, and the matmuls of its rows."""
        e, layout, width = self.emitter, site.layout, site.width
        for i in site.calls:
            self.declare(made_by(self.values.calls[i]).buffer, "fresh")
        name, box = self.dst.buffer, self.box

        def taking(i: int) -> OnRows:
            def take(index: Index, rows: View, within: Slice | None = None) -> None:
                self.matmuls((i,), self.rows(index, within), self.place(rows, index, width))

            return take

        if site.whole:
            self.declare(name)
        elif not self.strategy.sliced and not self.strategy.puts:
            self.declare(name, "local")
        takes = [taking(i) for i in site.calls]
        if self.op.kind == EXCHANGE:
            moved = e, self.strategy, name, (box.sizes[0] // e.size,) * e.size, width, box.dtype
            dispatch = Dispatch(*moved, shard=self.src, full=View(name), shape=box.sizes)
            replace(dispatch, whole=site.whole).run(*takes)
            return
        full, shard = self.full(name, sum(layout.shard), width), self.shard(self.src, width)
        if self.strategy.sliced:
            whole = full if site.whole else None
            self.slices(name, width).gather(shard, whole, partial(self.matmuls, site.calls))
            return
        moved = e, self.strategy, name, layout.shard, width, box.dtype
        kept = site.whole and layout.batch == 1 and len(set(layout.shard)) == 1
        lies = kept and self.strategy.puts and lifts(self.values, self.op)
        if lies:
            self.slots[name] = self.op.team
        gather = Gather(*moved, shard=shard, full=full, pieces=self.pieces())
        replace(gather, whole=site.whole, lies=lies).run(*takes)

    def matmuls(self, calls: Sequence[int], pick: RowBlock, rows: ChunkPlace) -> None:
        """Emits the part of matmuls that some rows make."""
        for i in calls:
            op = self.values.calls[i]
            result, box = made_by(op), self.values.box(made_by(op))
            self.compute.matmul(op, rows, pick.cut(result, box, box.sizes[-1]), pick)

    # after matmuls

    def stage(self, cone: Cone, in_place: bool) -> View | None:
        """Declares what others use; the cone's value as a matrix, if chunks may lie in it."""
        in_place = in_place and not (self.strategy.accumulates and cone.value in cone.used)
        for i in cone.ops:
            name = made_by(self.values.calls[i]).buffer
            if name in cone.used:
                self.declare(name, "fresh")
            elif name == cone.value and in_place:
                self.declare(name, "local")
        return self.full(cone.value, cone.rows, cone.width) if in_place else None

    def scatter(self, site: ScatterSite) -> None:
        """Matmuls and the reduce-scatter, or the all-to-all, of what they make."""
        e, layout, cone = self.emitter, site.layout, site.cone
        self.declare(self.dst.buffer)
        exchange, sliced = self.op.kind == EXCHANGE, self.strategy.sliced
        local = not self.strategy.fetched and layout.batch == 1 and not layout.padded
        stage = self.stage(cone, local and not (exchange or sliced))

        def compute(index: Index, rows: View, within: Slice | None = None) -> None:
            zero_padding(e, rows, layout, cone.width)
            place = self.place(rows, index, cone.width)
            self.compute.cone(cone, self.rows(index, within), place)

        if exchange:
            combine(e, self.strategy, cone.value, self.dst, self.box.sizes, self.box.dtype, compute)
            return
        out = self.shard(self.dst, cone.width)
        if sliced:
            self.slices(cone.value, cone.width).scatter(out, partial(self.compute.cone, cone))
        else:
            self.reduction(site, stage, out, layout.shard).run(compute)

    def reduction(
        self, site: ScatterSite, stage: View | None, out: View, sizes: tuple[Int, ...]
    ) -> Scatter:
        """The reduction of a site into `out`."""
        cone, cuts = site.cone, self.pieces()
        own: Pieces = (None,)
        if self.strategy.fuses and sums_beside(self.values, site, len(cuts)):
            own = self.pieces(halve=halved(site, len(cuts)))
        moved = self.emitter, self.strategy, cone.value, sizes, cone.width, self.box.dtype
        return Scatter(*moved, stage=stage, out=out, pieces=cuts, own=own)

    def all_reduce(self, site: ScatterSite) -> None:
        """Matmuls and the all-reduce of what they make: a reduce-scatter, then a gather."""
        e, cone, name = self.emitter, site.cone, self.dst.buffer
        self.declare(name)
        full = self.full(name, cone.rows, cone.width)
        stage = self.stage(cone, not self.strategy.fetched)
        if self.strategy.sliced:
            assert stage is not None
            count = slices(self.values, site, self.chunks)
            for i in range(count):
                start, stop = cone.rows * i // count, cone.rows * (i + 1) // count
                part, whole = (view.slice(0, start, stop) for view in (stage, full))
                pick = RowBlock.slice(e, 1, cone.rows, start, stop)
                self.compute.cone(cone, pick, ChunkPlace(part, part))
                e.collective("all_reduce", part, whole, reduce=self.op.reduce)
            return
        sizes, fused = balanced_sizes(cone.rows, e.size), self.strategy.fuses
        if fused and (count := slabs(self.values, site, self.chunks)):
            assert stage is not None
            self.in_slabs(site, stage, full, count)
            return

        def compute(index: Index, rows: View, within: Slice | None = None) -> None:
            self.compute.cone(cone, self.rows(index, within), ChunkPlace(rows, rows))

        mine = e.part(full, e.rank, sizes)
        if fused and by_kernel(part_bytes(self.values, site)):
            # Quicker than a copy from each peer behind a signal: one kernel does all.
            self.reduction(site, stage, mine, sizes).run(compute)
            e.collective("all_gather", mine, full, backend="peer")
            return
        moved = e, self.strategy, name, sizes, cone.width, self.box.dtype
        gather = Gather(*moved, shard=mine, full=full, in_place=True)
        if self.strategy.peers:  # peers fetch the sum from where it is made
            gather, mine = gather.show()
        self.reduction(site, stage, mine, sizes).run(compute)
        gather.run(lambda index, rows, within=None: None)

    def in_slabs(self, site: ScatterSite, stage: View, full: View, count: int) -> None:
        """An all-reduce in slabs: the others' parts of one travel while the next is computed."""
        cone, sizes = site.cone, site.layout.rows

        def compute(slab: Slice, part: Chunk, into: View) -> None:
            pick = RowBlock(1, cone.rows, slab, sizes, part.index, part)
            self.compute.cone(cone, pick, ChunkPlace(into, into))

        small = by_kernel(part_bytes(self.values, site) // count)
        dtype = self.values.buffers[cone.value].dtype
        moved = self.emitter, self.strategy, cone.value, sizes, cone.width, dtype
        Slabs(*moved, stage=stage, full=full, count=count, small=small).run(compute)
