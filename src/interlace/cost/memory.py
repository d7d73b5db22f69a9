"""The memory of a run: what it holds at each op, its peak, and which modules that belongs to.

Counted from the Program alone, in the order of its list, in which the host issues the ops; streams
that run ahead of one another (threads of the CPU) may hold a little more for a moment, and what one
operator allocates and frees again is its own. Inputs that are never freed stay the caller's, as
weights do: they are not counted.

    inputs       that the caller gives up: each dies at its free
    outputs      output parameters, and what leaves the Program: saved tensors, gradients, results
    temporaries  the arena of the local buffers, and fresh ones that stay inside
    slots        of symmetric buffers, with their copies

>>> memory = run_memory(program)
>>> memory.peak, memory.peak_op
(81920, 17)
>>> print(memory.line())
peak 81,920 bytes at op 17 (layers.0.mlp): 16,384 of inputs given up, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

from interlace.ir import Alloc, Buffer, Loc, Program, View, views_in
from interlace.ir.lifetimes import released_after
from interlace.ir.overlap import RNG_BUFFER, Overlaps, representatives
from interlace.ir.sizes import UNBOUNDED, Int, SizeClass, at, deciding, greatest, settled
from interlace.ir.types import Where

KINDS = ("inputs", "outputs", "temporaries", "slots")
IN_WORDS = ("inputs given up", "outputs", "temporaries", "symmetric slots")
HEADINGS = ("module", *KINDS, "bytes")
"""Columns of the table of what is alive at the peak."""
ALIGNMENT = 256
"""Bytes at whose multiples buffers begin in the arena; enough for any vector load, and for what a
matrix multiplication likes best."""
COPIES = 2
"""Physical copies of a symmetric slot."""
MODULES = 12
"""Modules that the table names."""
NO_MODULE, IDLE = "(no module)", "(not in use then)"


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """Memory that a run holds from op `begin` on, and no longer at op `end`."""

    name: str
    kind: str
    nbytes: int
    begin: int
    end: int
    module: str = ""
    start: int = 0
    """Its first byte, where it is a part of another block: of the arena, or of a slot."""


@dataclass(frozen=True)
class RunMemory:
    """Blocks that a run of one rank holds."""

    program: Program
    rank: int
    blocks: tuple[MemoryBlock, ...]
    parts: Mapping[str, tuple[MemoryBlock, ...]] = field(
        default_factory=dict[str, tuple[MemoryBlock, ...]]
    )
    """Buffers inside of the arena and of each slot, by the name of that block."""
    sizes: str = ""
    """The values of named sizes that it is for; empty: the largest of the class."""
    uneven: bool = False
    """True if other ranks take less."""

    @cached_property
    def levels(self) -> dict[str, list[int]]:
        """Bytes of each kind during each op."""
        return {kind: self._level(b for b in self.blocks if b.kind == kind) for kind in KINDS}

    def _level(self, blocks: Iterable[MemoryBlock]) -> list[int]:
        num = len(self.program.ops) or 1
        changes = [0] * (num + 1)
        for block in blocks:
            changes[block.begin] += block.nbytes
            changes[block.end] -= block.nbytes
        return list(itertools.accumulate(changes[:num]))

    @cached_property
    def totals(self) -> list[int]:
        """Bytes of all kinds during each op."""
        return [sum(each) for each in zip(*self.levels.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The most bytes that the run holds."""
        return max(self.totals)

    @cached_property
    def peak_op(self) -> int:
        """The op at which it holds as many; of several, the first that uses most of the arena and
        of slots, which stay as they are."""
        used = self._level(itertools.chain(*self.parts.values()))
        return max(range(len(used)), key=lambda index: (self.totals[index], used[index]))

    def nbytes(self, kind: str) -> int:
        """Bytes of a kind at the peak."""
        return self.levels[kind][self.peak_op]

    def by_module(self) -> dict[str, dict[str, int]]:
        """Bytes of each kind that are alive at the peak, by module, the largest first; of the arena
        and of slots those that are in use, and what is left of them."""
        found: dict[str, dict[str, int]] = {}
        for block in self._held(self.blocks):
            left, covered = block.nbytes, 0
            parts = sorted(self._held(self.parts.get(block.name, ())), key=lambda part: part.start)
            for part in parts:
                stop = min(part.start + part.nbytes, block.nbytes)
                new = max(0, stop - max(part.start, covered))
                _add(found, part.module or NO_MODULE, block.kind, new)
                covered, left = max(covered, stop), left - new
            rest = IDLE if block.name in self.parts else block.module or NO_MODULE
            _add(found, rest, block.kind, left)
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def _held(self, blocks: Iterable[MemoryBlock]) -> Iterator[MemoryBlock]:
        index = self.peak_op
        return (block for block in blocks if block.begin <= index < block.end and block.nbytes)

    def rows(self) -> list[tuple[str, ...]]:
        """The table of what is alive at the peak, as `HEADINGS` names its columns."""
        known = list(self.by_module().items())
        rest: dict[str, dict[str, int]] = {}
        for _, kinds in known[MODULES:]:
            for kind, nbytes in kinds.items():
                _add(rest, f"{len(known) - MODULES} others", kind, nbytes)
        listed = [*known[:MODULES], *rest.items()]
        return [
            (
                name,
                *(f"{kinds[kind]:,}" if kinds.get(kind) else "-" for kind in KINDS),
                f"{sum(kinds.values()):,}",
            )
            for name, kinds in listed
        ]

    def line(self) -> str:
        """The peak, and what it consists of."""
        ops, index = self.program.ops, self.peak_op
        loc = ops[index].loc if ops else Loc()
        place = f" at op {index}" + (f" ({loc.module})" if loc.module else "")
        place += f" of rank {self.rank}" if self.uneven else ""
        place += f" where {self.sizes}" if self.sizes else ""
        kinds = [
            f"{self.nbytes(kind):,} of {words}{self._details(kind)}"
            for kind, words in zip(KINDS, IN_WORDS, strict=True)
            if self.nbytes(kind)
        ]
        return f"peak {self.peak:,} bytes{place}" + (f": {', '.join(kinds)}" if kinds else "")

    def _details(self, kind: str) -> str:
        blocks = [block for block in self.blocks if block.kind == kind and block.name in self.parts]
        if kind == "slots":
            return f" ({len(blocks)}, of {COPIES} copies)"
        for arena in blocks:
            parts = self.parts[arena.name]
            alone = sum(aligned(part.nbytes) for part in parts)
            return f" (arena {arena.nbytes:,} for {len(parts)} buffers, {alone:,} without reuse)"
        return ""

    def to_json(self) -> dict[str, object]:
        """The peak, and what is alive at it, as plain data."""
        return {
            "rank": self.rank,
            "sizes": self.sizes,
            "peak_bytes": self.peak,
            "peak_op": self.peak_op,
            **{kind: self.nbytes(kind) for kind in KINDS},
            "modules": self.by_module(),
        }


