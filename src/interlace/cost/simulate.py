"""The simulator: a discrete-event play of the ranks' tasks, which predicts their timeline.

    >>> timeline = simulate(program, default_machine("cuda"))
    >>> timeline.makespan_s, timeline.figures(rank=0).hidden
    (0.0026, 0.94)

Compute of one rank shares its lanes, transfers of one rank share its link, those of a host to
others its network interface where ranks share one, and a transfer that takes a lane or steals from
compute slows it down. A set that gets stuck raises SoundnessError.

    >>> prediction = predict([program], default_machine("cuda"))     # by symmetry
    >>> prediction.world, prediction.ranks, prediction.busy
    (1024, {0: 1024}, {'nccl': 0.0011, 'nccl between hosts': 0.0004})
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from interlace.cost.graph import TaskGraph, build
from interlace.cost.machine import Machine, default_machine
from interlace.cost.op_times import op_kind, op_name, run_issue_seconds
from interlace.cost.symmetry import SimulatedRanks
from interlace.cost.timeline import Interval, Span, Timeline, length, union
from interlace.errors import SoundnessError
from interlace.ir import Program
from interlace.ir.program import ProgramOrPath, together
from interlace.ir.sizes import FIXED, deciding


def simulate(
    programs: ProgramOrPath | Sequence[ProgramOrPath],
    machine: Machine | Literal["cpu", "cuda"] = "cpu",
) -> Timeline:
    """Predicts the timeline of one run, from an idle machine.

    Args:
        programs: as of `check`.
        machine: a calibration (`Machine.load`), or the built-in model of a device by its name:
            `cpu`, or `cuda` (an H200 with its NVLink peers).

    Returns:
        The timeline, with a span for each op of each rank.

    Raises:
        ParseError, OptionError: as of `check`.
        CalibrationError: there is no built-in model of that name.
        SoundnessError: the run would not end.
    """
    machine = default_machine(machine) if isinstance(machine, str) else machine
    listed = together(programs, "interlace.simulate")
    return _played(listed, machine).timeline(listed)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted run of many ranks, of which those were simulated that differ."""

    timeline: Timeline
    """Timeline of the ranks that were simulated."""
    ranks: Mapping[int, int]
    """Number of ranks that each simulated rank stands for, itself included."""
    busy: Mapping[str, float]
    """Seconds in which the busiest rank's link of each transport worked."""

    @property
    def world(self) -> int:
        """All ranks."""
        return sum(self.ranks.values())


def predict(programs: Sequence[Program], machine: Machine) -> Prediction:
    """One run by symmetry: it takes no longer where more ranks do the same (`SimulatedRanks`)."""
    play = _played(programs, machine, fold=True)
    return Prediction(play.timeline(programs), play.ranks, play.busy())


def _played(programs: Sequence[Program], machine: Machine, fold: bool = False) -> _Play:
    sizes, symmetry = programs[0].sizes if programs else FIXED, SimulatedRanks.of(programs, fold)
    with deciding(sizes):  # what is noted here is for nothing: predictions are for these sizes
        graph = build(programs, machine, symmetry)
    play = _Play(graph, machine, symmetry.ranks)
    play.run()
    if play.left:
        raise SoundnessError(
            "the ranks wait for one another for ever: `interlace check` says where"
        )
    return play


def run_after_run(program: Program, machine: Machine, fold: bool = False) -> tuple[Timeline, float]:
    """The predicted timeline of a run amid others, which the host has issued by then, and how long
    the host takes to issue one: the longer of the two is what a run takes. With `fold` it is of as
    few ranks as tell that (`SimulatedRanks`).

    A machine that does not tell what issuing costs is taken from idle.
    """
    play = _played([program], machine.replayed if machine.issue else machine, fold)
    host_s = run_issue_seconds(program, machine) if machine.issue else 0.0
    return play.timeline([program]), host_s


