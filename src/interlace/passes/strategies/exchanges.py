"""Transfers of an all-to-all, chunk by chunk, each directly to its owner.

Tokens go to the ranks of their experts before matmuls, and results come back after them. Nothing is
summed, so all strategies give the same bits.

    AllToAll(emitter, strategy, "r", shape, dtype).before(shard, full, whole, take)
    AllToAll(emitter, strategy, "y", shape, dtype).after(out, compute)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from interlace.ir import DType, Index, View
from interlace.ir.sizes import Int
from interlace.passes.strategies.emitter import Emitter
from interlace.strategies import NEAR_FIRST, OWNERS, Strategy

Rows = Callable[[Index, View], None]
"""Emits what is made of the chunk of a rank, or the chunk for it, which lies in a view."""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """An all-to-all of tensors of `shape`: even chunks along dimension 0, one for each rank."""

    emitter: Emitter
    row: Strategy
    name: str
    shape: tuple[Int, ...]
    dtype: DType

    def before(self, shard: View, full: View, whole: bool, take: Rows) -> None:
        """Emits the transfers of the chunks of `shard`, and has each taken, the own one first;
        `whole`: they are needed in `full` too."""
        e, transport, steps = self.emitter, self.row.transport, self.emitter.steps(NEAR_FIRST)

        def kept(index: Index, rows: View) -> None:
            take(index, rows)
            if whole:
                e.copy(rows, full.chunk(index, e.size))

        own = shard.chunk(e.rank, e.size)
        if transport == "messages":
            kept(e.rank, own)
            for step in steps:
                rows = full.chunk(step.chunk, e.size)
                e.exchange(shard.chunk(step.to, e.size), step.to, rows, step.source)
                take(step.chunk, rows)
        elif transport == "get":
            slot = self._alloc("shown", "symmetric")
            ready = e.names.new(f"{slot.buffer}_ready")
            e.own(shard, slot)
            e.notify(ready, e.team.others)
            kept(e.rank, own)
            for step in steps:
                rows = full.chunk(step.chunk, e.size)
                e.get(slot.chunk(e.rank, e.size), step.source, rows, ready)
                take(step.chunk, rows)
            e.free(slot)
        else:
            slots = self._alloc("slots", "symmetric")
            arrived = e.names.new(f"{slots.buffer}_arrived")
            for step in steps:
                to = slots.chunk(e.rank, e.size)
                e.put(shard.chunk(step.to, e.size), to, step.to, arrived)
            kept(e.rank, own)
            for step in steps:
                e.expect(arrived, step.source)
                kept(step.chunk, slots.chunk(step.chunk, e.size))
            e.free(slots)

    def after(self, out: View, compute: Rows) -> None:
        """Emits the computation of the chunks and their transfers into `out`: each leaves as soon
        as it is computed, the rank's own last."""
        e, transport, steps = self.emitter, self.row.transport, self.emitter.steps(OWNERS)
        parts = self._alloc("parts", "symmetric" if transport == "get" else "local")
        slots = self._alloc("slots", "symmetric") if transport == "put" else parts
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

    def _alloc(self, name: str, kind: str) -> View:
        return self.emitter.alloc(f"{self.name}_{name}", self.dtype, self.shape, kind)
