"""How the chunks of an all-to-all travel, each to the one rank that it is for.

Before matmuls (`Dispatch`: tokens go to the ranks of their experts) each chunk is handed on as soon
as it is there, the rank's own first; after matmuls (`Combine`: results go back) each chunk leaves
as soon as it is computed, the rank's own last. Nothing is summed, so all strategies give the same
bits. In order they cannot deadlock: what a rank waits for stands earlier in the list of its peer.

    Dispatch(emitter, strategy, "received", sizes, dtype).run(src, full, take, keep=False)
    Combine(emitter, strategy, "y", sizes, dtype).run(out, compute)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from interlace.ir import DType, Get, Group, Index, Put, Recv, Send, View
from interlace.passes.strategies.emitter import Emitter
from interlace.passes.strategies.table import Path, Strategy

OnChunk = Callable[[Index, View], None]
"""What takes, or computes, the rows of a rank, which lie (or shall lie) in a view."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of `sizes`: along dimension 0 one chunk for, or from, each rank."""

    emitter: Emitter
    row: Strategy
    name: str
    sizes: tuple[int, ...]
    dtype: DType

    def chunk(self, view: View, index: Index) -> View:
        """The chunk that goes to a rank, or comes from it."""
        return view.chunk(index, self.emitter.size)

    def buffer(self, name: str, kind: str) -> View:
        """A buffer for the chunks of all ranks."""
        return self.emitter.alloc(f"{self.name}_{name}", self.dtype, self.sizes, kind)

    def pass_on(self, path: Path, k: int, sent: View, received: View) -> None:
        """One message each way, at step `k`."""
        e = self.emitter
        to, source = e.at(path.to.at(k)), e.at(path.source.at(k))
        send = Send(src=self.chunk(sent, to), peer=to, **e.between)
        recv = Recv(dst=self.chunk(received, source), peer=source, **e.between)
        e.emit(Group(ops=(send, recv)))

    def put(self, src: View, slots: View, to: Index, arrived: str) -> None:
        """A chunk of this rank, in the slot for it on the rank that it is for."""
        e = self.emitter
        mine = self.chunk(slots, e.rank)
        e.emit(Put(src=src, dst=mine, peer=to, team=e.team.name))
        e.notify(arrived, to)

    def get(self, parts: View, source: Index, dst: View, ready: str) -> None:
        """What a rank has for this one."""
        e = self.emitter
        e.expect(ready, source)
        mine = self.chunk(parts, e.rank)
        e.emit(Get(src=mine, peer=source, team=e.team.name, dst=self.chunk(dst, source)))


@dataclass(frozen=True, slots=True)
class Dispatch(Exchange):
    """An all-to-all whose chunks matmuls take."""

    def run(self, src: View, full: View, take: OnChunk, keep: bool) -> None:
        """Emits the transfers; `keep` also leaves every chunk in its place in `full`."""
        e, path = self.emitter, self.row.gather
        assert path is not None
        sources = [e.at(path.source.at(k)) for k in e.others]

        def taken(index: Index, rows: View) -> None:
            take(index, rows)
            if keep:
                e.copy(rows, self.chunk(full, index))

        own = self.chunk(src, e.rank)
        match self.row.transport:
            case "messages":
                taken(e.rank, own)
                for k, source in zip(e.others, sources, strict=True):
                    self.pass_on(path, k, src, full)
                    take(source, self.chunk(full, source))
            case "get":
                shown = self.buffer("shown", "symmetric")
                ready = e.names.new(f"{shown.buffer}_ready")
                e.copy(src, shown)
                e.notify(ready, e.team.others)
                taken(e.rank, own)
                for source in sources:
                    self.get(shown, source, full, ready)
                    take(source, self.chunk(full, source))
                e.free(shown)
            case _:
                slots = self.buffer("slots", "symmetric")
                arrived = e.names.new(f"{slots.buffer}_arrived")
                for k in e.others:
                    to = e.at(path.to.at(k))
                    self.put(self.chunk(src, to), slots, to, arrived)
                taken(e.rank, own)
                for source in sources:
                    e.expect(arrived, source)
                    taken(source, self.chunk(slots, source))
                e.free(slots)


@dataclass(frozen=True, slots=True)
class Combine(Exchange):
    """An all-to-all whose chunks are computed one by one."""

    def run(self, out: View, compute: OnChunk) -> None:
        """Emits the chunks' computation and their transfers into `out`."""
        e, path = self.emitter, self.row.scatter
        assert path is not None
        transport = self.row.transport
        parts = self.buffer("parts", "symmetric" if transport == "get" else "local")
        slots = self.buffer("slots", "symmetric") if transport == "put" else None
        signal = "" if transport == "messages" else e.names.new(f"{(slots or parts).buffer}_ready")
        for k in e.others:
            to, source = e.at(path.to.at(k)), e.at(path.source.at(k))
            compute(to, self.chunk(parts, to))
            if transport == "messages":
                self.pass_on(path, k, parts, out)
            elif slots is not None:
                self.put(self.chunk(parts, to), slots, to, signal)
            else:
                e.notify(signal, to)
                self.get(parts, source, out, signal)
        compute(e.rank, self.chunk(out, e.rank))
        if slots is not None:
            for source in (e.at(path.source.at(k)) for k in e.others):
                e.expect(signal, source)
                e.copy(self.chunk(slots, source), self.chunk(out, source))
        if transport != "messages":
            e.free(slots or parts)
