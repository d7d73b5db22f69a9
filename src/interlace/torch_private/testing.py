"""Private names by which schedules are checked on one rank: torch's tests' own process group that
moves nothing, and the class of pipeline schedules that know their messages."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.testing._internal.distributed import fake_pg as fake_pg

PipelineScheduleRuntime = _PipelineScheduleRuntime
"""Its `_prepare_schedule_with_comms` makes the order of messages, and `_load_csv` calls that."""
