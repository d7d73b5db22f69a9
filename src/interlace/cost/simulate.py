"""The simulator: a discrete-event play of the ranks' tasks, which predicts their timeline.

    >>> timeline = simulate(program, default_machine("cuda"))
    >>> timeline.makespan_s, timeline.figures(rank=0).hidden
    (0.0026, 0.94)

Compute of one rank shares its lanes, transfers of one rank share its link, and a transfer that
takes a lane or steals from compute slows it down. A set that gets stuck raises SoundnessError.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from interlace.cost.graph import Task, TaskGraph, build
from interlace.cost.machine import Machine, default_machine
from interlace.cost.op_times import op_kind, op_name, run_issue_seconds
from interlace.cost.timeline import Span, Timeline
from interlace.errors import SoundnessError
from interlace.ir import Program
from interlace.ir.size_class import FIXED, deciding


def simulate(programs: Program | Sequence[Program], machine: Machine | str = "cpu") -> Timeline:
    """The predicted timeline of one run, from an idle machine: a calibration (`Machine.load`), or
    the built-in model of a device by its name, `cpu` or `cuda`."""
    machine = default_machine(machine) if isinstance(machine, str) else machine
    listed = [programs] if isinstance(programs, Program) else list(programs)
    sizes = listed[0].sizes if listed else FIXED
    with deciding(sizes):  # what is noted here is for nothing: predictions are for these sizes
        graph = build(listed, machine)
    play = _Play(graph, machine)
    play.run()
    if play.left:
        raise SoundnessError(graph.stuck([end is not None for end in play.end]))
    spans: list[Span] = []
    for item in graph.entries:
        end = play.end[item.last]
        arrived = max((play.end[i] or 0.0 for i in item.after), default=0.0)
        assert end is not None
        start = min(end, max(arrived, item.earliest))
        op, kind = item.op, op_kind(item.op)
        if end > start or kind != "memory":
            name = op_name(op)
            spans.append(Span(item.rank, op.stream, item.index, name, start, end, op.site, kind))
    return Timeline(tuple(spans), listed[0].name if listed else "", "predicted")


def run_after_run(program: Program, machine: Machine) -> tuple[Timeline, float]:
    """The predicted timeline of a run amid others, which the host has issued by then, and how long
    the host takes to issue one: the longer of the two is what a run takes.

    A machine that does not tell what issuing costs is taken from idle.
    """
    if not machine.issue:
        return simulate(program, machine), 0.0
    return simulate(program, machine.replayed), run_issue_seconds(program, machine)


class _Play:
    """Runs the tasks of a graph. Time passes from event to event; speeds change only there."""

    def __init__(self, graph: TaskGraph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        count = len(graph.tasks)
        self.missing = [task.missing for task in graph.tasks]
        self.end: list[float | None] = [None] * count
        self.left = count
        self.remaining = [0.0] * count
        self.speed = [0.0] * count
        self.since = [0.0] * count
        self.version = [0] * count
        self.active: dict[int, set[int]] = {rank: set() for rank in graph.ranks}
        self.links = {name: machine.link(name) for name in graph.transports}
        self.events: list[tuple[float, int, int]] = []  # (when, task, version; -1: fixed part over)

    def run(self) -> None:
        """Plays until nothing more can happen."""
        for index in [i for i, missing in enumerate(self.missing) if missing == 0]:
            self._start(index, 0.0)
        while self.events:
            now, index, version = heapq.heappop(self.events)
            if version < 0:
                self._begin_work(index, now)
            elif version == self.version[index] and self.end[index] is None:
                self._stop_work(index, now)

    def _start(self, first: int, now: float) -> None:
        """Starts a task whose conditions hold, and whatever it completes at once."""
        stack = [first]
        while stack:
            index = stack.pop()
            task = self.graph.tasks[index]
            begin = max(now, task.earliest)
            if task.cost.work_s > 0 or task.cost.fixed_s > 0 or begin > now:
                heapq.heappush(self.events, (begin + task.cost.fixed_s, index, -1))
                continue
            stack += self._finish(index, now)

    def _finish(self, index: int, now: float) -> list[int]:
        self.end[index] = now
        self.left -= 1
        ready: list[int] = []
        for other in self.graph.tasks[index].after:
            self.missing[other] -= 1
            if self.missing[other] == 0:
                ready.append(other)
        return ready

    def _begin_work(self, index: int, now: float) -> None:
        task = self.graph.tasks[index]
        if task.cost.work_s <= 0:
            for other in self._finish(index, now):
                self._start(other, now)
            return
        self.remaining[index], self.since[index] = task.cost.work_s, now
        for rank in task.ranks:
            self.active[rank].add(index)
        self._adjust(task.ranks, now)

    def _stop_work(self, index: int, now: float) -> None:
        task = self.graph.tasks[index]
        for rank in task.ranks:
            self.active[rank].discard(index)
        ready = self._finish(index, now)
        self._adjust(task.ranks, now)
        for other in ready:
            self._start(other, now)

    def _adjust(self, ranks: Sequence[int], now: float) -> None:
        """Gives the tasks on these ranks the speed that the new company leaves them."""
        for index in {i for rank in ranks for i in self.active[rank]}:
            speed = min(self._share(index, rank) for rank in self.graph.tasks[index].ranks)
            if speed != self.speed[index] or self.version[index] == 0:
                self.remaining[index] -= (now - self.since[index]) * self.speed[index]
                self.since[index], self.speed[index] = now, speed
                self.version[index] += 1
                when = now + max(0.0, self.remaining[index]) / speed
                heapq.heappush(self.events, (when, index, self.version[index]))

    def _share(self, index: int, rank: int) -> float:
        tasks, company = self.graph.tasks, self.active[rank]
        load, stolen, sharing = 0.0, 0.0, 0
        mine = tasks[index].cost.transport
        for other in company:
            transport = tasks[other].cost.transport
            if transport is None:
                load += 1
                continue
            link = self.links[transport]
            load += link.lane
            stolen = max(stolen, link.steals)
            sharing += mine is not None and _same_way(tasks[index], tasks[other], rank)
        share = min(1.0, self.machine.lanes / load) if load else 1.0
        if mine is None:
            return share * (1.0 - stolen)
        return (share if self.links[mine].lane else 1.0) / sharing


def _same_way(one: Task, other: Task, rank: int) -> bool:
    """Whether two transfers go the same way through a rank's link."""
    ports = {task.ports[task.ranks.index(rank)] for task in (one, other)}
    return len(ports) == 1 or "both" in ports
