"""plan_memory: where every buffer lives, and for how long.

Buffers that stay inside the Program share one `arena` by lifetime, symmetric ones the slots of
their team's pool; what leaves the Program is allocated by torch. `Alloc` stands right before the
first use, `Free` of fresh and symmetric buffers after the last. Bytes are reused only where the
Program's data already orders all their uses, so nothing waits longer and no event is added. All is
laid out for the largest sizes of the Program's class, so offsets are numbers.

    h = alloc(f32[64, 256], storage="arena", offset=4096)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.errors import PassError
from interlace.ir import Alloc, Buffer, Free, Op, Program, Remark, View
from interlace.ir.operators import matmul_of
from interlace.ir.overlap import Overlaps
from interlace.ir.sizes import UNBOUNDED
from interlace.passes.dependencies import dependencies
from interlace.passes.fuse import groups
from interlace.passes.insert_sync import Order, clocks, strip_events
from interlace.passes.rewrite import Rewrite, declaring
from interlace.passes.uses import allocs_of, returned_by, used_by

ARENA = "arena"
ALIGNMENT = 256
"""Bytes; enough for any vector load, and for what a matrix multiplication likes best."""


@dataclass(frozen=True)
class PlanMemory:
    """Places `Alloc` and `Free`, and shares storage."""

    name: ClassVar[str] = "plan_memory"
    reuse: bool = True
    """False gives every local buffer bytes of its own, and every symmetric one a slot."""

    def run(self, program: Program) -> Program:
        """The same ops on the same streams, with memory planned."""
        program = _place_allocs(_localise(strip_events(program)))
        lives = Lives.of(program)
        overlaps = Overlaps(program)
        sizes = {name: overlaps.size(lives.buffers[name]) for name in lives.uses}
        sizes = {name: size for name, size in sizes.items() if size < UNBOUNDED}
        offsets = _pack(lives, sizes, self.reuse)
        frees = _place_frees(lives, len(program.ops))
        slots = _take_slots(lives, frees, sizes, self.reuse)
        rewrite = Rewrite(program.ops)
        storage = {name: (ARENA, offset) for name, offset in offsets.items()}
        storage |= {name: (slot, 0) for name, slot in slots.items()}
        allocs = allocs_of(program.ops)
        for name, (holder, offset) in storage.items():
            buffer = dataclasses.replace(lives.buffers[name], storage=holder, offset=offset)
            rewrite.replace(allocs[name], declaring(program.ops[allocs[name]], buffer))
        for index, freed in frees.items():
            rewrite.after(index, *freed)
        remarks = _remarks(lives, offsets, slots, frees, sizes)
        kept = tuple(r for r in program.remarks if r.pass_name != self.name)
        return program.replace(ops=rewrite.ops(), remarks=kept).remarked(remarks)


def _localise(program: Program) -> Program:
    """Fresh buffers that stay inside become local; local ones that leave, or whose size has no
    bound in the class, become fresh."""
    escaping, overlaps = returned_by(program), Overlaps(program)
    escaping |= {b.name for b in overlaps.buffers.values() if overlaps.size(b) >= UNBOUNDED}
    rewrite = Rewrite(program.ops)
    for name, index in allocs_of(program.ops).items():
        buffer = overlaps.buffers[name]
        if buffer.kind in ("fresh", "local"):
            kind = "fresh" if name in escaping else "local"
            buffer = dataclasses.replace(buffer, kind=kind, storage=None, offset=0)
            rewrite.replace(index, declaring(program.ops[index], buffer))
    for index, op in program.calls().items():
        if (into := _into(op.fn)) and len(op.fresh) == 1:
            (buffer,) = op.fresh
            if buffer.name not in escaping and buffer.strides is None:
                rewrite.before(index, Alloc(buffer=dataclasses.replace(buffer, kind="local")))
                given = dataclasses.replace(op, fn=into, outs=(View(buffer.name),), fresh=())
                rewrite.replace(index, given)
    return program.replace(ops=rewrite.ops())


def _into(fn: str) -> str:
    """The overload of a matmul that writes into given memory, with the same arithmetic."""
    matmul = matmul_of(fn)
    return matmul.into if matmul is not None and not matmul.scaled and fn != matmul.into else ""


def _uses(program: Program) -> list[set[str]]:
    """The buffers that each op uses; those of a kernel are in use from its first op to its last."""
    used = [used_by((op,)) for op in program.ops]
    for group in groups(program):
        every = used_by(program.ops[i] for i in group)
        used[group[0]] |= every
        used[group[-1]] |= every
    return used


def _place_allocs(program: Program) -> Program:
    """Each `Alloc` right before the first use, on its stream; no `Free`."""
    allocs, used = allocs_of(program.ops), _uses(program)
    pending = dict(allocs)
    rewrite = Rewrite(program.ops)
    for index, op in enumerate(program.ops):
        ordering = op.ordering()
        if (buffer := ordering.takes) is not None and allocs[buffer.name] != index:
            raise PassError(
                f"plan_memory: {buffer.name!r} is allocated twice; give the second a new name"
            )
        if buffer is not None or ordering.frees is not None:
            rewrite.replace(index)
            continue
        for name in sorted(used[index] & pending.keys()):
            alloc = program.ops[pending.pop(name)]
            rewrite.before(index, dataclasses.replace(alloc, stream=op.stream))
    escaping = returned_by(program)
    left = [program.ops[index] for name, index in pending.items() if name in escaping]
    return program.replace(ops=(*rewrite.ops(), *left))


@dataclass(frozen=True, slots=True)
class Lives:
    """Who uses each buffer that the Program declares, and how those uses are ordered."""

    ops: tuple[Op, ...]
    order: Order
    buffers: Mapping[str, Buffer]
    uses: dict[str, list[int]]
    """Ops that use each buffer, in order of first use; of a fresh one also the declaration."""
    escaping: set[str]
    inside: set[int]
    """Ops that another one of the same kernel follows."""

    @classmethod
    def of(cls, program: Program) -> Lives:
        """The lives of a Program's buffers, as the order of its data allows them."""
        buffers = program.buffers()
        params = {buffer.name for buffer in program.params}
        uses: dict[str, list[int]] = {}
        for index, used in enumerate(_uses(program)):
            for name in sorted(used):
                if name in buffers and name not in params:
                    uses.setdefault(name, []).append(index)
        order = clocks(program.ops, dependencies(program, listed=False))
        inside = {i for group in groups(program) for i in group[:-1]}
        return cls(program.ops, order, buffers, uses, returned_by(program), inside)

    def last(self, name: str) -> list[int]:
        """Position that each stream must have reached for every use of the buffer to be done."""
        reached = [0] * len(self.order.streams)
        for index in self.uses[name]:
            lane = self.order.lane[index]
            reached[lane] = max(reached[lane], self.order.position[index])
        return reached

    def done_before(self, last: Sequence[int], name: str) -> bool:
        """True if streams that reach the positions `last` do so before any use of `name`."""
        seen: set[int] = set()
        for index in self.uses[name]:
            lane = self.order.lane[index]
            if lane not in seen:  # a stream's later uses come after its first
                seen.add(lane)
                clock = self.order.clock[index]
                before = (c - (i == lane) for i, c in enumerate(clock))
                if any(need > has for need, has in zip(last, before, strict=True)):
                    return False
        return True


