"""The Program of a graph, whose nodes are issued as listed, or in any order that its dependences
allow.

As listed is what an interpreter of the graph does, and what a scheduler's result is read by: nodes
of one stream follow each other. Memory of a tensor is then used again as torch's caching allocator
does: once the host has let go of it, which is after the last node that holds it, by what is
allocated next on the stream that it is from.

Any order is what Inductor's scheduler may do: node order is no dependence, and a stream op that no
data goes through can move. So of two nodes on one stream only those follow each other between which
the graph has a path: arguments, `control_deps`, a write and what else touches the same storage, and
the collectives of one group. A race in this Program is one that some order of the nodes has. (An
order in which one of two paths breaks, and another in which the other does, count as one in which
both do.)

Each stream is cut into lanes, chains of nodes that do follow each other (as listed: one lane), and
events stand for the order between lanes.

    to_program(trace, any_order=False, ready=False, joined=True).program

A collective is a call on its queue: all ranks run the graph, so each reaches it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from interlace.errors import UnsupportedError
from interlace.ir.view import View
from interlace_check.graphs.reading.sync import EVERY, HOST
from interlace_check.graphs.reading.tensors import Storage
from interlace_check.graphs.steps import MAIN, GraphStep, Trace
from interlace_check.tracing import OriginBuilder

MAX_STEPS = 20_000
"""Steps of a graph whose orders are checked: the paths between them take this many bits each."""
REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class StepOrigin:
    """Step that an op stands for, or the caller's part before or after, or a storage's end."""

    role: Literal["step", "entry", "exit", "free", "constant"]
    number: int = -1


@dataclass(slots=True)
class _Point:
    """A part of a step that is on one stream."""

    step: int
    stream: str
    is_queue: bool = False
    """True for the part of a `start` on the queue."""
    lane: str = ""
    preds: list[int] = field(default_factory=list[int])


def to_program(trace: Trace, any_order: bool, ready: bool, joined: bool) -> GraphProgram:
    """The Program of a graph, as listed or for any order of its nodes."""
    if any_order and len(trace.steps) > MAX_STEPS:
        raise UnsupportedError(
            f"the graph has {len(trace.steps)} steps, and all orders of at most {MAX_STEPS} are "
            f"checked; fix: check it with order='listed', or its parts one by one"
        )
    program = GraphProgram(trace, any_order)
    program.write(ready, joined)
    return program


class GraphProgram(OriginBuilder[StepOrigin]):
    """The Program of one graph."""

    def __init__(self, trace: Trace, any_order: bool) -> None:
        super().__init__("graph", (), (0,), nothing=StepOrigin("entry"))
        self.trace, self.any_order = trace, any_order
        self._names: dict[str, str] = {MAIN: MAIN}
        self._held: defaultdict[str, list[Storage]] = defaultdict(list)
        """Storages allocated on each stream and not given back yet."""
        self._before: list[int] = []
        """For each step, the steps before it in every order, as bits."""
        self._points: list[_Point] = []
        self._lanes: defaultdict[str, list[list[int]]] = defaultdict(list)
        """Lanes of each stream, each a chain of points."""
        self._main: dict[int, int] = {}
        """Point of each step that others wait for (of a `start`, the one on the queue)."""
        self._records: defaultdict[int, list[int]] = defaultdict(list)

    # The order

    def _is_before(self, one: int, other: int) -> bool:
        return bool(self._before[other] >> one & 1) if self.any_order else one < other

    def _place(self, number: int, step: GraphStep) -> None:
        """The points of a step, with what each waits for."""
        if step.kind == "wait_stream":
            there = self._point(number, step.other)
            self._main[number] = self._point(number, step.stream, (there,))
        elif step.kind == "start":
            assert step.issue is not None
            here = self._point(number, step.stream)
            queue = f"{step.issue.queue}:{number}" if self.any_order else step.issue.queue
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
        """The points that a point waits for, less those that one of these follows anyway."""
        kept: list[int] = []
        for one in dict.fromkeys(point.preds):
            point_before = self._points[one]
            if point_before.is_queue or not any(
                other != one
                and self._points[other].stream == point_before.stream
                and self._is_before(point_before.step, self._points[other].step)
                for other in point.preds
            ):
                kept.append(one)
        return kept

    # The ops

    def write(self, ready: bool, joined: bool) -> None:
        """All ops, in the order listed."""
        for number, step in enumerate(self.trace.steps):
            before = 0
            for earlier in step.after if self.any_order else ():
                before |= self._before[earlier] | 1 << earlier
            self._before.append(before)
            if step.kind == "record" and step.event is not None:
                self._records[step.event].append(number)
        for number, step in enumerate(self.trace.steps):
            self._place(number, step)
        crossing = {
            pred
            for point in self._points
            for pred in point.preds
            if self._points[pred].lane != point.lane
        }
        ends = [lane[-1] for name in (MAIN, HOST) for lane in self._lanes[name]]
        crossing.update(ends)
        begun: set[str] = set()
        self._enter()
        for index, point in enumerate(self._points):
            if point.lane not in begun:
                begun.add(point.lane)
                inputs = ready or point.stream == MAIN
                self._on(point.lane, StepOrigin("entry"))
                self.wait("inputs" if inputs else "constants")
            self._on(point.lane, StepOrigin("step", point.step))
            for pred in point.preds:
                if self._points[pred].lane != point.lane:
                    self.wait(f"p{pred}")
            self._do(point)
            if index in crossing:
                self.record(f"p{index}")
        self._on(MAIN, StepOrigin("exit"))
        for end in ends:
            self.wait(f"p{end}")
        if joined:
            self._exit()
        self._give_back(MAIN, MAIN, self.trace.num_nodes + 1)

    def _on(self, lane: str, origin: StepOrigin) -> None:
        """The next ops run on that lane and stand for that origin."""
        self.at(self._names.setdefault(lane, f"s{len(self._names)}"), origin)

    def _enter(self) -> None:
        """The caller's part before: constants are there for long, inputs come on its stream."""
        for kind, origin, event in (
            ("constant", StepOrigin("constant"), "constants"),
            ("input", StepOrigin("entry"), "inputs"),
        ):
            self._on(MAIN, origin)
            storages = [each for each in self.trace.storages if each.origin == kind]
            self._make(storages)
            self._touch((), _views(storages))
            self.record(event)

    def _exit(self) -> None:
        """The caller reads, on its own stream, what is returned and what was written in place."""
        views = [tensor.view for tensor in self.trace.outputs]
        views += [
            View(storage.name)
            for storage in self.trace.storages
            if storage.origin == "input" and storage.written
        ]
        if views:
            self._touch(tuple(dict.fromkeys(views)), ())

    def _do(self, point: _Point) -> None:
        """The part of a step that a point is."""
        step = self.trace.steps[point.step]
        if step.makes and not point.is_queue:
            self._give_back(step.stream, point.lane, step.place.number)
            self._on(point.lane, StepOrigin("step", point.step))
            self._make(step.makes)
            lent = [each for each in step.makes if not each.kept and not each.is_host]
            for storage in lent:
                self._held[storage.stream].append(storage)
        if point.is_queue or step.kind == "compute":
            self._touch(step.reads, (*step.writes, *_views(step.makes)))

    def _make(self, storages: Sequence[Storage]) -> None:
        for storage in storages:
            number = 1 if storage.num_bytes is None else storage.num_bytes  # 1 stands for all
            self.alloc(storage.name, "u8", (number,))

    def _touch(self, reads: Sequence[View], writes: Sequence[View]) -> None:
        """Something that reads and writes.

        What shares a storage with what is written is read by an op of its own before: in-place
        operators are right by themselves, and other streams must not write it either.
        """
        written = {view.buffer for view in writes}
        shared = [view for view in reads if view.buffer in written and view not in writes]
        own = [view for view in reads if view.buffer not in written]
        if shared:
            self.call("fx.read", *shared)
        if own or writes:
            self.call("fx.call", *own, out=writes)

    def _give_back(self, stream: str, lane: str, number: int) -> None:
        """Gives back, as listed, what the host let go of before a node that allocates."""
        if self.any_order:
            return  # which memory is used again then depends on the order
        gone = [each for each in self._held[stream] if each.last_use < number]
        self._held[stream] = [each for each in self._held[stream] if each not in gone]
        for storage in gone:
            origin = StepOrigin("free", storage.number)
            self._on(lane, origin)
            lanes = [lane] if storage.recorded else []
            for name in sorted(storage.recorded):
                lanes += [self._points[each[-1]].lane for each in self._lanes[name]]
            for each in lanes:
                self._on(each, origin)
                event = self.record(f"free{storage.number}_{self.current_stream}")
                self._on(REUSE, origin)
                self.wait(event)
            self.free(storage.name)


def _views(storages: Sequence[Storage]) -> tuple[View, ...]:
    return tuple([View(storage.name) for storage in storages])
