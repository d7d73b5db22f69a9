"""Collectives as a whole, by copies between the ranks' memories: the strategy `copies`.

On GPUs copy engines move the bytes, so the matmuls under way keep all their SMs, of which a
collective of NCCL takes some 24: a matmul that has every SM takes a third longer beside one.

    why = unmovable(values, op)                    # "" where copies serve this collective
    ops = by_copies(values, names, op, number=1)   # in place of the collective
    ops = lifted([...], {"y": "tp"})               # with all others: `y` is a slot of its team now

Note [Where a gathered tensor lies]
    Each rank puts its part into the gathered tensors of all, which are slots of the team: `lifts`.
    One that leaves the Program cannot be a slot. Its parts are fetched, from a slot with the shard.

Note [Own parts]
    A copy from one place of a GPU to another is a kernel, and has to wait until a matmul that has
    all SMs ends. So the rank's own part is copied on the stream that computes, before the matmul.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from interlace.ir import Collective, Free, Index, Op, Slice, View
from interlace.passes.rewrite import Rewrite, declaring
from interlace.passes.sites.rows import balanced_sizes
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.emitter import Emitter, Names
from interlace.passes.strategies.transfers import Scatter
from interlace.strategies import NEAR_FIRST, STRATEGIES

BRING = STRATEGIES["peer", "put"]
KINDS = "all_gather", "reduce_scatter", "all_reduce"


def unmovable(values: Dataflow, op: Collective) -> str:
    """Why `copies` cannot serve a collective; empty where it can."""
    team = values.program.team(op.team)
    if op.kind not in KINDS or op.src is None or op.dst is None:
        return f"copies gather and reduce, and do no {op.kind}"
    if team.size < 2:
        return f"team {team.name} has one rank"
    if team.hosts is not None:
        return f"team {team.name} spans hosts, which share no memory"
    if op.backend not in (None, "peer"):
        return f"it names what moves it: {op.backend}"
    if op.reduce not in (None, "sum"):
        return f"it adds up, and the collective takes the {op.reduce}"
    src, dst = values.box(op.src), values.box(op.dst)
    if not (src.sizes and dst.sizes):
        return "it is of scalars"
    if not max(src.numel, dst.numel):
        return "it moves nothing"
    if not (src.contiguous and dst.contiguous):
        return "its tensors do not lie in one piece"
    return ""


def by_copies(values: Dataflow, names: Names, op: Collective, number: int | None) -> list[Op]:
    """The ops that do what a collective does."""
    e = Emitter(names, values.program.team(op.team), op, number, kernels=True)
    assert op.src is not None and op.dst is not None  # noqa: PT018
    name = op.dst.buffer
    src, dst = values.box(op.src), values.box(op.dst)
    shard = src if op.kind == "all_gather" else dst
    width = shard.sizes[-1]
    if op.splits is not None:
        width = math.prod(shard.sizes[1:])
        sizes = next(table.values for table in values.program.tables if table.name == op.splits)
    elif op.kind == "all_reduce":
        if shard.numel // width < e.size:  # such as a vector
            width = 1 if shard.numel % e.size else shard.numel // e.size
        sizes = balanced_sizes(shard.numel // width, e.size)
    else:
        sizes = (shard.numel // width,) * e.size
    x, y = (
        view if box.sizes == (box.numel // width, width) else view.view(-1, width)
        for view, box in ((op.src, src), (op.dst, dst))
    )
    moved = e, BRING, op.src.buffer, sizes, width, dst.dtype

    def lies(index: Index, rows: View, within: Slice | None = None) -> None:
        """Moves the rank's own part to the others'; all else that is summed lies there already."""
        if index == e.rank:
            e.own(e.part(x, e.rank, sizes), rows)

    def shard_into(out: View) -> None:
        """The rank's own part of what is gathered."""
        if op.kind == "all_gather":
            e.own(x, out)
        else:
            Scatter(*moved, stage=x, out=out).run(lies)

    mine = e.part(y, e.rank, sizes)
    if op.kind == "reduce_scatter":
        Scatter(*moved, stage=x, out=y).run(lies)
    elif lifts(values, op):
        shard_into(mine)
        arrived = e.names.new(f"{name}_arrived")
        for step in e.steps(NEAR_FIRST):
            e.put(x if op.kind == "all_gather" else mine, mine, step.to, arrived)
        for step in e.steps(NEAR_FIRST):
            e.expect(arrived, step.source)
    else:
        rows = max(sizes)
        slot = e.alloc(f"{name}_shard", dst.dtype, (rows, width), "symmetric")
        shown = e.head(slot, sizes, e.rank, rows)
        shard_into(shown)
        ready = e.names.new(f"{slot.buffer}_ready")
        e.notify(ready, e.team.others)
        e.own(shown, mine)
        for step in e.steps(NEAR_FIRST):
            theirs = e.head(slot, sizes, step.chunk, rows)
            e.get(theirs, step.source, e.part(y, step.chunk, sizes), ready)
        e.free(slot)
    return e.ops


def lifts(values: Dataflow, op: Collective) -> bool:
    """True if the gathered tensor can lie in a slot: Note [Where a gathered tensor lies]."""
    if op.kind not in ("all_gather", "all_reduce") or op.dst is None or not op.dst.covers_buffer:
        return False
    buffer = values.buffers[op.dst.buffer]
    made, used = values.makers[buffer.name], values.users.get(buffer.name, [])
    return (
        buffer.kind in ("local", "fresh")
        and (buffer.strides, buffer.storage) == (None, None)
        and buffer.name in values.allocs
        and buffer.name not in values.returned
        and len(made) == 1
        and min(used, default=made[0]) >= made[0]
    )


def lifted(ops: Sequence[Op], slots: Mapping[str, str]) -> tuple[Op, ...]:
    """The ops with these buffers as slots of their teams, freed behind their last use."""
    last = {
        access.view.buffer: i
        for i, op in enumerate(ops)
        for access in (*op.reads(), *op.writes())
        if access.view.buffer in slots
    }
    rewrite = Rewrite(ops)
    for i, op in enumerate(ops):
        ordering = op.ordering()
        buffer = ordering.takes
        if ordering.frees in slots:
            rewrite.replace(i)
        elif buffer is not None and buffer.name in slots:
            changes = {"kind": "symmetric", "team": slots[buffer.name], "storage": None}
            rewrite.replace(i, declaring(op, dataclasses.replace(buffer, **changes)))
    for name, i in last.items():
        rewrite.after(i, Free(buffer=name, site=ops[i].site))
    return rewrite.ops()