def _pack(lives: Lives, sizes: Mapping[str, int], reuse: bool) -> dict[str, int]:
    """An offset in the arena for every local buffer: the first gap that is free by then."""
    offsets: dict[str, int] = {}
    active: list[tuple[list[int], int, int]] = []  # (how far its uses reach, first byte, last)
    floor = _Floor(lives.order)
    for name, uses in lives.uses.items():
        if lives.buffers[name].kind != "local":
            continue
        if reuse:
            least = floor.at(uses[0])
            active = [a for a in active if any(n > h for n, h in zip(a[0], least, strict=True))]
        taken = [(a[1], a[2]) for a in active if not (reuse and lives.done_before(a[0], name))]
        size, offset = _aligned(sizes[name]), 0
        for start, stop in sorted(taken):
            if offset + size <= start:
                break
            offset = max(offset, stop)
        offsets[name] = offset
        active.append((lives.last(name), offset, offset + size))
    return offsets


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Floor:
    """Position that each stream has certainly reached for all that is listed from an op on."""

    def __init__(self, order: Order) -> None:
        self.order, self.index = order, 0
        self.latest = [(0,) * len(order.streams) for _ in order.streams]
        self.left = [order.lane.count(lane) for lane in range(len(order.streams))]

    def at(self, index: int) -> list[int]:
        """The least that any stream with ops to come knows; `index` may only grow."""
        for i in range(self.index, index):
            lane = self.order.lane[i]
            self.latest[lane] = self.order.clock[i]
            self.left[lane] -= 1
        self.index = max(self.index, index)
        open_ = [clock for clock, left in zip(self.latest, self.left, strict=True) if left]
        return [min(column) for column in zip(*open_, strict=True)]