class _Play:
    """Runs the tasks of a graph. Time passes from event to event; speeds change only there."""

    def __init__(self, graph: TaskGraph, machine: Machine, ranks: Mapping[int, int]) -> None:
        self.graph, self.machine, self.ranks = graph, machine, ranks
        count = len(graph.tasks)
        self.missing = [task.missing for task in graph.tasks]
        self.end: list[float | None] = [None] * count
        self.left = count
        self.remaining = [0.0] * count
        self.speed = [0.0] * count
        self.since = [0.0] * count
        self.version = [0] * count
        self.begin = [0.0] * count
        self.active: defaultdict[int, set[int]] = defaultdict(set)  # by place
        used = {(task.cost.transport, task.cost.between) for task in graph.tasks}
        self.links = {link: machine.link(*link) for link in used}
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
            begin = self.begin[index] = max(now, task.earliest)
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
        for place in task.places:
            self.active[place].add(index)
        self._adjust(task.places, now)

    def _stop_work(self, index: int, now: float) -> None:
        task = self.graph.tasks[index]
        for place in task.places:
            self.active[place].discard(index)
        ready = self._finish(index, now)
        self._adjust(task.places, now)
        for other in ready:
            self._start(other, now)

    def _adjust(self, places: Sequence[int], now: float) -> None:
        """Gives the tasks in these places the speed that the new company leaves them."""
        for index in {i for place in places for i in self.active[place]}:
            speed = min(self._share(index, place) for place in self.graph.tasks[index].places)
            if speed != self.speed[index] or self.version[index] == 0:
                self.remaining[index] -= (now - self.since[index]) * self.speed[index]
                self.since[index], self.speed[index] = now, speed
                self.version[index] += 1
                when = now + max(0.0, self.remaining[index]) / speed
                heapq.heappush(self.events, (when, index, self.version[index]))

    def _share(self, index: int, place: int) -> float:
        tasks, company, interface = self.graph.tasks, self.active[place], place < 0
        load, stolen, mine = 0.0, 0.0, tasks[index].cost
        going = {"out": 0.0, "in": 0.0, "both": 0.0, "each": 0.0}
        """Transfers at the place, by port."""
        for other in company:
            cost, port = tasks[other].cost, tasks[other].port(place)
            if cost.transport is None:
                load += 1
                continue
            link = self.links[cost.transport, cost.between]
            if not interface:
                load += link.lane * (2 if port == "each" else 1)
                stolen = max(stolen, link.steals)
            if mine.transport is not None and cost.between == mine.between:
                going[port] += tasks[other].alike if interface else 1.0
        share = min(1.0, self.machine.lanes / load) if load else 1.0
        if mine.transport is None:
            return share * (1.0 - stolen)
        outward, inward = (going[way] + going["both"] + going["each"] for way in ("out", "in"))
        sharing = {
            "out": outward,
            "in": inward,
            "both": outward + inward - going["both"],
            "each": max(outward, inward),
        }[tasks[index].port(place)]
        return (share if self.links[mine.transport, mine.between].lane else 1.0) / sharing

    # what is told of it

    def timeline(self, programs: Sequence[Program]) -> Timeline:
        """The spans of all ops that take time or order others."""
        spans: list[Span] = []
        for item in self.graph.entries:
            end = self.end[item.last]
            arrived = max((self.end[i] or 0.0 for i in item.after), default=0.0)
            assert end is not None
            start = min(end, max(arrived, item.earliest))
            op, kind = item.op, op_kind(item.op)
            if end > start or kind != "memory":
                name, rank = op_name(op), item.rank
                spans.append(Span(rank, op.stream, item.index, name, start, end, op.site, kind))
        return Timeline(tuple(spans), programs[0].name if programs else "", "predicted")

    def busy(self) -> dict[str, float]:
        """Seconds in which the busiest rank's link of each transport worked."""
        worked: defaultdict[tuple[str, int], list[Interval]] = defaultdict(list)
        for task, begin, end in zip(self.graph.tasks, self.begin, self.end, strict=True):
            if task.cost.transport is not None:
                name = task.cost.transport + " between hosts" * task.cost.between
                for rank in task.places:
                    worked[name, rank].append((begin, end or begin))
        found: dict[str, float] = {}
        for (name, _), intervals in worked.items():
            found[name] = max(found.get(name, 0.0), length(union(intervals)))
        return found
