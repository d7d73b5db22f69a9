"""Collectives as a whole, by copies between the ranks' memories: the strategy `copies`.

On GPUs copy engines move the bytes, so the matmuls under way keep all their SMs, of which a
collective of NCCL takes some 24: a matmul that has every SM takes a third longer beside one.
Shards are fetched by those who gather them; what is summed is put into a slot of its owner, which
adds up.

    why = unmovable(values, op)                    # "" where copies serve this collective
    ops = by_copies(values, names, op, number=1)   # in place of the collective
"""

from __future__ import annotations

import math
from typing import Any

from interlace.ir import Collective, Op, Slice, View
from interlace.passes.sites.rows import balanced_sizes
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.emitter import Emitter, Names, Place
from interlace.passes.strategies.gathers import Gather
from interlace.passes.strategies.scatters import Scatter
from interlace.strategies import STRATEGIES

FETCH, BRING = STRATEGIES["peer", "get"], STRATEGIES["peer", "put"]
KINDS = "all_gather", "reduce_scatter", "all_reduce"


def unmovable(values: Dataflow, op: Collective) -> str:
    """Why `copies` cannot serve a collective; empty where it can."""
    team = values.program.team(op.team)
    if op.kind not in KINDS or op.src is None or op.dst is None:
        return f"copies gather and reduce, and this is a {op.kind}"
    if team.size < 2:
        return f"team {team.name} has one rank"
    if team.hosts is not None:
        return f"team {team.name} spans hosts, which share no memory"
    if op.backend not in (None, "peer"):
        return f"it names what moves it: {op.backend}"
    if op.reduce not in (None, "sum"):
        return f"it adds up, and the collective takes the {op.reduce}"
    src, dst = values.box(op.src), values.box(op.dst)
    if not (max(src, dst, key=lambda box: box.numel).numel and src.sizes and dst.sizes):
        return "it moves nothing"
    if not (src.contiguous and dst.contiguous):
        return "its tensors do not lie in one piece"
    return ""


def by_copies(values: Dataflow, names: Names, op: Collective, number: int | None) -> list[Op]:
    """The ops that do what a collective does."""
    e = Emitter(names, values.program.team(op.team), op, number)
    assert op.src is not None and op.dst is not None  # noqa: PT018
    src, dst = values.box(op.src), values.box(op.dst)
    shard = src if op.kind == "all_gather" else dst
    width = shard.sizes[-1]
    if op.splits is not None:
        width = math.prod(shard.sizes[1:])
        sizes = next(table.values for table in values.program.tables if table.name == op.splits)
    elif op.kind == "all_reduce":
        sizes = balanced_sizes(shard.numel // width, e.size)
    else:
        sizes = (shard.numel // width,) * e.size
    x, y = (
        view if box.sizes == (box.numel // width, width) else view.view(-1, width)
        for view, box in ((op.src, src), (op.dst, dst))
    )
    common: dict[str, Any] = {"sizes": sizes, "width": width, "dtype": dst.dtype}

    def copied(index: Place, shard: View, within: Slice | None = None) -> None:
        """What is summed lies there already; only the rank's own part goes to the others'."""
        if index == e.rank:
            e.copy(e.part(x, e.rank, sizes), shard)

    if op.kind == "reduce_scatter":
        Scatter(e, BRING, op.src.buffer, x, y, **common).run(copied)
        return e.ops
    gather, mine = Gather(e, FETCH, x, y, **common).show()
    if op.kind == "all_gather":
        e.copy(x, mine)
    else:
        Scatter(e, BRING, op.src.buffer, x, mine, **common).run(copied)
    gather.run(lambda index, rows, within=None: None)
    return e.ops
