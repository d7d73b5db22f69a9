"""A live schedule object of torch.distributed.pipelining, as the actions that it would run.

    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, defer_pp_recv=True)
    order = take(schedule)          # of all ranks: each rank's object knows the others' actions

It is what torch made of a schedule with several stages a rank, with receives deferred if that was
asked for (`pipeline_order_with_comms`). Nothing runs, and stages are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from interlace.errors import UnsupportedError
from interlace_check.pipelining.schedule import PipelineOrder


def take(schedule: object) -> PipelineOrder:
    """The order of a schedule object, or of the actions of a mapping or sequence by rank.

    Raises UnsupportedError for a schedule that has no such order.
    """
    if isinstance(schedule, Mapping):
        by_rank = cast("Mapping[int, Iterable[object]]", schedule)
        if not by_rank or set(by_rank) != set(range(len(by_rank))):
            raise UnsupportedError("the ranks of a mapping are numbered from 0, without gaps")
        return PipelineOrder.of([by_rank[rank] for rank in range(len(by_rank))])
    if isinstance(schedule, list | tuple):
        return PipelineOrder.of(cast("list[Iterable[object]]", schedule))
    live: Any = schedule
    with_messages = getattr(live, "pipeline_order_with_comms", None)
    if with_messages:
        return PipelineOrder.of(
            [with_messages[rank] for rank in sorted(with_messages)],
            num_stages=live._num_stages,
            num_microbatches=live._n_microbatches,
        )
    raise UnsupportedError(
        f"{type(schedule).__name__} is no schedule of torch.distributed.pipelining that has its "
        "messages: give a _PipelineScheduleRuntime after `_prepare_schedule_with_comms` or "
        "`_load_csv`, or the actions by rank (of GPipe and 1F1B torch has none)"
    )
