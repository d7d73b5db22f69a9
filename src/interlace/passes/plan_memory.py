"""plan_memory: where every buffer lives, and for how long.

Buffers that stay inside the Program share one `arena` by lifetime, symmetric ones two slots of
their team's pool (slots.py); what leaves the Program is allocated by torch. `Alloc` stands
right before the first use, `Free` of fresh and symmetric buffers after the last; the `Free` of an
input that the caller gives up moves there too. Bytes of the arena are reused only where the
Program's data already orders all their uses, so nothing waits longer and no event is added. All is
laid out for the largest sizes of the Program's class, so offsets are numbers.

    h = alloc(f32[64, 256], storage="arena", offset=4096)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.cost.memory import aligned
from interlace.errors import PassError
from interlace.ir import Alloc, Expect, Free, Notify, Others, Program, RankIndex, View
from interlace.ir.operators import matmul_of
from interlace.ir.overlap import Overlaps
from interlace.ir.sizes import UNBOUNDED
from interlace.passes.dependencies import dependencies
from interlace.passes.fuse import groups
from interlace.passes.insert_sync import clocks, strip_events
from interlace.passes.rewrite import Rewrite, declaring
from interlace.passes.slots import Handover, SlotPlan, without_handovers
from interlace.passes.strategies.emitter import Names
from interlace.passes.uses import allocs_of, returned_by, used_by

ARENA = "arena"


@dataclass(frozen=True)
class PlanMemory:
    """Places `Alloc` and `Free`, and shares storage."""

    name: ClassVar[str] = "plan_memory"

    def run(self, program: Program) -> Program:
        """The same ops on the same streams, with memory planned."""
        frees = (op.ordering().frees for op in program.ops)
        freed = {name for name in frees if name is not None}
        for name in (buffer.name for buffer in program.params if buffer.kind == "output"):
            if name in freed:
                raise PassError(
                    f"plan_memory: {name!r} is an output and stays the caller's: take its free out"
                )
        given_up = freed & {buffer.name for buffer in program.params if buffer.kind == "input"}
        program = _place_allocs(_localise(without_handovers(strip_events(program))))
        plan = _Plan(program, given_up)
        rewrite = Rewrite(program.ops)
        storage = {name: (ARENA, offset) for name, offset in plan.offsets.items()}
        storage |= {name: (slot, 0) for name, slot in plan.slots.items()}
        allocs = allocs_of(program.ops)
        for name, (holder, offset) in storage.items():
            buffer = dataclasses.replace(plan.buffers[name], storage=holder, offset=offset)
            rewrite.replace(allocs[name], declaring(program.ops[allocs[name]], buffer))
        for index, freed in plan.frees.items():
            rewrite.after(index, *freed)
        names = Names(program)
        for told, handover in zip(plan.told, plan.handovers, strict=True):
            _signal(rewrite, names, program, told, handover, allocs[handover.later])
        return program.replace(ops=rewrite.ops())


def _signal(
    rewrite: Rewrite, names: Names, program: Program, told: int, handover: Handover, taken: int
) -> None:
    """Adds the signals by which each rank learns that all others are done with a slot's buffer."""
    team = program.buffers()[handover.later].team
    assert team is not None
    signal, stream = names.new(f"{handover.slot}_freed"), program.ops[taken].stream
    at = program.ops[told].stream
    rewrite.after(told, Notify(signal=signal, peer=Others(team), team=team, stream=at))
    for distance in range(1, program.team(team).size):
        peer = RankIndex(team) + distance
        rewrite.before(taken, Expect(signal=signal, peer=peer, team=team, stream=stream))


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


