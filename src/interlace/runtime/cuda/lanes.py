"""The streams of a bound Program, the points of one that others wait for, the words that they write
and wait for, and (with the option `trace`) when each op ran on its stream.

    step = Words.of("write", driver, lane, words, value)     # a function without arguments
    steps = brought_together([(lane, step), ...])

The Program's stream `main` (its first, if none is called so) is the one that the caller is on when
it calls; the others are streams of the engine, with priority, so that a kernel of theirs need not
wait for the end of a large one.

Note [In one call]
    What a stream does with words in a row is one call of the driver, and one node of a graph: less
    time of the host, and less between a put and the next one. Of two such steps with those of other
    streams between them in the list, a wait may be issued later and a write earlier, but neither
    the other way: streams may share a queue of the device, in which nothing overtakes a wait, and
    only the order of the list is known to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.comm.cuda.driver import Batch, Driver, Event
from interlace.runtime.calling.calls import Thunk
from interlace.torch_private import cuda_stream, set_cuda_stream


@dataclass(slots=True)
class Lane:
    """A stream of the Program. The caller's changes from run to run."""

    name: str
    handle: int = 0
    stream: torch.cuda.Stream | None = None
    """The torch stream; None for the caller's, which is current anyway."""

    @classmethod
    def own(cls, name: str, device: torch.device) -> Lane:
        stream = torch.cuda.Stream(device, priority=-1)
        return cls(name, int(stream.cuda_stream), stream)

    def within(self, run: Thunk) -> Thunk:
        """`run`, with this stream as torch's current one."""
        stream = self.stream
        if stream is None:
            return run
        switch: Any = set_cuda_stream
        current: Any = cuda_stream
        mine = (stream.stream_id, stream.device_index, stream.device_type)

        def inside() -> None:
            before = current(mine[1])
            switch(stream_id=mine[0], device_index=mine[1], device_type=mine[2])
            try:
                run()
            finally:
                switch(stream_id=before[0], device_index=before[1], device_type=before[2])

        return inside


Part = tuple[str, tuple[int, ...], Callable[[], int]]
"""`wait` or `write`, which words, and what they are to reach, or become, in this run."""


class Words:
    """Waits and writes of words by one stream, in this order: `run` issues them."""

    def __init__(self, driver: Driver, lane: Lane, parts: tuple[Part, ...]) -> None:
        self.driver, self.lane, self.parts = driver, lane, parts
        self.count = sum(len(words) for _, words, _ in parts)
        self.kinds = {kind for kind, _, _ in parts}
        self.run = self._bound()

    @classmethod
    def of(
        cls, kind: str, driver: Driver, lane: Lane, words: Sequence[int], value: Callable[[], int]
    ) -> Words | None:
        """Waits until the words have reached a value, or writes it; None for no words."""
        return cls(driver, lane, ((kind, tuple(words), value),)) if words else None

    def __call__(self) -> None:
        self.run()

    def then(self, other: Words) -> Words:
        return Words(self.driver, self.lane, (*self.parts, *other.parts))

    def _bound(self) -> Callable[[], None]:
        driver, lane, parts = self.driver, self.lane, self.parts
        if self.count == 1:
            ((kind, (word,), value),) = parts
            issue = driver.wait if kind == "wait" else driver.write
            return lambda: issue(lane.handle, word, value())
        batch = driver.batch(*((kind, words) for kind, words, _ in parts))
        if len(parts) == 1:
            ((_, _, value),) = parts
            return lambda: batch.run(lane.handle, value())
        values = [value for _, _, value in parts]
        return lambda: batch.run(lane.handle, *[value() for value in values])


def brought_together(steps: Sequence[tuple[Lane | None, Thunk]]) -> list[Thunk]:
    """The steps, each with its stream, with fewer calls; None: the host waits there."""
    found: list[Thunk | None] = []
    last: dict[int, int] = {}  # by stream: its last step
    for lane, step in steps:
        if lane is None:
            last.clear()
            found.append(step)
            continue
        index = last.get(id(lane), -1)
        before = found[index] if index >= 0 else None
        if isinstance(step, Words) and isinstance(before, Words):
            fits = before.count + step.count <= Batch.LIMIT
            if fits and (step.kinds == {"write"} or index == len(found) - 1):
                found[index] = before.then(step)
                continue
            if fits and before.kinds == {"wait"}:
                found[index] = None
                step = before.then(step)
        last[id(lane)] = len(found)
        found.append(step)
    return [step.run if isinstance(step, Words) else step for step in found if step is not None]


@dataclass(frozen=True, slots=True)
class EventPoint:
    driver: Driver
    event: Event

    def record(self, lane: Lane) -> Thunk:
        driver, event = self.driver, self.event
        return lambda: driver.record(lane.handle, event)

    def wait(self, lane: Lane) -> Thunk:
        driver, event = self.driver, self.event
        return lambda: driver.wait_event(lane.handle, event)


@dataclass(frozen=True, slots=True)
class CounterPoint:
    """A point inside of a kernel, marked by a word that its tiles raise."""

    driver: Driver
    address: int
    due: Callable[[], int]
    """Value of the word at this point, in this run."""

    def wait(self, lane: Lane) -> Thunk:
        step = Words.of("wait", self.driver, lane, (self.address,), self.due)
        assert step is not None
        return step


Point = EventPoint | CounterPoint


class OpTimer:
    """The ops of the last run, each between two events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin: Any = None
        self._began = 0.0

    def step(self, index: int, lane: Lane, step: Thunk) -> Thunk:
        def run() -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = lane.stream or torch.cuda.current_stream(self._device)
            start.record(stream)
            step()
            end.record(stream)
            self._timed.append((index, start, end))

        return run

    def begin(self) -> None:
        self._timed = []
        self._began = time.perf_counter()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(self._device))

    def spans(self) -> list[tuple[int, float, float]]:
        began, origin = self._began, self._origin
        return [
            (
                index,
                began + origin.elapsed_time(start) / 1e3,
                began + origin.elapsed_time(end) / 1e3,
            )
            for index, start, end in self._timed
        ]
