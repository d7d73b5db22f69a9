"""The tasks of a set of ranks, and what each waits for: the simulator's static picture.

    >>> build([program], machine).tasks[0].after

One op is one task, but the members of a collective, or a Send and its Recv, share one: they begin
when the last has come and end together. A Group is two tasks, before and after its messages; a
Fused is its launch and a task for each member, in the order in which a kernel works through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.cost.machine import Machine
from interlace.cost.op_times import (
    Cost,
    at_hand,
    fused_costs,
    issue_seconds,
    op_cost,
)
from interlace.cost.symmetry import SimulatedRanks
from interlace.errors import SoundnessError
from interlace.ir import (
    Fused,
    Meetings,
    Op,
    Program,
    Spot,
    Where,
    bindings,
)
from interlace.ir.order import Channel, MessageEnd, Queue

Ports = tuple[str, ...]
Spanned = tuple[Op, int, int]
"""An op, its first task and its last."""


@dataclass(slots=True)
class Task:
    """Something that takes time in some places once all that it waits for is done."""

    places: tuple[int, ...]
    """Its ranks; then, as `~host`, the hosts through whose network interface it goes, where ranks
    share one."""
    cost: Cost
    ports: tuple[str, ...] = ()
    """For each place which way a transfer's bytes go there: `in`, `out` or `both`; `each` where it
    stands for two, of which one goes out and one comes in: a message of a folded team."""
    alike: float = 1.0
    """Number of transfers that it stands for at a host's interface."""
    earliest: float = 0.0
    """When the host has issued it."""
    missing: int = 0
    """Number of other tasks that it waits for."""
    after: list[int] = field(default_factory=list[int])
    """The tasks that wait for it."""

    def port(self, place: int) -> str:
        """Which way a transfer goes through the link of a place."""
        return self.ports[self.places.index(place)]


@dataclass(slots=True)
class PlacedOp:
    """One op of one rank: its last task, and those that hold its stream up."""

    rank: int
    index: int
    op: Op
    last: int
    after: tuple[int, ...]
    earliest: float


@dataclass(slots=True)
class TaskGraph:
    """The tasks, and the op behind each."""

    tasks: list[Task]
    entries: list[PlacedOp]


def build(
    programs: Sequence[Program], machine: Machine, symmetry: SimulatedRanks | None = None
) -> TaskGraph:
    """The tasks of one run of every rank of a set of Programs, or of those that `symmetry` has."""
    builder = _Builder(machine, symmetry or SimulatedRanks.of(programs))
    for program in programs:
        for rank in program.world if program.rank is None else (program.rank,):
            if rank in builder.symmetry.ranks:
                builder.add(program, rank)
    return builder.finish()


