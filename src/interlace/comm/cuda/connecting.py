"""The first op of an NCCL backend: it connects the ranks, and so may wait for one that never comes.

    join(backend, device, 60, "team tp on rank 0", ended, look)     # all ranks of it, together

Note [Connecting]
    NCCL connects in its first op, in a call that waits for all ranks and that no abort reaches: its
    communicator is not there yet. A rank that fails before its own first op (bad input to the first
    run, say) would leave the others in that call for ever. So the ranks do one op in `prepare()`,
    and again after a reset, each in a thread that is left behind where it does not come back. That
    is also for a backend of the user's, which may or may not have had an op. Where they do not
    meet it is aborted, the user's too: what waits on it would take part in another op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from interlace.comm.collectives import Spec
from interlace.comm.cuda.aborts import abort
from interlace.comm.cuda.collectives import bind_on_stream
from interlace.comm.cuda.driver import relax_captures
from interlace.comm.rendezvous.board import named
from interlace.comm.rendezvous.patience import LONGER, Patience
from interlace.errors import BackendError

LOOK_S = 0.05
"""How often it is asked whether a peer's process has ended, or a peer given up."""
LAST_S = 1.0
"""How much later than the time-out the thread's own wait in the store may end, which is as long for
a backend that Interlace made. Back while the interpreter ends, it would abort the process."""


def join(
    backend: Any,
    device: torch.device | None,
    time_out_s: float,
    whose: str,
    ended: Callable[[], Collection[int]],
    look: Callable[[], None],
) -> None:
    """Has the ranks of a backend meet, each with its device (None: the current one).

    `whose` is for messages, `ended` tells whose processes are gone, `look` raises where a peer has
    given up. Raises `BackendError` where they do not meet within the time-out; then, as after
    `look`, the backend is aborted.
    """
    failed: list[Exception] = []
    used = device or torch.device("cuda", torch.cuda.current_device())

    def act() -> None:
        try:
            relax_captures()
            _meet(backend, used, time_out_s)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=act, name="interlace connect", daemon=True)
    patience = Patience(time_out_s)
    thread.start()
    gone: list[int] = []
    try:
        while thread.is_alive() and not gone and not patience.is_over():
            gone = sorted(ended())
            look()
            thread.join(LOOK_S)
    except BaseException:
        abort([backend])
        raise
    late = thread.is_alive()
    if not late and not failed:
        return
    abort([backend])
    if gone:
        why = f"the process of {named(gone)} has ended. Start the job anew"
    elif late:
        thread.join(LAST_S)
        why = (
            f"not all of its ranks came within {time_out_s:g} s: see whether one failed, stalled "
            f"or took another path through the model; {LONGER}"
        )
    else:
        why = str(failed[0])
    raise BackendError(f"NCCL could not connect {whose}: {why}") from (failed or [None])[0]


def _meet(backend: Any, device: torch.device, time_out_s: float) -> None:
    """A barrier, for which the host waits."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        spec = Spec("barrier", backend.size(), backend.rank(), parts=(), dtype=torch.uint8)
        bind_on_stream(backend, spec, time_out_s)(None, None)
        torch.cuda.current_stream().synchronize()
