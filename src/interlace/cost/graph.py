"""The tasks of a set of ranks, and what each waits for: the simulator's static picture.

All that orders ops is known from the lists alone (which Record a Wait means, which collectives
meet, which Send meets which Recv, which Notify satisfies an Expect): a graph, built once.

    >>> graph = build([program], machine)
    >>> graph.tasks[0].after

One op is one task, except that ops which meet share theirs: the members of a collective, or a Send
and its Recv. So they begin when the last of them has come and end together, which is what takes
longest of all that docs/semantics.md allows: a prediction, and nothing that an order may lean on. A
Group is two tasks, before and after its messages; a Fused is its launch and then a task for each of
its members, in the order in which a kernel works through them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.cost.fused import Part, fused_costs
from interlace.cost.issue import issue_seconds
from interlace.cost.machine import Machine
from interlace.cost.op_times import Cost, op_cost, op_kind, op_name
from interlace.errors import ProgramError, SoundnessError
from interlace.ir import (
    Alloc,
    Collective,
    Expect,
    Free,
    Fused,
    Group,
    HostSync,
    Index,
    Notify,
    Op,
    Others,
    Program,
    Put,
    Record,
    Recv,
    Send,
    Wait,
)

TeamKey = tuple[str, tuple[int, ...]]
Ports = tuple[str, ...]
Spanned = tuple[Op, int, int]
"""An op, its first task and its last."""


@dataclass(slots=True)
class Task:
    """Something that takes time on some ranks once all that it waits for is done."""

    ranks: tuple[int, ...]
    cost: Cost
    ports: tuple[str, ...] = ()
    """For each rank which way a transfer's bytes go there: `in`, `out` or `both`."""
    earliest: float = 0.0
    """When the host has issued it."""
    missing: int = 0
    """How many others it waits for."""
    after: list[int] = field(default_factory=list[int])
    """The tasks that wait for it."""


@dataclass(slots=True)
class Entry:
    """One op of one rank: its first and last task, and those that hold its stream up."""

    rank: int
    index: int
    op: Op
    first: int
    last: int
    after: tuple[int, ...]
    earliest: float

    @property
    def stream(self) -> str:
        """The op's stream."""
        return self.op.stream

    @property
    def site(self) -> int | None:
        """The op's site."""
        return self.op.site

    @property
    def kind(self) -> str:
        """What the op is to a timeline."""
        return op_kind(self.op)

    @property
    def name(self) -> str:
        """What the op is called."""
        return op_name(self.op)


@dataclass(slots=True)
class Graph:
    """The tasks, and the op behind each."""

    tasks: list[Task]
    entries: list[Entry]
    ranks: tuple[int, ...]
    transports: frozenset[str]

    def stuck(self, done: Sequence[bool]) -> str:
        """Where every stream of every rank stands, for a set that cannot go on."""
        heads: dict[tuple[int, str], Entry] = {}
        for entry in self.entries:
            if not done[entry.last]:
                heads.setdefault((entry.rank, entry.stream), entry)
        lines = [
            f"  rank {rank}, {stream}: op {entry.index}, {entry.name}"
            + (f" at {entry.op.loc}" if str(entry.op.loc) else "")
            for (rank, stream), entry in sorted(heads.items(), key=lambda item: item[0])
        ]
        return "\n".join(
            ["the ranks wait for one another for ever:", *lines, "run `interlace check` on it"]
        )


def build(programs: Sequence[Program], machine: Machine) -> Graph:
    """The tasks of one run of every rank of a set of Programs."""
    builder = _Builder(machine)
    for program in programs:
        for rank in program.world if program.rank is None else (program.rank,):
            if rank in builder.ranks:
                raise ProgramError(f"two Programs of the set run on rank {rank}")
            builder.add(program, rank)
    return builder.finish()