def _add(found: dict[str, dict[str, int]], module: str, kind: str, nbytes: int) -> None:
    if nbytes:
        kinds = found.setdefault(module, {})
        kinds[kind] = kinds.get(kind, 0) + nbytes


def aligned(size: int) -> int:
    """Bytes that a buffer of this size takes in the arena."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def run_memory(
    programs: Program | Sequence[Program],
    sizes: SizeClass | None = None,
    values: Mapping[str, int] | None = None,
) -> RunMemory:
    """The memory of a run on the rank that takes most.

    Named sizes are the largest of their class, or of the part `sizes` of it that runs; with
    `values` they are these, and so they are (the values at hand) where the class has no largest.
    The arena and slots are for all of the class in either case.
    """
    listed = [programs] if isinstance(programs, Program) else list(programs)
    found = [
        rank_memory(program, rank, sizes, values)
        for program in listed
        for rank in ((program.rank,) if program.rank is not None else representatives(program))
    ]
    most = max(found, key=lambda memory: memory.peak)
    most = replace(most, uneven=any(memory.peak != most.peak for memory in found))
    if values is None and most.peak >= UNBOUNDED:
        return run_memory(listed, sizes, (sizes or listed[0].sizes).values)
    return most


def rank_memory(
    program: Program,
    rank: int,
    sizes: SizeClass | None = None,
    values: Mapping[str, int] | None = None,
) -> RunMemory:
    """The memory of a run on one rank; arguments are those of `run_memory`."""
    if values is None:
        told = ""
    else:
        values = {**program.sizes.values, **values}
        told = ", ".join(f"{name} = {values[name]}" for name in program.sizes.values)
    with _sized(program, sizes):
        counted = _Counted(program, program.where(rank), values)
        return RunMemory(program, rank, tuple(counted.blocks()), counted.parts, told)


def lasting_bytes(program: Program, rank: int) -> tuple[int, dict[tuple[str, str], int]]:
    """Bytes of the arena, and of each slot, by team and name: what an Executor sets aside."""
    arena, slots = _storages(program, program.where(rank))
    return sum(map(aligned, arena.values())), slots


def _storages(
    program: Program, where: Where
) -> tuple[dict[tuple[bool, str], int], dict[tuple[str, str], int]]:
    """Bytes of each storage of local buffers, which stand one after another in the arena, and of
    each slot: as large on all ranks as on the one that needs most."""
    arena, slots = dict[tuple[bool, str], int](), dict[tuple[str, str], int]()
    overlaps = Overlaps(program)
    for buffer in overlaps.buffers.values():
        if buffer.kind == "symmetric" and buffer.team is not None:
            key = buffer.team, buffer.storage or buffer.name
            slots[key] = max(slots.get(key, 0), buffer.offset + overlaps.size(buffer))
        elif buffer.kind == "local" and buffer is not RNG_BUFFER:
            own = _storage(buffer)
            arena[own] = max(arena.get(own, 0), buffer.offset + greatest(_span(buffer, where)))
    return arena, slots


def _storage(buffer: Buffer) -> tuple[bool, str]:
    return bool(buffer.storage), buffer.storage or buffer.name


def _sized(program: Program, sizes: SizeClass | None) -> AbstractContextManager[object]:
    """Within it, sizes are compared as for this class."""
    return deciding(program.sizes) if sizes is None else settled(sizes)


def _span(buffer: Buffer, where: Where) -> Int:
    """Bytes from a buffer's first element to the end of its last."""
    return View(buffer.name).box(buffer, where).hull[1]


