"""Backends of torch.distributed, made for a team alone.

backend = connect("nccl", store, rank, size, 60, "team tp on rank 0")     # all ranks, together
end([backend], 10, "team tp on rank 0")

Note [Whose time-out]
    Interlace's watchdog bounds what NCCL does, and aborts it. torch's own watchdog would see the
    same op late at the same moment. It then sleeps for a minute, in which the backend's destructor
    waits for it with Python's lock held, and at last ends the process. So its time-out is longer by
    `MARGIN_S`: it ends a process only where an abort has stood still for minutes.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from interlace.errors import BackendError, TeamError

BACKENDS = ("gloo", "nccl", "ucc", "peer")

_CLASSES = {"gloo": "Gloo", "nccl": "NCCL", "ucc": "UCC"}
MARGIN_S = 300.0
"""How much later than Interlace torch's watchdog looks at NCCL: Note [Whose time-out]."""
CLONE_S = 5.0
"""How long another connection to the store may take."""
_MEND = {
    "gloo": "this torch was built without gloo; install torch from pip's index, which has it",
    "nccl": "this torch has no NCCL; install a CUDA build of torch, or choose gloo or peer",
    "ucc": "this torch was built without UCC; build torch with USE_UCC=1, or choose gloo or peer",
}


def require_backend(name: str) -> None:
    """Raises `BackendError` where this torch lacks the backend."""
    if name not in BACKENDS:
        raise BackendError(f"no backend named {name!r}: choose one of {', '.join(BACKENDS)}")
    there = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "ucc": getattr(c10d, "is_ucc_available", lambda: False),
    }
    if name in there and not there[name]():
        raise BackendError(f"the backend {name!r} is not there: {_MEND[name]}")


def connect(name: str, store: dist.Store, me: int, size: int, time_out_s: float, whose: str) -> Any:
    """A new backend, which all its members make together; `whose` is for messages."""
    cls: Any = getattr(c10d, f"ProcessGroup{_CLASSES[name]}")
    limit = time_out_s + MARGIN_S if name == "nccl" else time_out_s
    try:
        return cls(_within(store, time_out_s), me, size, timeout=timedelta(seconds=limit))
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"the backend {name!r} of {whose} could not be connected within {time_out_s:g} s: "
            f"{error}"
        ) from error


def _within(store: dist.Store, time_out_s: float) -> dist.Store:
    """The store with a time-out of its own. NCCL connects with its first op: there ranks wait in
    the store for the first of them, by default for half an hour, and no abort reaches them."""
    own = apart(store)
    if own is not store:
        own.set_timeout(timedelta(seconds=time_out_s))
    return own


def apart(store: Any) -> Any:
    """The same store by a connection of its own, where it has such: whoever waits in another, as
    the first op of a user's NCCL backend may, keeps it from all other threads.

    Of a server that is gone it is the store itself, which says so when it is asked: to connect
    would take as long as the store's own time-out.
    """
    made: list[Any] = []

    def clone() -> None:
        with contextlib.suppress(AttributeError, RuntimeError):  # what cannot be cloned, too
            made.append(store.clone())

    thread = threading.Thread(target=clone, name="interlace store", daemon=True)
    thread.start()
    thread.join(CLONE_S)
    return made[0] if made else store


def end(made: list[Any], time_out_s: float, whose: str) -> None:
    """Ends what was made, and forgets it: Note [Aborts] in aborts.py.

    Raises `TeamError` where one does not end in time; then it is not forgotten.
    """
    left = [backend for backend in made if backend.name() == "nccl"]
    if left:
        from interlace.comm.cuda.aborts import abort, all_ended

        if not all_ended(abort(left), time_out_s):
            raise TeamError(
                f"NCCL did not end the connections of {whose} within {time_out_s:g} s: end the "
                "process"
            )
    made.clear()