class _Builder:
    def __init__(self, machine: Machine, symmetry: SimulatedRanks) -> None:
        self.machine, self.symmetry = machine, symmetry
        self.tasks: list[Task] = []
        self.entries: list[PlacedOp] = []
        self.meetings = Meetings[int](symmetry.folded)  # of tasks
        self.shared: dict[tuple[Queue | Channel, int], int] = {}  # what several ops come to

    def task(
        self, ranks: tuple[int, ...], cost: Cost, earliest: float = 0.0, ports: Ports = ("both",)
    ) -> int:
        every = ports if len(ports) == len(ranks) else ("both",) * len(ranks)
        self.tasks.append(Task(ranks, cost, every, earliest=earliest))
        return len(self.tasks) - 1

    def edge(self, one: int, other: int) -> None:
        self.tasks[one].after.append(other)
        self.tasks[other].missing += 1

    def add(self, program: Program, rank: int) -> None:
        """One rank's ops, with the order that its own list gives."""
        where, boxes = program.where(rank), program.boxes(rank)
        box = at_hand(boxes) if program.sizes.sizes else boxes
        teams = {team.name: team for team in program.teams}
        bound, last_of = bindings(program.ops), dict[Spot, int]()
        streams: dict[str, int] = {}
        queued: dict[Queue, int] = {}
        issued, host = 0.0, -1
        for index, op in enumerate(program.ops):
            issued += issue_seconds(op, self.machine, teams)
            after = tuple(t for t in (streams.get(op.stream), host) if t is not None and t >= 0)
            cost = op_cost(op, box, self.machine, teams, where)
            ordering = op.ordering()
            first = last = -1
            if ordering.meets is not None:
                queue, _ = key = self.meetings.collective(where, ordering.meets, 0)
                last = self.meet(key, queue[0].ranks, cost, after, issued)
                self.tasks[last].alike = self.symmetry.alike(teams[queue[0].name], where)
                if queue in queued and queued[queue] != last:
                    self.edge(queued[queue], last)
                queued[queue] = last
            elif ordering.messages and not op.members:
                (end,) = ordering.messages
                last = self.message(where, end, cost, after, issued)
            else:
                puts = op.one_sided and op.writes()[0].peer is not None
                ports = ("out",) if puts else ("in",)
                first = last = self.task((rank,), cost, issued, ports)
                for other in after:
                    self.edge(other, first)
            if ordering.messages and op.members:
                last = self.task((rank,), Cost())
                for end, item in zip(ordering.messages, op.members, strict=True):
                    spent = op_cost(item, box, self.machine, teams, where)
                    self.edge(self.message(where, end, spent, (first,)), last)
            parts: list[Spanned] = [(op, first, last)]
            if isinstance(op, Fused):
                parts.clear()
                last = self.fused(rank, op, fused_costs(op, box, self.machine), last, parts)
            self.entries.append(PlacedOp(rank, index, op, last, after, issued))
            for number, (item, begin, end) in enumerate(parts):
                spot, means = (index, number), item.ordering()
                last_of[spot] = end
                if means.waits is not None:
                    if spot not in bound:
                        raise SoundnessError(f"rank {rank}, op {index}: wait for {means.waits!r}, "
                                             "which is not recorded before it")  # fmt: skip
                    self.edge(last_of[bound[spot]], begin)
                waits = means.expects or means.takes
                if not (means.meets or means.messages):
                    self.meetings.add(where, means, begin if waits else end)
                host = end if means.holds_host else host
            streams[op.stream] = last

    def message(
        self, where: Where, end: MessageEnd, cost: Cost, before: Sequence[int], issued: float = 0.0
    ) -> int:
        """The task of a message, which its two ends share."""
        key = self.meetings.message(where, end, 0)
        (team, *ends), _ = key
        folded = team.name in self.symmetry.folded
        task = self.meet(key, team.ranks if folded else tuple(ends), cost, before, issued)
        self.tasks[task].alike = self.symmetry.beside.get(where.rank, 1)
        if folded and ends[1]:  # not to itself
            self.tasks[task].ports = ("each",)
        return task

    def fused(
        self,
        rank: int,
        op: Fused,
        costs: Sequence[tuple[Cost, float]],
        start: int,
        parts: list[Spanned],
    ) -> int:
        """The members' tasks, noted in `parts`; the task of the end.

        The matmuls go one after another (`chain`); besides, each takes a tile's time from when its
        gates are open.
        """

        def then(cost: Cost, *before: int) -> int:
            task = self.task((rank,), cost)
            for other in dict.fromkeys(before):
                self.edge(other, task)
            return task

        chain, gates, tiles = start, list[int](), list[int]()
        for member, (cost, tile_s) in zip(op.members, costs, strict=True):
            if tile_s:
                begin = chain = then(cost, chain)
                end = then(Cost(fixed_s=tile_s), start, *gates)
                tiles.append(end)
            elif member.ordering().waits is not None or member.ordering().expects:
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
        key: tuple[Queue | Channel, int],
        ranks: tuple[int, ...],
        cost: Cost,
        before: Sequence[int],
        issued: float,
    ) -> int:
        """The task that ops on several ranks share; on this rank it follows `before`."""
        task = self.shared.get(key)
        if task is None:
            ports = ("out", "in") if len(key[0]) == 3 else ()
            task = self.task(tuple(dict.fromkeys(ranks)), cost, ports=ports)
            self.shared[key] = task
        elif cost.work_s > self.tasks[task].cost.work_s:
            self.tasks[task].cost = cost
        self.tasks[task].earliest = max(self.tasks[task].earliest, issued)
        for other in before:
            self.edge(other, task)
        return task

    def finish(self) -> TaskGraph:
        """The graph, with the order between ranks; what never comes is waited for for ever."""
        tasks, met = self.tasks, self.meetings
        for queue, k, come, _ in met.collectives():
            tasks[self.shared[queue, k]].missing += len(come) < len(queue[0].ranks)
        for message in met.deliveries():
            lacks = message.send is None or message.recv is None
            tasks[self.shared[message.channel, message.number]].missing += lacks
        for level in met.levels():
            self.waits(level.notify, level.expect)
        for retake in met.retakes():
            for taker in retake.takers:
                for free in retake.frees.values():
                    self.waits(free, taker)
        for task in filter(lambda task: task.cost.between, tasks):
            self.through_interfaces(task)
        return TaskGraph(tasks, self.entries)

    def through_interfaces(self, task: Task) -> None:
        """Adds the interfaces that a transfer between hosts shares with those of other ranks."""
        if self.machine.link(task.cost.transport, between=True).shared:
            hosts = [~self.symmetry.hosts.get(rank, rank) for rank in task.places]
            ports = dict(zip(hosts, task.ports, strict=True))
            task.places += tuple(ports)
            task.ports += tuple(ports.values())

    def waits(self, source: int | None, task: int) -> None:
        if source is None:
            self.tasks[task].missing += 1
        else:
            self.edge(source, task)
