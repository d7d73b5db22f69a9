"""Schedules of the torch that is here, made with stages that do nothing.

schedule = make("ZBVZeroBubble", ranks=4, microbatches=8, defer=True)
rows = tokens(schedule)            # what torch would run, as text by rank
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
MULTI = (*LOOPED, *V_SHAPED)


def make(name: str, ranks: int, microbatches: int, defer: bool = False, per_rank: int = 2) -> Any:
    """A schedule object of rank 0; every rank's object knows the actions of all ranks."""
    kind = schedules.get_schedule_class(name)
    stages = [
        SimpleNamespace(
            stage_index=k * ranks,
            num_stages=per_rank * ranks,
            group_size=ranks,
            group_rank=0,
            submod=None,
        )
        for k in range(per_rank)
    ]
    options = {"defer_pp_recv": True} if defer else {}  # torch 2.11 has no such option
    return kind(stages, microbatches, **options)


def tokens(schedule: Any) -> list[list[str]]:
    """The actions of each rank with their messages, as torch writes them to a file."""
    order = schedule.pipeline_order_with_comms
    return [[str(action) for action in order[rank]] for rank in sorted(order)]
