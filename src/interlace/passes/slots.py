"""Slots of symmetric buffers: which share one, and what orders a slot's takes across ranks.

A team has `LIVE` slots for a whole Program, however many layers it has: the pass `schedule` has no
more buffers in use at once, and here each buffer gets the slot of one that is done with. Where the
Program's own signals and collectives order all that any rank does to the earlier buffer before all
that any does to the later one, nothing is added. Elsewhere each rank says so when it is done:

    main: free(a)
    main: notify(s0_freed, to=tp.others)
    comm: expect(s0_freed, tp.rank + 1)
    b = alloc(f32[64, 256], symmetric=tp, storage="s0", stream="comm")

By the take after the next, such a signal has come long before it is awaited. So within a run one
copy of a slot suffices, which the device's set-up proves (verify/reuse.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.ir import Index, Others, Program, RankIndex
from interlace.ir.ops import Ordering, SignalLevel
from interlace.passes.dependencies import is_frozen, orders_all
from interlace.passes.fuse import groups
from interlace.passes.insert_sync import Order
from interlace.passes.uses import allocs_of

LIVE = 2
"""Symmetric buffers of a team in use at once: one that is written while another is still read."""

_FREED = re.compile(r"s\d+_freed(_\d+)?")


def without_handovers(program: Program) -> Program:
    """The Program without the signals by which slots were handed over."""
    return program.replace(ops=tuple(op for op in program.ops if not _hands_over(op.ordering())))


def _hands_over(ordering: Ordering) -> bool:
    level = ordering.raises or ordering.expects
    return level is not None and _FREED.fullmatch(level.signal) is not None


@dataclass(frozen=True, slots=True)
class Handover:
    """Two takes of a slot, in the order of which a signal has to be added."""

    slot: str
    earlier: str
    later: str


@dataclass(slots=True)
class _Slot:
    """A slot while it is dealt out: the buffer that had it last, and the bytes of the largest."""

    name: str
    buffer: str
    nbytes: int


class SlotPlan:
    """The slot of each symmetric buffer, and the handovers that need a signal."""

    def __init__(
        self,
        program: Program,
        order: Order,
        uses: Mapping[str, Sequence[int]],
        sizes: Mapping[str, int],
    ) -> None:
        """`uses` are the ops that use each buffer; each `Alloc` stands before the first."""
        self.names: dict[str, str] = {}
        self.handovers: list[Handover] = []
        self._program, self._uses, self._sizes = program, uses, sizes
        self._alike = not is_frozen(program)
        """True if all ranks of the teams run this list."""
        self._order = order
        takes = dict[str, dict[int, str]]()
        for name, index in allocs_of(program.ops).items():
            buffer = program.ops[index].ordering().takes
            if buffer is not None and buffer.kind == "symmetric" and buffer.team is not None:
                takes.setdefault(buffer.team, {})[index] = name
        for team, listed in takes.items():
            self._deal(team, listed)

    def _deal(self, team: str, takes: Mapping[int, str]) -> None:
        slots: list[_Slot] = []
        ranks = RankOrder(self._program, team, self._order)
        for index in range(max(takes) + 1):
            if index in takes:
                self._take(ranks, slots, index, takes[index])
            ranks.play(index)

    def _take(self, ranks: RankOrder, slots: list[_Slot], index: int, name: str) -> None:
        """Gives a buffer a slot: one that is ordered already and fits best, one of `LIVE` that no
        buffer had, or that which has been idle for longest."""
        nbytes, uses = self._sizes.get(name, 0), self._uses
        idle = [slot for slot in slots if self._last(slot) < index]
        if self._alike and idle:
            ahead = ranks.ahead(index, name)
            ordered = [slot for slot in idle if ranks.ordered(slot.buffer, name, ahead)]
        else:
            ordered = idle
        if ordered:
            slot = min(ordered, key=lambda slot: abs(slot.nbytes - nbytes))
        elif idle and len(slots) >= LIVE:
            slot = min(idle, key=self._last)
            self.handovers.append(Handover(slot.name, slot.buffer, name))
            ranks.hand_over(index, uses[slot.buffer])
        else:
            slot = _Slot(f"s{len(slots)}", name, nbytes)
            slots.append(slot)
        slot.buffer, slot.nbytes = name, max(slot.nbytes, nbytes)
        self.names[name] = slot.name

    def _last(self, slot: _Slot) -> int:
        return self._uses[slot.buffer][-1]


Known = tuple[int, ...]
"""Positions known to be reached, of each stream of each rank: by its distance, then by stream."""


@dataclass(frozen=True, slots=True)
class _Access:
    """An access of a symmetric buffer: by which op, at which distance, and its begin and end."""

    first: int
    last: int
    offset: int | None
    """Distance of the memory's rank; None if that is not known."""
    write: bool


