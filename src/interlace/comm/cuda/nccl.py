"""NCCL: its ranks connected, its collectives and messages issued on a stream, its end.

    join(backend, device, 60, "team tp on rank 0", ended, look)     # all ranks of it, together
    run = bind_on_stream(backend, spec, timeout_s=60)
    run(src, dst)                                  # on the current stream; returns when issued
    if not all_ended(abort([backend]), timeout_s=10): ...

Note [Connecting]
    NCCL connects in its first op, in a call that waits for all ranks and that no abort reaches: its
    communicator is not there yet. A rank that fails before its own first op would leave the others
    in that call for ever. So the ranks do one op in `prepare()`, and again after a reset, in a
    thread that is left behind where it does not come back; also for a backend of the user's. Where
    they do not meet it is aborted: what waits on it would take part in another op.

Note [Aborts]
    NCCL's ops end only with their communicator. A call of NCCL in another thread may keep an abort
    from ever returning, as may a kernel of another communicator on the same device (the abort frees
    memory, which waits for the device). So

    - each abort has a thread of its own (torch's own, in a destructor, would keep Python's lock);
    - after a failure, the watchdog begins it once no thread of this process is issuing a run with
      the communicator, or its patience ends: only the abort empties a full queue that holds such a
      thread up. No run begins and no NCCL op is issued after a failure;
    - a communicator of ours that a reset or `interlace.release()` leaves behind is aborted there,
      by all ranks, while nothing is under way;
    - the abort waits for the graphs that the communicator's ops were captured in: they go first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.backends import await_ranks
from interlace.comm.collectives import Counts, Spec, as_bytes, bind_collective
from interlace.comm.cuda.driver import relax_captures
from interlace.comm.host.signals import BoundedWait
from interlace.comm.rendezvous.patience import Errand
from interlace.errors import BackendError

Run = Callable[[torch.Tensor | None, torch.Tensor | None], None]
LAST_S = 1.0
"""Time after the time-out for the thread's own wait in the store to end, which is as long for a
backend that Interlace made. Returning while the interpreter ends, it would abort the process."""


def join(
    backend: Any,
    device: torch.device | None,
    timeout_s: float,
    whose: str,
    ended: Callable[[], Collection[int]],
    look: Callable[[], None],
) -> None:
    """Has the ranks of a backend meet, each with its device (None: the current one). Where they do
    not within the time-out, or a process has `ended`, or `look` raises, the backend is aborted."""
    used = device or torch.device("cuda", torch.cuda.current_device())

    def act() -> None:
        relax_captures()
        meet(backend, used, timeout_s)

    call = Errand(act)
    try:
        await_ranks(call, timeout_s, ended, look)
    except BaseException as error:
        abort([backend])
        if not isinstance(error, Exception) or not (
            isinstance(error, TimeoutError) or call.is_back(0)
        ):
            raise  # what `look` raised
        call.is_back(LAST_S)
        raise BackendError(f"NCCL could not connect {whose}: {error}") from error


def meet(backend: Any, device: torch.device, timeout_s: float) -> None:
    """A barrier, for which the host waits."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        spec = Spec("barrier", backend.size(), backend.rank(), parts=(), dtype=torch.uint8)
        bind_on_stream(backend, spec, timeout_s)(None, None)
        torch.cuda.current_stream().synchronize()


def leave_unregistered() -> bool:
    """Has NCCL map nothing of what graphs captured later use; False where the environment says
    otherwise: Note [NCCL and addresses] in graphs.py. NCCL reads it once, as a rule before its
    first capture."""
    return os.environ.setdefault("NCCL_GRAPH_REGISTER", "0") == "0"


class StreamWait(BoundedWait):
    """A stream's wait for a collective: the stream is ordered after it, and the host goes on."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s, lambda: "a collective")

    def finish(self, work: Any, missing: Any = None) -> None:
        if work is not None:
            work.wait()


def bind_on_stream(backend: Any, spec: Spec, timeout_s: float, counts: Counts | None = None) -> Run:
    if backend.name() == "gloo":
        raise BackendError(
            "gloo cannot be ordered with CUDA streams: choose transport='nccl' or 'peer', or run "
            "the Program on the CPU"
        )
    run, wait = bind_collective(backend, spec, timeout_s, counts), StreamWait(timeout_s)

    def issue(src: torch.Tensor | None, dst: torch.Tensor | None) -> None:
        try:
            run(src, dst, wait)
        except dist.DistError as error:
            raise _typed(spec.kind, error) from error

    return issue


def bind_messages(
    backend: Any, parts: Sequence[tuple[str, int]], device: torch.device
) -> Callable[[Sequence[torch.Tensor]], None]:
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
    """NCCL's error as ours. The caller is told a failure instead, if that ended the op."""
    return BackendError(f"NCCL could not issue {what}: {error}")


def abort(backends: Sequence[Any]) -> list[threading.Thread]:
    """Begins to end what these backends are doing; they cannot be used again."""
    threads: list[threading.Thread] = []
    for backend in backends:
        thread = threading.Thread(target=backend.abort, name="interlace abort", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and the connections with it
            break
        threads.append(thread)
    return threads


def all_ended(aborts: Sequence[threading.Thread], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    for thread in aborts:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in aborts)
