"""The thread that captures, one for each device: the runs before captures are issued there too.

    capture_thread(device).run(function)       # its result, or what it raises

cuBLAS, cuDNN and torch make handles, workspaces and execution plans for each thread, when the
thread first needs them, and none can be made while it captures. Autograd runs a backward on threads
of its own, which nothing has warmed up in a fresh process; callers may come on any thread. So
whoever captures asks this one and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


class CaptureThread:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "interlace capture", self._begin)

    def _begin(self) -> None:
        with torch.cuda.device(self._device):  # the question gives a new thread CUDA's context
            torch._C._cuda_isCurrentStreamCapturing()  # pyright: ignore

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