class RankOrder:
    """Knowledge that each op has of every rank of a team, where all run one list.

    The list is played op by op: `play(0)`, `play(1)`, ... What an op awaits here it awaits on each
    rank, of the ranks at the same distances. Messages, and signals of ranks by number, count for
    nothing: what they order besides is not seen.
    """

    def __init__(self, program: Program, team: str, order: Order) -> None:
        self.program, self.team, self.order = program, team, order
        self.collectives = program.collectives()
        self.size, self.lanes = program.team(team).size, len(order.streams)
        self.tails: list[Known] = [(0,) * (self.size * self.lanes)] * self.lanes
        """Knowledge of each stream by now,"""
        self.known: dict[int, Known] = {}
        """and at the end of each op."""
        self.pending: dict[int, Known] = {}
        """Knowledge that the parts of a kernel await, and that its end has, by its last op."""
        self.handed: dict[int, Known] = {}
        """Knowledge that handovers add before an op."""
        self.raised: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        """Values and notifies of each signal, by the distance at which it is heard."""
        for index, op in enumerate(program.ops):
            level = op.ordering().raises
            if level is not None and level.team == team:
                for distance in self._distances(level):
                    heard = self.raised[level.signal, -distance % self.size]
                    heard.append((level.value, index))
        spans = {i: group for group in groups(program) for i in group}
        self.kernel_end = self._kernel_ends(spans)
        self.accesses: defaultdict[str, list[_Access]] = defaultdict(list)
        for index, op in enumerate(program.ops):
            span = spans.get(index, (index,))
            for write, accesses in ((False, op.reads()), (True, op.writes())):
                for access in accesses:
                    offset = 0 if access.peer is None else self._offset(access.peer)
                    found = _Access(span[0], span[-1], offset, write)
                    self.accesses[access.view.buffer].append(found)

    def _offset(self, peer: Index | Others) -> int | None:
        if isinstance(peer, RankIndex) and peer.team == self.team:
            return peer.offset % self.size
        return None

    def _distances(self, level: SignalLevel) -> Sequence[int]:
        offset = self._offset(level.peer)
        if offset is not None:
            return (offset,)
        return range(1, self.size) if isinstance(level.peer, Others) else ()

    def _kernel_ends(self, spans: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
        """The last op of the kernel that each Expect before one of its parts belongs to."""
        found: dict[int, int] = {}
        following = [-1] * self.lanes  # the next op of each stream that is no Expect
        for index in reversed(range(len(self.program.ops))):
            lane = self.order.lane[index]
            if self.program.ops[index].ordering().expects is None:
                following[lane] = index
            elif following[lane] in spans:
                found[index] = spans[following[lane]][-1]
        return found

    def play(self, index: int) -> None:
        """Notes what is known at the end of the next op."""
        op, lane = self.program.ops[index], self.order.lane[index]
        known = self.tails[lane]
        for other in self.order.waits[index]:
            known = _join(known, self.known[other])
        if index in self.handed:
            known = _join(known, self.handed[index])
        level = op.ordering().expects
        if level is not None and level.team == self.team:
            for heard in self._heard(level, index):
                if (end := self.kernel_end.get(index)) is not None:
                    self.pending[end] = _join(self.pending.get(end, heard), heard)
                else:
                    known = _join(known, heard)
        meeting = self.collectives.get(index)
        if meeting and meeting.team == self.team and orders_all(self.program, meeting):
            all_ranks = [known[i :: self.lanes] for i in range(self.lanes)]
            known = tuple(map(max, all_ranks)) * self.size
        if index in self.pending:
            known = _join(known, self.pending[index])
        known = (*known[:lane], self.order.position[index], *known[lane + 1 :])
        self.known[index] = self.tails[lane] = known

    def _heard(self, level: SignalLevel, index: int) -> list[Known]:
        found: list[Known] = []
        for distance in self._distances(level):
            raised = self.raised.get((level.signal, distance), ())
            notify = next((i for value, i in raised if value >= level.value), index)
            if notify < index:
                found.append(self._at(distance, self.known[notify]))
        return found

    def _at(self, distance: int, known: Known) -> Known:
        """Knowledge of the rank at a distance, as seen from here."""
        cut = distance * self.lanes
        return known[-cut:] + known[:-cut] if cut else known

    def ahead(self, index: int, name: str) -> dict[int, Known]:
        """Knowledge at each op, up to the last that writes a buffer, if nothing is added."""
        tails, pending = [*self.tails], dict(self.pending)
        last = max((a.first for a in self.accesses[name] if a.write), default=index)
        for other in range(index, last + 1):
            self.play(other)
        self.tails, self.pending = tails, pending
        return self.known

    def ordered(self, earlier: str, later: str, known: Mapping[int, Known]) -> bool:
        """True if every access of a buffer comes before every write of a later one in the same
        rank's memory."""
        lane, position = self.order.lane, self.order.position
        for write in (a for a in self.accesses[later] if a.write):
            for access in self.accesses[earlier]:
                if write.offset is None or access.offset is None:
                    distances = range(self.size)
                else:
                    distances = ((write.offset - access.offset) % self.size,)
                for distance in distances:
                    at = distance * self.lanes + lane[access.last]
                    if known[write.first][at] < position[access.last]:
                        return False
        return True

    def hand_over(self, index: int, uses: Sequence[int]) -> None:
        """Has all ranks be done with `uses` before an op."""
        added = self.handed.get(index, self.tails[self.order.lane[index]])
        for use in uses:
            for distance in range(self.size):
                added = _join(added, self._at(distance, self.known[use]))
        self.handed[index] = added


def _join(one: Known, other: Known) -> Known:
    return tuple(map(max, one, other))
