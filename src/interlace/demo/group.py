"""The process group of the demo's ranks: gloo, and NCCL beside it where the ranks have GPUs.

    with joined("cuda", timedelta(seconds=60)) as device:    # under torchrun
        work(lesson, out, tell, device)

Whatever happens inside, the group is gone at the end: destroyed when all went well, aborted when
not, for then the others may never come to what is still waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm import release_teams
from interlace.errors import BackendError, InterlaceError, TeamError


@contextlib.contextmanager
def joined(device: str, limit: timedelta, *, local: int = 0, **how: Any) -> Iterator[torch.device]:
    """This rank's device, with the default process group around it.

    `local` is the rank's number on its host, and so its GPU. `how` says who else there is, to
    `init_process_group`; without it torchrun's environment does.
    """
    if device == "cuda":
        where = _gpu(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit, device_id=where, **how)
    else:
        where = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit, **how)
    try:
        yield where
    except BaseException:
        _leave(where, failed=True)
        raise
    _leave(where, failed=False)


def _gpu(local: int) -> torch.device:
    """The GPU of this rank, on which equal computations give equal bits."""
    if not torch.cuda.is_available():
        raise BackendError(
            "torch sees no GPU here: take --device cpu (`interlace doctor` says why)"
        )
    count = torch.cuda.device_count()
    if local >= count:
        raise TeamError(
            f"rank {local} of this host has no GPU, there are {count}: start at most {count} ranks "
            "on a host, or take --device cpu"
        )
    where = torch.device("cuda", local)
    torch.cuda.set_device(where)
    # Without these, the gradient of attention is summed in another order in every run.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    torch.backends.cuda.enable_cudnn_sdp(False)
    return where


def _leave(where: torch.device, failed: bool) -> None:
    with contextlib.suppress(InterlaceError, RuntimeError):
        release_teams()
    if not dist.is_initialized():
        return
    if failed and where.type == "cuda":
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()
        return
    dist.destroy_process_group()
