"""The run before the first capture, and the thread that captures.

    warm_up(engine, teams)                     # all ranks together
    capture_thread(device).run(function)       # its result, or what it raises

The run goes op by op, with zeros, on the thread that will capture, and sets up what cannot be in a
capture. The generators of random numbers are put back: runs draw what they would without graphs.

cuBLAS, cuDNN and torch make handles, workspaces and execution plans for each thread, when the
thread first needs them, and none can be made while it captures. Autograd runs a backward on threads
of its own, which nothing has warmed up in a fresh process; callers may come on any thread. So
whoever captures asks the one thread of the device and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch

from interlace.comm import TeamComm
from interlace.runtime.cuda.graphs.captured import may_draw
from interlace.runtime.values import new_storage
from interlace.torch_private import is_cuda_stream_capturing

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine

T = TypeVar("T")


class CaptureThread:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "interlace capture", self._begin)

    def _begin(self) -> None:
        with torch.cuda.device(self._device):  # the question gives a new thread CUDA's context
            is_cuda_stream_capturing()

    def run(self, function: Callable[[], T]) -> T:
        """Calls it with the caller's current stream and inference mode."""
        stream = torch.cuda.current_stream(self._device)
        inference = torch.is_inference_mode_enabled()

        def as_caller() -> T:
            with (
                torch.cuda.device(self._device),
                torch.cuda.stream(stream),
                torch.inference_mode(inference),
            ):
                return function()

        future = self._thread.submit(as_caller)
        try:
            return future.result()
        finally:
            wait([future])  # also after Ctrl-C: until then what it uses is its own


@cache
def capture_thread(device: torch.device) -> CaptureThread:
    return CaptureThread(device)


def warm_up(engine: CudaEngine, teams: Sequence[TeamComm]) -> None:
    """Runs on all ranks of the teams together; where one fails, the others hear of it."""
    tag = engine.context.label.tag
    places = [(team, f"{team.topic}/{tag:x}/{team.resets}/warm-up") for team in teams]
    with ExitStack() as meetings:
        for team, place in places:
            meetings.enter_context(team.board.attending([place]))
        _run_once(engine)
    try:
        for team, place in places:
            team.board.exchange(place, {}, engine.context.timeout_s)
    except BaseException as error:
        engine.watched.fail(error)  # a reset then gives it another place
        raise


def _run_once(engine: CudaEngine) -> None:
    """A run with zeros, to its end."""
    devices = [engine.device] if engine.device.type == "cuda" else []
    draws, inputs = may_draw(engine.context.plan.program), engine.context.inputs
    values = engine.context.values
    try:
        with torch.random.fork_rng(devices, enabled=draws, device_type="cuda"):
            zeros = inputs.zeros(engine.changes.buffers)
            values.move(new_storage(values.nbytes, engine.device))
            capture_thread(engine.device).run(lambda: engine.issue(zeros, None))
            engine.synchronize()
            values.move(new_storage(0, engine.device))  # after a failure the streams may go on
    except BaseException as error:
        engine.watched.fail(error)  # peers wait for this rank in their runs
        raise