class _Counted:
    """The buffers of a Program on one rank, with the ops from which to which they are alive."""

    def __init__(self, program: Program, where: Where, values: Mapping[str, int] | None) -> None:
        self._program, self._where, self._values = program, where, values
        self.num_ops = max(len(program.ops), 1)
        self._buffers = program.buffers()
        self._returned = {v.buffer for arg in program.returned() for v in views_in(arg)}
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._modules: dict[str, str] = {}
        self._frees: dict[str, int] = {}
        self._given: set[str] = set()
        """Fresh buffers that an Alloc declares: they are allocated before a run's ops."""
        for index, op in enumerate(program.ops):
            order = op.ordering()
            if order.frees is not None:
                self._frees.setdefault(order.frees, index)
            names = {access.view.buffer for access in (*op.reads(), *op.writes())}
            names |= {buffer.name for buffer in op.declares()}
            for name in names:
                self._first.setdefault(name, index)
                self._last[name] = index
                if op.loc.module:
                    self._modules.setdefault(name, op.loc.module)
            if isinstance(op, Alloc) and op.buffer.kind == "fresh":
                self._given.add(op.buffer.name)
        self._leaves = {
            name: index + 1 for index, names in released_after(program).items() for name in names
        } | self._frees
        """The op from which on each buffer that a run lets go of is no longer held."""
        self._arena, self._slots = _storages(program, where)
        self.parts: dict[str, tuple[MemoryBlock, ...]] = {}

    def blocks(self) -> Iterator[MemoryBlock]:
        """The blocks; of the arena and of slots also the `parts`."""
        parts: dict[str, list[MemoryBlock]] = {}
        begins = itertools.accumulate(map(aligned, self._arena.values()), initial=0)
        *starts, total = begins
        starts = dict(zip(self._arena, starts, strict=True))
        for buffer in self._buffers.values():
            if buffer.kind == "local":
                begin, end = self._first.get(buffer.name, 0), self._last.get(buffer.name, -1) + 1
                start = starts[_storage(buffer)] + buffer.offset
                part = self._block(buffer, "temporaries", begin, end, start)
                parts.setdefault("arena", []).append(part)
            elif buffer.kind == "symmetric" and buffer.team is not None:
                name, begin = buffer.storage or buffer.name, self._first[buffer.name]
                end = self._frees.get(buffer.name, self.num_ops)
                part = self._block(buffer, "slots", begin, end, buffer.offset)
                parts.setdefault(f"{buffer.team}.{name}", []).append(part)
            elif (kind := self._kind(buffer)) is not None:
                begins = buffer.kind == "fresh" and buffer.name not in self._given
                begin = self._first[buffer.name] if begins else 0
                yield self._block(buffer, kind, begin, self._leaves.get(buffer.name, self.num_ops))
        self.parts |= {name: tuple(listed) for name, listed in parts.items()}
        if total:
            yield MemoryBlock("arena", "temporaries", total, 0, self.num_ops)
        for (team, name), nbytes in self._slots.items():
            yield MemoryBlock(f"{team}.{name}", "slots", COPIES * nbytes, 0, self.num_ops)

    def _kind(self, buffer: Buffer) -> str | None:
        """The kind of memory that a run adds with a buffer; None of what stays the caller's."""
        if buffer.kind == "input":
            return "inputs" if buffer.name in self._frees else None
        if buffer.kind == "output" or buffer.name in self._returned:
            return "outputs"
        return "temporaries"

    def _block(
        self, buffer: Buffer, kind: str, begin: int, end: int, start: int = 0
    ) -> MemoryBlock:
        span = _span(buffer, self._where)
        lasting = buffer.kind in ("local", "symmetric")
        nbytes = greatest(span) if lasting or self._values is None else at(span, self._values)
        module = self._modules.get(buffer.name, "")
        return MemoryBlock(buffer.name, kind, nbytes, begin, end, module, start)