class _Plan:
    """Where a Program's buffers lie, and when they are freed, as the order of its data allows."""

    def __init__(self, program: Program, given_up: Collection[str]) -> None:
        """`given_up` names the inputs that are freed after their last use."""
        self.ops, self.buffers = program.ops, program.buffers()
        self.escaping = returned_by(program)
        params = {buffer.name for buffer in program.params} - {*given_up}
        self.uses: dict[str, list[int]] = {}
        """Ops that use each buffer, in order of first use; of a fresh one also the declaration."""
        for index, used in enumerate(_uses(program)):
            for name in sorted(used):
                if name in self.buffers and name not in params:
                    self.uses.setdefault(name, []).append(index)
        self.order = clocks(program.ops, dependencies(program, listed=False))
        self.inside = {i for group in groups(program) for i in group[:-1]}
        """Ops that another one of the same kernel follows."""
        overlaps = Overlaps(program)
        sizes = {name: overlaps.size(self.buffers[name]) for name in self.uses}
        self.sizes = {name: size for name, size in sizes.items() if size < UNBOUNDED}
        self.offsets = self._offsets()
        self.frees = self._frees()
        slots = SlotPlan(program, self.order, self.uses, self.sizes)
        self.slots, self.handovers = slots.names, slots.handovers
        self.told = [self._hand_over(handover) for handover in self.handovers]
        """Behind which op all ranks are told of each handover."""

    def _last(self, name: str) -> list[int]:
        """Position that each stream must have reached for every use of the buffer to be done."""
        reached = [0] * len(self.order.streams)
        for index in self.uses[name]:
            lane = self.order.lane[index]
            reached[lane] = max(reached[lane], self.order.position[index])
        return reached

    def _done_before(self, last: Sequence[int], name: str) -> bool:
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

    def _offsets(self) -> dict[str, int]:
        """An offset in the arena for every local buffer: the first gap that is free by then."""
        offsets: dict[str, int] = {}
        active: list[tuple[list[int], int, int]] = []  # (how far its uses reach, first byte, last)
        lanes, listed = self.order.lane, 0
        latest = [(0,) * len(self.order.streams) for _ in self.order.streams]
        left = [lanes.count(lane) for lane in range(len(latest))]
        for name, uses in self.uses.items():
            if self.buffers[name].kind != "local":
                continue
            for i in range(listed, uses[0]):
                latest[lanes[i]] = self.order.clock[i]
                left[lanes[i]] -= 1
            listed = max(listed, uses[0])
            # what all streams with ops to come know to be done needs no more looks
            known = [clock for clock, ops in zip(latest, left, strict=True) if ops]
            least = [min(column) for column in zip(*known, strict=True)]
            active = [a for a in active if any(n > h for n, h in zip(a[0], least, strict=True))]
            taken = [a[1:] for a in active if not self._done_before(a[0], name)]
            size, offset = aligned(self.sizes[name]), 0
            for start, stop in sorted(taken):
                if offset + size <= start:
                    break
                offset = max(offset, stop)
            offsets[name] = offset
            active.append((self._last(name), offset, offset + size))
        return offsets

    def _frees(self) -> dict[int, list[Free]]:
        """After which op each buffer is freed: the first that comes after all uses."""
        ending: dict[int, list[str]] = {}
        for name, uses in self.uses.items():
            kind = self.buffers[name].kind
            if kind == "symmetric" or (kind in ("fresh", "input") and name not in self.escaping):
                ending.setdefault(uses[-1], []).append(name)
        frees: dict[int, list[Free]] = {}
        pending: dict[str, list[int]] = {}
        for index, clock in enumerate(self.order.clock):
            pending.update((name, self._last(name)) for name in ending.get(index, ()))
            for name, last in () if index in self.inside else list(pending.items()):
                if all(need <= has for need, has in zip(last, clock, strict=True)):
                    del pending[name]
                    free = Free(buffer=name, stream=self.ops[index].stream)
                    frees.setdefault(self._told(index), []).append(free)
        for name in pending:  # a slot must be given back, if a stream has to wait for that
            if self.buffers[name].kind == "symmetric":
                free = Free(buffer=name, stream=self.ops[self.uses[name][-1]].stream)
                frees.setdefault(len(self.ops) - 1, []).append(free)
        return frees

    def _told(self, index: int) -> int:
        """The last of an op and the notifies that follow it: they do not wait for what is freed."""
        stream = self.ops[index].stream
        following = itertools.takewhile(
            lambda op: op.ordering().raises and op.stream == stream, self.ops[index + 1 :]
        )
        return index + sum(1 for _ in following)

    def _hand_over(self, handover: Handover) -> int:
        """Frees a buffer right behind its last use, and says behind which op."""
        name = handover.earlier
        for frees in self.frees.values():
            frees[:] = [free for free in frees if free.buffer != name]
        last = self.uses[name][-1]
        told = self._told(last)
        free = Free(buffer=name, stream=self.ops[last].stream)
        self.frees.setdefault(told, []).append(free)
        return told
