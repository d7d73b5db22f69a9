"""The streams of a bound Program, the points of one that others wait for, and (with the option
`trace`) when each op ran on its stream.

The Program's stream `main` (its first, if none is called so) is the one that the caller is on when
it calls; the others are streams of the engine, with priority, so that a kernel of theirs need not
wait for the end of a large one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.comm.cuda.driver import Driver, Event
from interlace.runtime.cuda.waits.words import Words

Thunk = Callable[[], Any]


@dataclass(slots=True)
class Lane:
    """A stream of the Program. The caller's changes from run to run."""

    name: str
    handle: int = 0
    stream: Any = None
    """The torch stream; None for the caller's, which is current anyway."""

    @classmethod
    def own(cls, name: str, device: torch.device) -> Lane:
        stream: Any = torch.cuda.Stream(device, priority=-1)
        return cls(name, int(stream.cuda_stream), stream)

    def within(self, run: Thunk) -> Thunk:
        """`run`, with this stream as torch's current one."""
        stream = self.stream
        if stream is None:
            return run
        switch: Any = torch._C._cuda_setStream  # pyright: ignore
        current: Any = torch._C._cuda_getCurrentStream  # pyright: ignore
        mine = (stream.stream_id, stream.device_index, stream.device_type)

        def inside() -> None:
            before = current(mine[1])
            switch(stream_id=mine[0], device_index=mine[1], device_type=mine[2])
            try:
                run()
            finally:
                switch(stream_id=before[0], device_index=before[1], device_type=before[2])

        return inside


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


def in_turn(runs: Sequence[Thunk]) -> Thunk:
    if len(runs) == 1:
        return runs[0]

    def run() -> None:
        for each in runs:
            each()

    return run


class OpTimer:
    """The ops of the last run, each between two events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: list[tuple[int, Any, Any]] = []
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
