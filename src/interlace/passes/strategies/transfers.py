"""Transfers of the chunks of a site between ranks, and the sums of what reductions move.

A gather hands each chunk to `take(rank, matrix)` as soon as it is there, the local one first; a
fused gather hands all chunks to one take, then to the next. A reduction has the rows of a rank
computed by `compute(rank, matrix)`, those of others first, the own last; the strategy gives the
order of the sum. In order they cannot deadlock: what a rank waits for stands earlier in the list of
its peer.

    Gather(emitter, strategy, "full", sizes, width, dtype, shard=shard, full=full).run(take)
    Dispatch(emitter, strategy, "full", sizes, width, dtype, ..., shape=shape).run(take)
    Scatter(emitter, strategy, "y", sizes, width, dtype, stage=stage, out=out).run(compute)

Note [Slabs]
    A large all-reduce behind a kernel is cut in slabs of rows, and each slab in a part for each
    rank, which sums it. The others' parts are computed first and put into their owners' slots.
    Each slab but the last is summed while the next is computed, into a slot that the peers fetch it
    from; after the computation only the sum of the last slab and its way back remain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from interlace.ir import Chunk, DType, Index, Slice, View
from interlace.ir.sizes import Int
from interlace.passes.strategies.emitter import Emitter, PathStep, Pieces, cut, rank_at
from interlace.passes.strategies.pieces import TO_OTHERS, TO_THE_FIRST
from interlace.strategies import NEAR_FIRST, OWNERS, Path, Strategy


class OnRows(Protocol):
    """Emits what is made of the rows of a rank, or what makes them, or only those `within` them."""

    def __call__(self, index: Index, rows: View, within: Slice | None = None) -> None: ...


def _together(takes: Sequence[OnRows]) -> OnRows:
    """All of them for each chunk."""

    def take(index: Index, rows: View, within: Slice | None = None) -> None:
        for each in takes:
            each(index, rows, within)

    return take


def _joined(pieces: Pieces) -> Slice | None:
    """All rows of pieces that follow one another."""
    first, last = pieces[0], pieces[-1]
    return None if first is None or last is None else Slice(0, first.start, last.stop)


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """Movement of matrices of `sizes[rank]` rows of `width`, one a rank."""

    emitter: Emitter
    strategy: Strategy
    name: str
    """The buffers that it makes are called so, and after what they hold."""
    sizes: tuple[Int, ...]
    width: Int
    dtype: DType

    def alloc(self, name: str, *shape: Int, kind: str = "local") -> View:
        """A buffer of its own, whose last dimension has the width."""
        shape = (*shape, self.width)
        return self.emitter.alloc(f"{self.name}_{name}", self.dtype, shape, kind)

    def head(self, view: View, owner: Index, dim: int = 0) -> View:
        """As many of the rows as `owner` has."""
        return self.emitter.head(view, self.sizes, owner, max(self.sizes), dim)

    def rows(self, matrices: View, index: Index, owner: Index) -> View:
        """Matrix `index` of several, as far as `owner` has rows."""
        matrix = matrices.chunk(index, self.emitter.size).view(max(self.sizes), self.width)
        return self.head(matrix, owner)


# gathers, and all-to-alls before matmuls


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(ChunkTransfer):
    """A gather of the `shard` of each rank."""

    shard: View
    full: View
    """The matrix of all shards, one after another. Peers put into a slot of its own, unless it
    `lies` in one."""
    whole: bool = True
    """True if the full matrix is needed beyond the chunks."""
    in_place: bool = False
    """True if the shard is its part of the full matrix already."""
    slot: View | None = None
    """Slot that `show` made: the shard lies in it, and peers can read it."""
    pieces: Pieces = (None,)
    """Ranges of a rank's rows that a kernel awaits one by one; None is all."""
    lies: bool = False
    """Put: True if the full matrix lies in a slot: Note [Where a gathered tensor lies] in
    whole.py."""

    def show(self) -> tuple[Gather, View]:
        """The same gather, from a shard that is yet to be computed into the view that this gives.

        Peers fetch it from there, whatever the strategy; that moves the fewest bytes.
        """
        slot, shard = self._shown()
        return dataclasses.replace(self, slot=slot, shard=shard, in_place=False), shard

    def run(self, *takes: OnRows) -> None:
        """Emits the transfers."""
        take, path = _together(takes), self.path
        assert path is not None
        if self.slot is not None:
            self._get(NEAR_FIRST, take)
        elif self.strategy.primitive == "messages":
            self._messages(path, take)
        elif self.strategy.primitive == "get":
            self._get(path, take)
        else:
            kept = (self._keep,) if self.whole and not self.lies else ()
            # a kernel that takes all chunks must not be held up by another matmul
            if self.strategy.fuses:
                self._put(path, takes, kept)
            else:
                self._put(path, (), (_together((*takes, *kept)),))

    # where chunks lie

    @property
    def path(self) -> Path | None:
        """The way that chunks go."""
        return self.strategy.gather

    @property
    def own(self) -> View:
        """The rank's own chunk."""
        return self.shard

    def part(self, index: Index) -> View:
        """A rank's part of the full matrix."""
        return self.emitter.part(self.full, index, self.sizes)

    def _leaving(self, step: PathStep) -> View:
        """The chunk that leaves at a step."""
        return self.shard if step.sent == self.emitter.rank else self.part(step.sent)

    def _place(self, slots: View, index: Index) -> View:
        """Where a rank's chunk lies in a slot for the chunks of all."""
        return self.part(index) if self.lies else self.rows(slots, index, index)

    def _slots(self) -> View:
        """A slot for the chunks of all."""
        return self.alloc("slots", self.emitter.size, max(self.sizes), kind="symmetric")

    def _shown(self) -> tuple[View, View]:
        """A slot that peers fetch from, and where this rank's rows lie in it."""
        slot = self.slot or self.alloc("shard", max(self.sizes), kind="symmetric")
        return slot, self.head(slot, self.emitter.rank)

    def _fetched(self, slot: View, step: PathStep) -> View:
        """Rows to fetch from a peer's slot at a step."""
        return self.head(slot, step.chunk)

    # by each primitive

    def _keep(self, index: Index, rows: View, within: Slice | None = None) -> None:
        """Puts a chunk in its place in the full matrix, where it is not there yet."""
        if index != self.emitter.rank or not self.in_place:
            self.emitter.copy(rows, cut(self.part(index), within))

    def _local(self, take: OnRows) -> None:
        take(self.emitter.rank, self.own)
        if self.whole:
            self._keep(self.emitter.rank, self.own)

    def _messages(self, path: Path, take: OnRows) -> None:
        self._local(take)
        for step in self.emitter.steps(path):
            rows = self.part(step.chunk)
            self.emitter.exchange(self._leaving(step), step.to, rows, step.source)
            take(step.chunk, rows)

    def _get(self, path: Path, take: OnRows) -> None:
        """Each rank shows its rows; its peers fetch them in the order in which they need them."""
        e = self.emitter
        slot, mine = self._shown()
        ready = e.names.new(f"{slot.buffer}_ready")
        e.own(self.shard, mine)
        e.notify(ready, e.team.others)
        if self.slot is None:
            self._local(take)
        for step in e.steps(path):
            rows = self.part(step.chunk)
            e.get(self._fetched(slot, step), step.source, rows, ready)
            take(step.chunk, rows)
        if self.slot is not None:  # nothing waits for the rank's own rows
            self._local(take)
        e.free(slot)

    def _put(self, path: Path, kernels: Sequence[OnRows], others: Sequence[OnRows]) -> None:
        """Each rank writes its rows into its peers' slots, in the order in which they need them;
        kernels take them in pieces: Note [Rows that come in time] in pieces.py."""
        e, steps = self.emitter, self.emitter.steps(path)
        slots = self.full if self.lies else self._slots()
        arrived, count = e.names.new(f"{slots.buffer}_arrived"), len(self.pieces)
        for step in steps:
            together = TO_THE_FIRST if step is steps[0] else TO_OTHERS
            came = 0
            for number in together if count > 1 else (1,):
                within = _joined(self.pieces[came : came + number])
                came += number
                to = cut(self._place(slots, e.rank), within)
                e.put(cut(self._leaving(step), within), to, step.to, arrived, came)
        if self.lies:
            self._keep(e.rank, self.own)
        for take in others:
            take(e.rank, self.own)
            for step in steps:
                e.expect(arrived, step.source, count)
                take(step.chunk, self._place(slots, step.chunk))
        for take in kernels:
            take(e.rank, self.own)
            for step in steps:
                for number, within in enumerate(self.pieces, start=1):
                    e.expect(arrived, step.source, number)
                    take(step.chunk, cut(self._place(slots, step.chunk), within), within)
        if not self.lies:
            e.free(slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(Gather):
    """An all-to-all before matmuls: `shard` and `full` hold even chunks, one for each rank.

    Tokens go to the ranks of their experts, each chunk to its owner directly. Nothing is summed, so
    all strategies give the same bits.
    """

    shape: tuple[Int, ...]
    """The sizes of both tensors."""

    @property
    def path(self) -> Path | None:
        """The way that chunks go."""
        return NEAR_FIRST

    @property
    def own(self) -> View:
        """The rank's own chunk."""
        return self.shard.chunk(self.emitter.rank, self.emitter.size)

    def _leaving(self, step: PathStep) -> View:
        return self.shard.chunk(step.to, self.emitter.size)

    def _place(self, slots: View, index: Index) -> View:
        return slots.chunk(index, self.emitter.size)

    def _tensor(self, name: str) -> View:
        e = self.emitter
        return e.alloc(f"{self.name}_{name}", self.dtype, self.shape, "symmetric")

    def _slots(self) -> View:
        return self._tensor("slots")

    def _shown(self) -> tuple[View, View]:
        slot = self._tensor("shown")
        return slot, slot

    def _fetched(self, slot: View, step: PathStep) -> View:
        return slot.chunk(self.emitter.rank, self.emitter.size)


# reductions, and all-to-alls behind matmuls


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter(ChunkTransfer):
    """A reduction of which each rank keeps its rows, in `out`."""

    stage: View | None
    """A matrix of all ranks' rows that chunks may be computed into; None: make one."""
    out: View
    pieces: Pieces = (None,)
    """Put: ranges of a rank's rows, each computed, moved and summed as one, to leave soon; None is
    all."""
    own: Pieces = (None,)
    """Ranges of the own rows, each computed and summed as one, so that all but the last are summed
    while others are computed: the pieces, the last of them maybe halved."""

    def run(self, compute: OnRows) -> None:
        """Emits the chunks' computation, their transfers and the sum."""
        path = self.strategy.scatter
        assert path is not None
        if self.strategy.primitive == "messages":
            self._messages(path, compute)
        elif self.strategy.primitive == "get":
            self._get(path, compute)
        else:
            self._put(path, compute)

    def _staged(self) -> Callable[[Index], View]:
        """Where the rows of each rank are computed."""
        stage = self.stage or self.alloc("parts", sum(self.sizes))
        return lambda index: self.emitter.part(stage, index, self.sizes)

    def _sum(self, slots: View, within: Slice | None = None) -> None:
        """Adds up what all made of the rank's own rows, or of some."""
        slots, out = self.head(slots, self.emitter.rank, dim=1), self.out
        if within is not None:
            slots, out = slots.then(dataclasses.replace(within, dim=1)), out.then(within)
        self.emitter.sum_slots(slots, out)

    def _messages(self, path: Path, compute: OnRows) -> None:
        """Sends what came from one neighbour, plus this rank's part, to the other."""
        e, staged = self.emitter, self._staged()
        count = min(2, e.size - 1)
        buffers = [self.alloc(f"received_{i}", max(self.sizes)) for i in range(count)]
        received: View | None = None

        def add(mine: View, out: View) -> None:
            e.call("aten.add.out", (received, mine), out)

        for k, step in enumerate(e.steps(path), 1):
            rows = staged(step.chunk)
            compute(step.chunk, rows)
            if received is not None:
                add(rows, rows)
            received = self.head(buffers[k % count], rank_at(e.team, path.chunk.at(k + 1)))
            e.exchange(rows, step.to, received, step.source)
        compute(e.rank, staged(e.rank))
        add(staged(e.rank), self.out)

    def _get(self, path: Path, compute: OnRows) -> None:
        """Parts are computed into a slot that their owner fetches them from."""
        e, largest = self.emitter, max(self.sizes)
        parts = self.alloc("parts", e.size, largest, kind="symmetric")
        slots = self.alloc("slots", e.size, largest)
        ready = e.names.new(f"{parts.buffer}_ready")
        for step in e.steps(path):
            compute(step.chunk, self.rows(parts, step.chunk, step.chunk))
            e.notify(ready, step.to)
            into = self.rows(slots, step.source, e.rank)
            e.get(self.rows(parts, e.rank, e.rank), step.source, into, ready)
        compute(e.rank, self.rows(slots, e.rank, e.rank))
        self._sum(slots)
        e.free(parts)

    def _put(self, path: Path, compute: OnRows) -> None:
        """Parts are written into their owner's slot for this rank."""
        e, staged = self.emitter, self._staged()
        slots = self.alloc("slots", e.size, max(self.sizes), kind="symmetric")
        arrived = e.names.new(f"{slots.buffer}_arrived")
        mine, steps = self.rows(slots, e.rank, e.rank), list(e.steps(path))
        for step, (number, within) in product(steps, enumerate(self.pieces, start=1)):
            dst = cut(self.rows(slots, e.rank, step.chunk), within)
            src = cut(staged(step.chunk), within)
            compute(step.chunk, src, within)
            e.put(src, dst, step.to, arrived, number)
        for within in self.own:
            compute(e.rank, cut(mine, within), within)
        for number, within in enumerate(max(self.own, self.pieces, key=len), start=1):
            for step in steps:
                e.expect(arrived, step.source, min(number, len(self.pieces)))
            self._sum(slots, within)
        e.free(slots)


def combine(
    e: Emitter,
    strategy: Strategy,
    name: str,
    out: View,
    shape: tuple[Int, ...],
    dtype: DType,
    compute: OnRows,
) -> None:
    """Emits the chunks of an all-to-all after matmuls, and their transfers into `out`: each leaves
    for its owner as soon as it is computed, the rank's own last. Nothing is summed."""

    def alloc(part: str, kind: str) -> View:
        return e.alloc(f"{name}_{part}", dtype, shape, kind)

    primitive, steps = strategy.primitive, e.steps(OWNERS)
    parts = alloc("parts", "symmetric" if primitive == "get" else "local")
    slots = alloc("slots", "symmetric") if primitive == "put" else parts
    signal = "" if primitive == "messages" else e.names.new(f"{slots.buffer}_ready")
    for step in steps:
        rows, into = parts.chunk(step.to, e.size), out.chunk(step.source, e.size)
        compute(step.to, rows)
        if primitive == "messages":
            e.exchange(rows, step.to, into, step.source)
        elif primitive == "put":
            e.put(rows, slots.chunk(e.rank, e.size), step.to, signal)
        else:
            e.notify(signal, step.to)
            e.get(parts.chunk(e.rank, e.size), step.source, into, signal)
    compute(e.rank, out.chunk(e.rank, e.size))
    for step in steps if primitive == "put" else ():
        e.expect(signal, step.source)
        e.copy(slots.chunk(step.source, e.size), out.chunk(step.source, e.size))
    if primitive != "messages":
        e.free(slots)


# slab by slab: Note [Slabs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slabs(ChunkTransfer):
    """The sum over all ranks of a matrix, in `full`; `sizes` are the rows of all slabs that each
    rank sums, equal multiples of `count`."""

    stage: View
    """A matrix of all rows that parts may be computed into."""
    full: View
    count: int
    small: bool
    """True if the last slab goes back by one kernel, False for copies as of the others."""

    def run(self, compute: Callable[[Slice, Chunk, View], None]) -> None:
        """Emits the computation of the parts (by `compute(slab, part, into)`), their transfers, the
        sums and their way back."""
        e, path = self.emitter, self.strategy.scatter
        assert path is not None
        slots = self.alloc("slots", e.size, self.sizes[0], kind="symmetric")
        copied = self.count - 1 if self.small else self.count
        height = self.sizes[0] // self.count
        sums = self.alloc("sums", copied * height, kind="symmetric")
        arrived = e.names.new(f"{slots.buffer}_arrived")
        ready = e.names.new(f"{sums.buffer}_ready")
        rows = height * e.size
        bounds = [Slice(0, rows * i, rows * (i + 1)) for i in range(self.count)]

        def part(view: View, number: int, index: Index) -> View:
            """A rank's part of a slab."""
            return view.then(bounds[number]).then(Chunk(index, e.size))

        def piece(view: View, number: int, dim: int = 0) -> View:
            """The rows of one slab in a matrix (or several) of the parts of all slabs."""
            return view.slice(dim, number * height, (number + 1) * height)

        for number in range(self.count):
            slab, value = bounds[number], number + 1
            slot = piece(self.rows(slots, e.rank, e.rank), number)
            for step in e.steps(path):
                src = part(self.stage, number, step.chunk)
                compute(slab, Chunk(step.chunk, e.size), src)
                e.put(src, slot, step.to, arrived, value)
            compute(slab, Chunk(e.rank, e.size), slot)
            mine = part(self.full, number, e.rank)
            for step in e.steps(path):
                e.expect(arrived, step.source, value)
            into = mine if number == copied else piece(sums, number)
            e.sum_slots(piece(slots, number, dim=1), into)
            if number == copied:
                e.collective("all_gather", mine, self.full.then(slab), backend="peer")
                continue
            e.notify(ready, e.team.others, value)
            for step in e.steps(NEAR_FIRST):
                dst = part(self.full, number, step.source)
                e.get(piece(sums, number), step.source, dst, ready, value)
        for number in range(copied):
            e.copy(piece(sums, number), part(self.full, number, e.rank))
        e.free(slots)
        e.free(sums)
