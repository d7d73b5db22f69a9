"""NCCL's collectives and messages, issued on the stream that is current.

    run = bind_on_stream(backend, spec, time_out_s=60)
    run(src, dst)                                  # returns when it is issued
    move = bind_messages(backend, [("send", 1), ("recv", 3)], device)
    move([a, b])

Bounded by the watchdog: what never completes is aborted with its communicator (`aborts.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.collectives import Spec, as_bytes, bind_collective
from interlace.comm.host.signals import Wait
from interlace.errors import BackendError


def leave_unregistered() -> None:
    """Has NCCL map nothing of what graphs captured later use, unless the environment says so.

    With multicast a capture that registers is a meeting of all ranks, and one alone, whose tensors
    came to lie elsewhere, captures anew alone. NCCL reads this once: too late, as a rule, where it
    was in a capture before.
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


class StreamWait(Wait):
    """How a stream waits for a collective: it is ordered after it, and the host goes on."""

    def __init__(self, time_out_s: float) -> None:
        super().__init__(time_out_s, lambda: "a collective")

    def finish(self, work: Any, missing: Any = None) -> None:
        """Orders the current stream after the work."""
        if work is not None:
            work.wait()


Run = Callable[[torch.Tensor | None, torch.Tensor | None], None]


def bind_on_stream(backend: Any, spec: Spec, time_out_s: float) -> Run:
    """The function that issues this collective."""
    if backend.name() == "gloo":
        raise BackendError(
            "gloo cannot be ordered with CUDA streams: choose transport='nccl' or 'peer', or run "
            "the Program on the CPU"
        )
    run, wait = bind_collective(backend, spec, time_out_s), StreamWait(time_out_s)

    def issue(src: torch.Tensor | None, dst: torch.Tensor | None) -> None:
        try:
            run(src, dst, wait)
        except dist.DistError as error:
            raise _typed(spec.kind, error) from error

    return issue


def bind_messages(
    backend: Any, parts: Sequence[tuple[str, int]], device: torch.device
) -> Callable[[Sequence[torch.Tensor]], None]:
    """The function that issues these Sends and Recvs as one group."""

    def run(tensors: Sequence[torch.Tensor]) -> None:
        packed = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        try:
            backend._start_coalescing()
            try:
                for (kind, peer), tensor in zip(parts, packed, strict=True):
                    if tensor.numel():
                        move = backend.send if kind == "send" else backend.recv
                        move([as_bytes(tensor)], peer, 0)
            except BaseException:  # left open, the group would take in all that this thread issues
                with contextlib.suppress(Exception):
                    backend._end_coalescing()
                raise
            work = backend._end_coalescing()
            if work is not None:
                work.wait()
        except dist.DistError as error:
            raise _typed("send and recv", error) from error
        for (kind, _), tensor, pack in zip(parts, tensors, packed, strict=True):
            if pack is not tensor and kind == "recv":
                tensor.copy_(pack)

    return run


def _typed(what: str, error: Exception) -> BackendError:
    """NCCL's error as ours. The first use of a kind connects, and waits for peers: an abort that
    a failure began ends that too, and then the failure is what the caller is told (`Runner`)."""
    return BackendError(f"NCCL could not issue {what}: {error}")
