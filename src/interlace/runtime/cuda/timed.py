"""When each op of a run ran on the device, for the option `trace`.

timed = Timed(device)
step = timed.step(index, lane, step)      # as it is bound
timed.begin()                             # a run
timed.spans()                             # when it has ended: [(op, start, end), ...] in seconds
"""

from __future__ import annotations

import time
from typing import Any

import torch

from interlace.runtime.cuda.lanes import Lane, Thunk


class Timed:
    """The ops of the last run, each between two events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: list[tuple[int, Any, Any]] = []
        self._origin: Any = None
        self._began = 0.0

    def step(self, index: int, lane: Lane, step: Thunk) -> Thunk:
        """The step between two events of its stream."""

        def run() -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = lane.stream or torch.cuda.current_stream(self._device)
            start.record(stream)
            step()
            end.record(stream)
            self._timed.append((index, start, end))

        return run

    def begin(self) -> None:
        """A run begins, on the stream that is current."""
        self._timed = []
        self._began = time.perf_counter()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(self._device))

    def spans(self) -> list[tuple[int, float, float]]:
        """Op, start and end of each op of the last run, which has ended."""
        began, origin = self._began, self._origin
        return [
            (
                index,
                began + origin.elapsed_time(start) / 1e3,
                began + origin.elapsed_time(end) / 1e3,
            )
            for index, start, end in self._timed
        ]
