"""The Program of a graph whose nodes may be issued in any order that its dependences allow.

That is what Inductor's scheduler may do: node order is no dependence, and a stream op that no data
goes through can move. So of two nodes on one stream only those follow each other between which the
graph has a path: arguments, `control_deps`, a write and what else touches the same storage, and
the collectives of one group. Each stream is cut into lanes, chains of nodes that do follow each
other, and events stand for the paths between lanes; so a race in this Program is one that some
order of the nodes has. (An order in which one of two paths breaks, and another in which the other
does, count as one in which both do.)

    reordered(trace, teams, rank=None, ready=False, joined=True).program()
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from interlace.errors import UnsupportedError
from interlace.ir.types import Team
from interlace_check.graphs.emitter import GraphEmitter, Origin
from interlace_check.graphs.reading.sync import EVERY, HOST
from interlace_check.graphs.steps import MAIN, Step, Trace

MAX_STEPS = 20_000
"""Steps of a graph whose orders are checked: the paths between them take this many bits each."""


def reordered(
    trace: Trace, teams: Mapping[str, Team], rank: int | None, ready: bool, joined: bool
) -> GraphEmitter:
    """The ops of a rank, ordered by the dependences alone."""
    if len(trace.steps) > MAX_STEPS:
        raise UnsupportedError(
            f"the graph has {len(trace.steps)} steps, and all orders of at most {MAX_STEPS} are "
            f"checked; fix: check it with order='listed', or its parts one by one"
        )
    return _Reordered(trace, teams, rank).run(ready, joined)


@dataclass(slots=True)
class _Point:
    """A part of a step that is on one stream."""

    step: int
    stream: str
    is_queue: bool = False
    """Whether it is what a `start` does on the queue."""
    lane: str = ""
    preds: list[int] = field(default_factory=list[int])


class _Reordered(GraphEmitter):
    def run(self, ready: bool, joined: bool) -> GraphEmitter:
        steps = self.trace.steps
        self._before: list[int] = []
        """By step: those before it in every order, as bits."""
        self._points: list[_Point] = []
        self._lanes: defaultdict[str, list[list[int]]] = defaultdict(list)
        """By stream: its lanes, each a chain of points."""
        self._main: dict[int, int] = {}
        """By step: the point that others wait for (of a `start`, the one on the queue)."""
        self._records: defaultdict[int, list[int]] = defaultdict(list)
        for number, step in enumerate(steps):
            before = 0
            for earlier in step.after:
                before |= self._before[earlier] | 1 << earlier
            self._before.append(before)
            if step.kind == "record" and step.event is not None:
                self._records[step.event].append(number)
        for number, step in enumerate(steps):
            self._place(number, step)
        self._write(ready, joined)
        return self

    def _place(self, number: int, step: Step) -> None:
        """The points of a step, with what each waits for."""
        if step.kind == "wait_stream":
            there = self._point(number, step.other)
            self._main[number] = self._point(number, step.stream, (there,))
        elif step.kind == "start":
            assert step.issue is not None
            here = self._point(number, step.stream)
            queue = f"{step.issue.queue}:{number}"
            self._main[number] = self._point(number, queue, (here,), True)
        else:
            awaited = [
                self._main[begun] for begun in step.finishes if self._is_before(begun, number)
            ]
            if step.kind in ("wait", "host") and step.event is not None:
                awaited += self._recorded(step.event, number)
            self._main[number] = self._point(number, step.stream, awaited)

    def _recorded(self, event: int, number: int) -> list[int]:
        """The record that a wait is for in every order, if one is."""
        records = self._records[event]
        for latest in records:
            if self._is_before(latest, number) and all(
                other == latest or self._is_before(other, latest) or self._is_before(number, other)
                for other in records
            ):
                return [self._main[latest]]
        return []

    def _is_before(self, one: int, other: int) -> bool:
        return bool(self._before[other] >> one & 1)

    def _point(
        self, number: int, stream: str, awaited: Iterable[int] = (), is_queue: bool = False
    ) -> int:
        """Puts a point on a lane of its stream."""
        step, index = self.trace.steps[number], len(self._points)
        point = _Point(number, stream, is_queue, preds=list(awaited))
        self._points.append(point)
        streams = {stream, HOST}
        if step.kind == "host" and step.event is None:
            streams |= set(self._lanes) if step.other == EVERY else {step.other}
        best: list[int] | None = None
        for name in streams:
            for lane in self._lanes[name]:
                last = self._last_before(lane, number)
                if last < 0:
                    continue
                point.preds.append(lane[last])
                if name == stream and last == len(lane) - 1 and best is None:
                    best = lane
        if best is None:
            best = []
            self._lanes[stream].append(best)
            point.lane = f"{stream}#{len(self._lanes[stream])}"
        else:
            point.lane = self._points[best[-1]].lane
        best.append(index)
        point.preds = self._needed(point)
        return index

    def _last_before(self, lane: list[int], number: int) -> int:
        """The place in a lane of the last point that is before a step; -1: none is."""
        place = bisect_left(
            lane, 1, key=lambda at: int(not self._is_before(self._points[at].step, number))
        )
        return place - 1

    def _needed(self, point: _Point) -> list[int]:
        """What a point waits for, less what one of these follows anyway."""
        kept: list[int] = []
        for one in dict.fromkeys(point.preds):
            mine = self._points[one]
            if mine.is_queue or not any(
                other != one
                and self._points[other].stream == mine.stream
                and self._is_before(mine.step, self._points[other].step)
                for other in point.preds
            ):
                kept.append(one)
        return kept

    def _write(self, ready: bool, joined: bool) -> None:
        """The ops, in the order listed."""
        awaited = {
            pred
            for point in self._points
            for pred in point.preds
            if self._points[pred].lane != point.lane
        }
        ends = [lane[-1] for name in (MAIN, HOST) for lane in self._lanes[name]]
        awaited.update(ends)
        begun: set[str] = set()
        self.enter()
        for index, point in enumerate(self._points):
            step, origin = self.trace.steps[point.step], Origin("step", point.step)
            if point.lane not in begun:
                begun.add(point.lane)
                inputs = ready or point.stream == MAIN
                self.wait("inputs" if inputs else "constants", point.lane, Origin("entry"))
            for pred in point.preds:
                if self._points[pred].lane != point.lane:
                    self.wait(f"p{pred}", point.lane, origin)
            if step.kind == "compute":
                made = self.make(step, origin)
                self.touch(point.lane, step.reads, (*step.writes, *made), origin)
            elif point.is_queue:
                assert step.issue is not None
                made = self.make(step, origin)
                self.communicate(step.issue, point.lane, step.reads, (*step.writes, *made), origin)
            if index in awaited:
                self.record(f"p{index}", point.lane, origin)
        if joined:
            for end in ends:
                self.wait(f"p{end}", MAIN, Origin("exit"))
            self.exit()