class _Builder:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.ranks: list[int] = []
        self.tasks: list[Task] = []
        self.entries: list[Entry] = []
        self.meetings: dict[object, list[int]] = {}  # the entries that share a task
        self.raised: dict[object, list[tuple[int, int]]] = defaultdict(list)  # (value, task)
        self.awaited: list[tuple[object, int, int, str]] = []  # (signal, value, task, who)
        self.freed: dict[object, list[int]] = defaultdict(list)
        self.takes: list[tuple[tuple[object, int], int, int]] = []  # (a slot's take, members, task)
        self.transports: set[str] = set()

    def task(
        self, ranks: tuple[int, ...], cost: Cost, earliest: float = 0.0, ports: Ports = ("both",)
    ) -> int:
        if cost.transport is not None:
            self.transports.add(cost.transport)
        every = ports if len(ports) == len(ranks) else ("both",) * len(ranks)
        self.tasks.append(Task(ranks, cost, every, earliest))
        return len(self.tasks) - 1

    def edge(self, one: int, other: int) -> None:
        self.tasks[one].after.append(other)
        self.tasks[other].missing += 1

    def add(self, program: Program, rank: int) -> None:
        """One rank's ops, with the order that its own list gives."""
        self.ranks.append(rank)
        where, box, buffers = program.where(rank), program.boxes(rank), program.buffers()
        sizes = {name: len(member.ranks) for name, member in where.members.items()}
        counts: dict[object, int] = defaultdict(int)
        streams: dict[str, int] = {}
        recorded: dict[str, int] = {}
        queues: dict[object, int] = {}
        slots: dict[str, tuple[object, int]] = {}
        issued, host = 0.0, -1

        def team(name: str) -> TeamKey:
            return name, where.member(name).ranks

        def peers(name: str, peer: Index | Others) -> list[int]:
            ranks = where.member(name).ranks
            if isinstance(peer, Others):
                return [r for r in ranks if r != rank]
            return [ranks[where.index(peer)]]

        def order(index: int, op: Op, first: int, last: int) -> None:
            """What an op, from its first task to its last, has others wait for, or waits for."""
            match op:
                case Record():
                    recorded[op.event] = last
                case Wait():
                    if op.event not in recorded:
                        raise SoundnessError(f"rank {rank}, op {index}: wait for {op.event!r}, "
                                             "which is not recorded before it")  # fmt: skip
                    self.edge(recorded[op.event], first)
                case Notify():
                    for peer in peers(op.team, op.peer):
                        name = (op.signal, team(op.team), rank, peer)
                        self.raised[name].append((op.value, last))
                case Expect():
                    for peer in peers(op.team, op.peer):
                        name = (op.signal, team(op.team), peer, rank)
                        self.awaited.append((name, op.value, first, f"rank {rank}, op {index}"))
                case Alloc(buffer=buffer) if buffer.kind == "symmetric" and buffer.team:
                    pool = (buffer.storage or buffer.name, team(buffer.team))
                    self.takes.append(((pool, counts[pool]), sizes[buffer.team], first))
                    slots[buffer.name] = (pool, counts[pool])
                    counts[pool] += 1
                case Free() if op.buffer in slots and op.buffer in buffers:
                    self.freed[slots[op.buffer]].append(last)
                case _:
                    pass

        for index, op in enumerate(program.ops):
            issued += issue_seconds(op, self.machine, sizes)
            after = tuple(t for t in (streams.get(op.stream), host) if t is not None and t >= 0)
            cost = op_cost(op, box, self.machine, sizes)
            members = op.ops if isinstance(op, Group) else (op,)
            messages = [item for item in members if isinstance(item, Send | Recv)]
            key: object = None
            if isinstance(op, Collective):
                queue = (team(op.team), op.backend)
                key = ("collective", queue, counts[queue])
                counts[queue] += 1
            first = last = -1
            if key is None and not isinstance(op, Send | Recv):
                ports = ("out",) if isinstance(op, Put) else ("in",)
                first = last = self.task((rank,), cost, issued, ports)
                for other in after:
                    self.edge(other, first)
            if isinstance(op, Group):
                last = self.task((rank,), Cost())
            for item in messages:
                (peer,) = peers(item.team, item.peer)
                pair = (rank, peer) if isinstance(item, Send) else (peer, rank)
                side = (type(item), team(item.team), pair)
                message = ("message", team(item.team), pair, counts[side])
                counts[side] += 1
                spent = op_cost(item, box, self.machine, sizes)
                task = self.meet(message, pair, spent, first, (after, issued), last)
                if first == -1:
                    key, last = message, task
            if isinstance(op, Collective):
                assert key is not None
                last = self.meet(key, team(op.team)[1], cost, -1, (after, issued), -1)
                queue = (team(op.team), op.backend)
                if queue in queues and queues[queue] != last:
                    self.edge(queues[queue], last)
                queues[queue] = last
            parts: list[Spanned] = [(op, first, last)]
            if isinstance(op, Fused):
                last = self.fused(rank, op, fused_costs(op, box, self.machine), last, parts)
            self.entries.append(
                Entry(rank, index, op, first if first >= 0 else last, last, after, issued)
            )
            for item, begin, end in parts:
                order(index, item, begin, end)
                host = end if isinstance(item, HostSync) else host
            streams[op.stream] = last

    def fused(
        self, rank: int, op: Fused, costs: Sequence[Part], start: int, parts: list[Spanned]
    ) -> int:
        """The members' tasks, noted in `parts`; the task of the end.

        Units work through the matmuls one after another (`chain`). Besides, each has a task of one
        tile's time, from when its gates are open and earlier waves leave units free.
        """

        def then(cost: Cost, *before: int) -> int:
            task = self.task((rank,), cost)
            for other in dict.fromkeys(before):
                self.edge(other, task)
            return task

        chain, spent, marks = start, 0.0, [(0.0, start)]
        gates, tiles = list[int](), list[int]()
        for member, (cost, tile_s) in zip(op.members, costs, strict=True):
            begin = end = -1
            if tile_s:
                free_s = math.floor(spent / tile_s + 1e-9) * tile_s
                mark_s, mark = [m for m in marks if m[0] <= free_s * (1 + 1e-9)][-1]
                free = then(Cost(fixed_s=max(0.0, free_s - mark_s)), mark)
                end = then(Cost(fixed_s=tile_s), free, *gates)
                begin = chain = then(cost, chain)
                spent += cost.seconds
                marks.append((spent, chain))
                tiles.append(end)
            elif isinstance(member, Wait | Expect):
                begin = end = then(Cost(), start)
                gates.append(begin)
                chain = then(Cost(), chain, begin)
            else:
                begin = end = then(cost, chain, *tiles)
                tiles = [end]
                if cost.seconds:
                    chain = end
                    gates.append(end)
            parts.append((member, begin, end))
        return then(Cost(), chain, *tiles)

    def meet(
        self,
        key: object,
        ranks: tuple[int, ...],
        cost: Cost,
        first: int,
        arrival: tuple[tuple[int, ...], float],
        last: int,
    ) -> int:
        """The task that ops on several ranks share; this rank comes to it as `arrival` says."""
        if key in self.meetings:
            (task, *_) = self.meetings[key]
            self.meetings[key].append(task)
            known = self.tasks[task]
            if cost.work_s > known.cost.work_s:
                known.cost = cost
        else:
            ports = ("out", "in") if isinstance(key, tuple) and key[0] == "message" else ()
            task = self.task(tuple(dict.fromkeys(ranks)), cost, ports=ports)
            self.meetings[key] = [task]
        if first >= 0:
            self.edge(first, task)
            self.edge(task, last)
        else:
            after, issued = arrival
            self.tasks[task].earliest = max(self.tasks[task].earliest, issued)
            for other in after:
                self.edge(other, task)
        return task

    def finish(self) -> Graph:
        """The graph, with the order between ranks."""
        for key, members in self.meetings.items():
            ranks = self.tasks[members[0]].ranks
            expected = 2 if isinstance(key, tuple) and key[0] == "message" else len(ranks)
            if len(members) < expected:  # somebody never comes: wait for ever
                self.tasks[members[0]].missing += 1
        for name, value, task, _ in self.awaited:
            enough = [other for raised, other in self.raised[name] if raised >= value]
            if enough:
                self.edge(enough[0], task)
            else:
                self.tasks[task].missing += 1
        for (pool, take), members, task in self.takes:
            if take >= 2:
                freed = self.freed[pool, take - 2]
                for other in freed:
                    self.edge(other, task)
                self.tasks[task].missing += members - len(freed)
        return Graph(self.tasks, self.entries, tuple(self.ranks), frozenset(self.transports))