def _place_frees(lives: Lives, count: int) -> dict[int, list[Free]]:
    """After which op each buffer is freed: the first that comes after all uses."""
    ending: dict[int, list[str]] = {}
    for name, uses in lives.uses.items():
        kind = lives.buffers[name].kind
        if kind == "symmetric" or (kind == "fresh" and name not in lives.escaping):
            ending.setdefault(uses[-1], []).append(name)
    frees: dict[int, list[Free]] = {}
    pending: dict[str, list[int]] = {}
    for index in range(count):
        pending.update((name, lives.last(name)) for name in ending.get(index, ()))
        clock = lives.order.clock[index]
        for name, last in () if index in lives.inside else list(pending.items()):
            if all(need <= has for need, has in zip(last, clock, strict=True)):
                del pending[name]
                free = Free(buffer=name, stream=lives.ops[index].stream)
                frees.setdefault(_told(lives.ops, index), []).append(free)
    for name in pending:  # a slot must be given back, if a stream has to wait for that
        if lives.buffers[name].kind == "symmetric":
            free = Free(buffer=name, stream=lives.ops[lives.uses[name][-1]].stream)
            frees.setdefault(count - 1, []).append(free)
    return frees


def _told(ops: Sequence[Op], index: int) -> int:
    """The last of an op and the notifies that follow it: they do not wait for what is freed."""
    following = itertools.takewhile(
        lambda op: op.ordering().raises and op.stream == ops[index].stream, ops[index + 1 :]
    )
    return index + sum(1 for _ in following)


def _take_slots(
    lives: Lives, frees: Mapping[int, list[Free]], sizes: Mapping[str, int], reuse: bool
) -> dict[str, str]:
    """The slot of each symmetric buffer: one that is free by then and fits best, or a new one."""
    names: dict[str, str] = {}
    size: dict[tuple[str | None, str], int] = {}
    idle: dict[str | None, list[str]] = {}
    for index, op in enumerate(lives.ops):
        buffer = op.ordering().takes
        if buffer is not None and buffer.kind == "symmetric":
            wanted, team = sizes.get(buffer.name, 0), buffer.team
            free = idle.setdefault(team, [])
            best = min(free, key=lambda s: abs(size[team, s] - wanted)) if free and reuse else None
            if best is None:
                best = f"s{sum(owner == team for owner, _ in size)}"
            else:
                free.remove(best)
            size[team, best] = max(wanted, size.get((team, best), 0))
            names[buffer.name] = best
        for released in frees.get(index, ()):
            if released.buffer in names:
                team = lives.buffers[released.buffer].team
                idle.setdefault(team, []).append(names[released.buffer])
    return names


def _remarks(
    lives: Lives,
    offsets: Mapping[str, int],
    slots: Mapping[str, str],
    frees: Mapping[int, list[Free]],
    sizes: Mapping[str, int],
) -> list[Remark]:
    arena = max((offset + _aligned(sizes[name]) for name, offset in offsets.items()), default=0)
    alone = sum(_aligned(sizes[name]) for name in offsets)
    pool: dict[tuple[str | None, str], int] = {}
    for name, slot in slots.items():
        key = (lives.buffers[name].team, slot)
        pool[key] = max(pool.get(key, 0), sizes.get(name, 0))
    fresh = {name: size for name, size in sizes.items() if lives.buffers[name].kind == "fresh"}
    begins: dict[int, int] = {}
    for name, size in fresh.items():
        first = lives.uses[name][0]
        begins[first] = begins.get(first, 0) + size
    live = peak = 0
    for index in range(len(lives.ops)):
        live += begins.get(index, 0)
        peak = max(peak, live)
        live -= sum(fresh.get(free.buffer, 0) for free in frees.get(index, ()))
    text = (
        f"peak {arena + 2 * sum(pool.values()) + peak} bytes: arena {arena} for {len(offsets)} "
        f"buffers ({alone} without reuse), {2 * sum(pool.values())} for {len(pool)} symmetric "
        f"slots of two copies, {peak} fresh at most"
    )
    return [Remark("plan_memory", text)]
