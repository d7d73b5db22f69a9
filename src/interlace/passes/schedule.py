"""schedule: order and streams in one pass, so that communication runs under compute.

Compute goes to the stream `main`, communication to `comm`, what a sum of puts awaits to `arrivals`;
the last sum of a site, behind which `main` would wait anyway, awaits it there.
The pass plays the Program on these lanes: communication starts as soon as its data is there;
compute whose input still travels gives way to compute that is ready, above all to what feeds more
communication (the gradient of the input before the gradient of the weight).

    >>> overlapped = InsertSync().run(Schedule().run(program))

Note [Weights]
    All ranks must decide alike, also where their sizes differ. So a matmul or an attention weighs
    as much as a whole communication, the chunks of a site share that, and the rest weighs little.
    The cast of a weight's shard into FP8 takes about 1 / (ranks - 1) of a gather's time: casts that
    a gather does not hide are made right before their matmuls, since their results wait in memory.
    The machine's real speeds decide between strategies, in `decompose`.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from interlace.errors import PassError
from interlace.ir import Buffer, Collective, Copy, Expect, Get, Op, Program
from interlace.ir.operators import is_heavy, is_weight_cast
from interlace.passes.dependencies import Before, dependencies, followers, symmetric_buffers
from interlace.passes.fuse import arrivals, groups
from interlace.passes.insert_sync import clocks, strip_events
from interlace.passes.rewrite import declaring, tagged
from interlace.passes.slots import LIVE
from interlace.passes.uses import allocs_of, puts_of, used_by

WHOLE, LIGHT = 96, 8
LANES = {"compute": "main", "comm": "comm", "arrival": "arrivals"}
"""The stream of what takes a place on a lane, by its role."""
FAR = 1 << 40


@dataclass(frozen=True)
class Schedule:
    """Orders the ops and puts them on streams."""

    name: ClassVar[str] = "schedule"
    window: int = 6
    """Number of whole matmuls by which compute may be late, and communication early: this bounds
    the memory that waits for either."""

    def run(self, program: Program) -> Program:
        """The same ops, reordered and on streams; events are left to `insert_sync`."""
        if self.window < 1:
            raise PassError(f"schedule: window={self.window}; give 1 or more")
        return self.played(program)[0]

    def played(self, program: Program) -> tuple[Program, Before | None]:
        """The result of `run`, and the ops that its ops must follow on their streams, if known."""
        program = strip_events(program)
        ops = _Player(program, self.window).play()
        return _on_main(program.replace(ops=tuple(map(_without_slot, ops))))


def role(op: Op, symmetric: Mapping[str, Buffer]) -> str:
    """The kind of place that the pass gives an op; `symmetric` holds the names of such buffers.

    `compute` and `comm` take a place on a lane; a site's copy into or out of a symmetric buffer is
    communication, one that packs rows for a matmul is compute. `late` ops (allocations, awaited
    signals but for those before a sum of puts) go right before the first op that needs them, on
    its stream, so that they hold up nothing else; `early` ones (signals raised, storage given
    back) right after the last op that they need.
    """
    ordering = op.ordering()
    if ordering.expects or ordering.takes:
        return "late"
    if ordering.raises or ordering.frees is not None or ordering.holds_host:
        return "early"
    if ordering.meets or ordering.messages or op.one_sided:
        return "comm"
    moves = isinstance(op, Copy) and op.site is not None and used_by((op,)) & symmetric.keys()
    return "comm" if moves else "compute"


class _Player:
    """Plays a Program on lanes, and lists its ops as they start."""

    def __init__(self, program: Program, window: int) -> None:
        self.program, self.ops, self.window = program, program.ops, window * WHOLE
        symmetric = symmetric_buffers(program)
        self.roles = [role(op, symmetric) for op in self.ops]
        self.arrivals = arrivals(program)
        for index in self.arrivals:
            self.roles[index] = "arrival"
        self.before = dependencies(program)
        self.after = followers(self.before)
        self.needs = self._needs()
        self.missing = [len(needs) for needs in self.needs]
        self.dependants = followers(self.needs)
        self.weights = self._weights()
        self.depths = self._depths()
        self.ranks = self._ranks()
        self.finish = [0] * len(self.ops)
        self.placed = [False] * len(self.ops)
        self.stream = [""] * len(self.ops)
        self.listed: list[int] = []
        self.group = {i: group for group in groups(program) for i in group}
        self.declared = self._declared()
        self.kernel: list[int] = []  # what the kernel that was begun has still to do
        self.slots = _Slots(self)
        self.free = dict.fromkeys(LANES.values(), 0)

    def play(self) -> list[Op]:
        """The ops in their new order."""
        compute = [i for i, role in enumerate(self.roles) if role == "compute"]
        oldest = widened = 0
        distant: dict[str, list[tuple[int, int]]] = {lane: [] for lane in self.free}
        near: dict[str, dict[int, int]] = {lane: {} for lane in self.free}  # op: its data is there
        woken = [i for i, count in enumerate(self.missing) if count == 0]
        while True:
            for index in self._settle(woken):
                lane = LANES[self.roles[index]]
                heapq.heappush(distant[lane], (self.ranks[index], index))
            while oldest < len(compute) and self.placed[compute[oldest]]:
                oldest += 1
            horizon = 2 * FAR
            if oldest < len(compute):
                horizon = self.ranks[compute[oldest]] + self.window + widened
            for lane, heap in distant.items():
                while heap and (heap[0][0] < horizon or heap[0][0] == FAR):
                    index = heapq.heappop(heap)[1]
                    near[lane][index] = max((self.finish[i] for i in self.needs[index]), default=0)
            choices = self._choices(near)
            if not choices:  # more symmetric buffers must be in use at once
                choices = self._choices(near, limited=False)
            if not choices:
                if not any(distant.values()):
                    break
                woken, widened = [], widened + WHOLE  # arrivals keep an order of their own
                continue
            widened = 0
            start, lane, index = min(choices)
            del near[lane][index]
            self._place(index, lane)
            if self.kernel and lane == "main":
                self.kernel = self.kernel[1:]
            elif index in self.group and self.group[index][0] == index:
                self.kernel = list(self.group[index][1:])
            self.finish[index] = self.free[lane] = start + self.weights[index]
            woken = self._wake(index)
        for index in range(len(self.ops)):
            if not self.placed[index]:
                assert self.roles[index] == "late", "only what nobody needs is left"
                self._place(index, "main")
        return [_on(self.ops[index], self.stream[index]) for index in self.listed]

    def _choices(
        self, near: dict[str, dict[int, int]], limited: bool = True
    ) -> list[tuple[int, str, int]]:
        """Start, lane and next op of each lane that has one ready; a begun kernel goes on with its
        own ops, and arrivals keep their order. `limited`: at most `LIVE` symmetric buffers."""
        main = near["main"]
        if self.kernel:
            main = {index: main[index] for index in self.kernel[:1] if index in main}
        first = next((i for i in self.arrivals if not self.placed[i]), -1)
        awaited = {index: when for index, when in near["arrivals"].items() if index == first}
        lanes = {**near, "main": main, "arrivals": awaited}
        able = {lane: self.slots.able(ready, limited) for lane, ready in lanes.items()}
        return [self._choose(lane, ready) for lane, ready in able.items() if ready]

    def _choose(self, lane: str, ready: dict[int, int]) -> tuple[int, str, int]:
        """When the lane goes on, and with which op; at the same time communication goes first."""
        start = max(self.free[lane], min(ready.values()))
        able = [index for index, when in ready.items() if when <= start]
        if lane == "main":
            return start, lane, min(able, key=lambda index: (-self.depths[index], index))
        return start, lane, min(able, key=lambda index: (self.ranks[index], index))

    def _place(self, index: int, stream: str) -> None:
        """Lists an op, after the late ones that it needs."""
        late = {index, *(i for i in self.declared.get(index, ()) if not self.placed[i])}
        stack = list(late)
        while stack:
            missing = {i for i in self.before[stack.pop()] if not self.placed[i]} - late
            late |= missing
            stack += missing
        for other in sorted(late):
            self.placed[other], self.stream[other] = True, stream
            self.listed.append(other)
            self.slots.place(other)

    def _declared(self) -> dict[int, list[int]]:
        """Allocations of all buffers that a kernel uses, by the kernel's first op."""
        allocs = allocs_of(self.ops)
        found: dict[int, list[int]] = {}
        for group in set(self.group.values()):
            names = used_by(self.ops[i] for i in group)
            found[group[0]] = [allocs[name] for name in names if name in allocs]
        return found

    def _wake(self, index: int) -> list[int]:
        woken: list[int] = []
        for other in self.dependants[index]:
            self.missing[other] -= 1
            if self.missing[other] == 0:
                woken.append(other)
        return woken

    def _settle(self, woken: list[int]) -> list[int]:
        """Lists the early ops among `woken` and those that they wake; gives the others."""
        waiting: list[int] = []
        queue = sorted(woken)
        while queue:
            index = heapq.heappop(queue)
            if self.roles[index] == "late":
                continue
            if self.roles[index] != "early":
                waiting.append(index)
                continue
            last = max(self.needs[index], key=lambda i: (self.finish[i], i), default=None)
            self.finish[index] = self.finish[last] if last is not None else 0
            host = self.ops[index].ordering().holds_host
            self._place(index, "main" if last is None or host else self.stream[last])
            for other in self._wake(index):
                heapq.heappush(queue, other)
        return waiting

    def _needs(self) -> Before:
        """Ops that each op must follow; a late one is replaced by those that it must follow."""
        found: list[tuple[int, ...]] = []
        for earlier in self.before:
            needs: set[int] = set()
            for other in earlier:
                needs.update(found[other] if self.roles[other] == "late" else (other,))
            found.append(tuple(sorted(needs)))
        for first, *others in groups(self.program):  # a kernel begins with its first part,
            for other in others:
                earlier = (i for i in found[other] if i < first and self.roles[i] == "compute")
                found[first] = tuple(sorted({*found[first], *earlier}))  # which nothing interrupts
                found[other] = tuple(sorted({*found[other], first}))
        return tuple(found)

    def _weights(self) -> list[int]:
        """Duration of each op on its lane: Note [Weights]."""
        calls = self.program.calls()
        heavy = [
            role == "comm" or (i in calls and is_heavy(calls[i].fn))
            for i, role in enumerate(self.roles)
        ]
        weights = [WHOLE if whole else LIGHT for whole in heavy]
        for i, call in calls.items():
            if is_weight_cast(call.fn):
                weights[i] = max(LIGHT, WHOLE // max(1, self._gathering(i) - 1))
        sharing: dict[tuple[int, str], list[int]] = {}
        for i, op in enumerate(self.ops):
            if heavy[i] and op.site is not None:
                sharing.setdefault((op.site, self.roles[i]), []).append(i)
        for parts in sharing.values():
            for i in parts:
                weights[i] = max(1, WHOLE // len(parts))
        return weights

    def _gathering(self, cast: int) -> int:
        """Ranks of the largest team from which the matmuls of a weight get their rows; of the
        largest of all where that is not seen."""
        sizes = {team.name: team.size for team in self.program.teams}
        before = {self.ops[i] for user in self.after[cast] for i in self.before[user]}
        teams = {op.team for op in before if isinstance(op, Collective | Expect | Get)}
        return max((sizes[team] for team in teams or sizes), default=1)

    def _depths(self) -> list[int]:
        """The number of communications that follow one another after each op."""
        depths = [0] * len(self.ops)
        for index in reversed(range(len(self.ops))):
            later = max((depths[other] for other in self.after[index]), default=0)
            depths[index] = later + (self.roles[index] == "comm")
        return depths

    def _ranks(self) -> list[int]:
        """The weight of all compute before an op of compute; the others have the rank of the first
        compute that they serve."""
        ranks = [FAR] * len(self.ops)
        rank = sum(w for w, role in zip(self.weights, self.roles, strict=True) if role == "compute")
        for index in reversed(range(len(self.ops))):
            if self.roles[index] == "compute":
                rank -= self.weights[index]
                ranks[index] = rank
            else:
                ranks[index] = min((ranks[other] for other in self.after[index]), default=FAR)
        # Pieces travel in the order in which they are made: the parts of a kernel record none, and
        # of two that are there the first would wait for one that is not.
        made = {self.ops[i].site for group in groups(self.program) for i in group}
        made |= {
            site.id
            for site in self.program.sites
            if site.protocol == "put" and site.kind.startswith("matmul_")
        }
        for puts in puts_of(self.program, made).values():
            first = min(ranks[index] for index, _ in puts)
            for index, _ in puts:
                ranks[index] = first
        return ranks


class _Slots:
    """Symmetric buffers in use while ops are placed: at most `LIVE` of a team at once.

    They are taken in the order in which compute needs them, so that one gathered far ahead keeps
    none from what comes first.
    """

    def __init__(self, player: _Player) -> None:
        self.team = {n: b.team for n, b in symmetric_buffers(player.program).items()}
        self.uses: dict[int, list[str]] = {}
        """Symmetric buffers that each op uses; the first of a kernel uses those of all its ops."""
        self.left = dict.fromkeys(self.team, 0)
        """Number of uses of each that are still to be placed."""
        first = dict.fromkeys(self.team, FAR)
        for index, op in enumerate(player.ops):
            ordering = op.ordering()
            if ordering.takes is None and ordering.frees is None:
                for name in used_by((op,)) & self.team.keys():
                    first[name] = min(first[name], player.ranks[index])
                    for user in {index, player.group.get(index, (index,))[0]}:
                        self.uses.setdefault(user, []).append(name)
                        self.left[name] += 1
        self.waiting: dict[str | None, list[str]] = {}
        """Buffers that no op has used yet, by team, in the order of need."""
        for name in sorted(self.team, key=lambda name: first[name]):
            self.waiting.setdefault(self.team[name], []).append(name)
        self.live = dict.fromkeys(self.waiting, 0)

    def able(self, ready: dict[int, int], limited: bool) -> dict[int, int]:
        """The ops whose buffers have a slot, or get the next ones; all ops if not `limited`."""
        if not limited:
            return ready
        return {i: when for i, when in ready.items() if i not in self.uses or self._may(i)}

    def _may(self, index: int) -> bool:
        for team, waiting in self.waiting.items():
            wanted = {name for name in self.uses[index] if self.team[name] == team}
            count = len(wanted.intersection(waiting))
            if count:
                if not wanted.issuperset(waiting[:count]) or self.live[team] + count > LIVE:
                    return False
        return True

    def place(self, index: int) -> None:
        """Counts what an op takes, and what has its last use in it."""
        for name in self.uses.get(index, ()):
            team = self.team[name]
            if name in self.waiting[team]:
                self.waiting[team].remove(name)
                self.live[team] += 1
            self.left[name] -= 1
            self.live[team] -= not self.left[name]


def _on_main(program: Program) -> tuple[Program, Before | None]:
    """Collectives that leave nothing to run under them go to `main`, and need no event.

    That is so where all that `main` has done before comes before them, and all that it does after
    them must await them; and no other collective may be under way.
    """
    collectives = program.collectives()
    if not any(op.stream == "comm" for op in collectives.values()):
        return program, None
    ops, before = list(program.ops), dependencies(program, listed=False)
    order = clocks(ops, before)
    if "main" not in order.streams:
        return program, before
    main, comm = order.streams.index("main"), order.streams.index("comm")
    following = [len(ops)] * len(ops)  # the next op of main
    for index in range(len(ops) - 2, -1, -1):
        after = index + 1
        following[index] = after if order.lane[after] == main else following[after]
    done = known = issued = 0  # how far main is, what it knows of comm, the last collective there
    for index, op in enumerate(program.ops):
        if order.lane[index] == main:
            done, known = order.position[index], order.clock[index][comm]
        elif index in collectives:
            later = following[index]
            after = later == len(ops) or order.clock[later][comm] >= order.position[index]
            if after and order.clock[index][main] == done and known >= issued:
                ops[index] = _on(op, "main")
            else:
                issued = order.position[index]
    return program.replace(ops=tuple(ops)), before


def _without_slot(op: Op) -> Op:
    """A symmetric buffer's slot was chosen for another order; `plan_memory` chooses anew."""
    buffer = op.ordering().takes
    if buffer is None or buffer.kind != "symmetric":
        return op
    return declaring(op, dataclasses.replace(buffer, storage=None))


def _on(op: Op, stream: str) -> Op:
    return op if op.stream == stream else tagged(op, stream=stream)
