"""Checks whatever is compiled in a block, as on one rank of many.

with capturing(world_size=4) as reports:
    torch.compile(layer)(x)
print(*reports)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Unpack
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx

from interlace.errors import InputError
from interlace.torch_private.dynamo import functorch_aot, functorch_config
from interlace.torch_private.inductor import inductor_config
from interlace.torch_private.testing import PipelineScheduleRuntime, fake_pg
from interlace.verify import Report
from interlace_check.graphs.checking import GraphOptions, check_graph, check_options
from interlace_check.pipelining import check_pipelining


@contextlib.contextmanager
def capturing(world_size: int = 2, **options: Unpack[GraphOptions]) -> Iterator[list[Report]]:
    """Context whose graphs and pipeline schedules are checked when they are made.

    The block runs on rank 0 of a process group that moves nothing: what it receives has no meaning.
    Checked are the graphs of AOTAutograd, whatever the backend, Inductor's post-grad graphs (unless
    `post_grad_custom_post_pass` is set), and schedules of torch.distributed.pipelining with several
    stages a rank.

    Args:
        world_size: ranks of the process group.
        options: those of `check_graph`.

    Returns:
        A list to which each report is added.

    Raises:
        InputError: there is a process group already.
        OptionError: an option has an unknown value.
    """
    check_options(**options)
    if dist.is_initialized():
        raise InputError(
            "schedule_sound makes a process group of its own, and there is one already; fix: make "
            "yours in the tests that need it, and destroy it there"
        )
    reports: list[Report] = []

    def look(gm: fx.GraphModule) -> None:
        reports.append(check_graph(gm, **options))

    def look_last(graph: Any) -> None:
        look(graph.owning_module)

    def prepare(schedule: Any, *args: Any, **kwargs: Any) -> None:
        real_prepare(schedule, *args, **kwargs)
        reports.append(check_pipelining(schedule))

    def looking(compiler: Any) -> Any:
        def compile_graph(gm: fx.GraphModule, *args: Any) -> Any:
            look(gm)
            return compiler(gm, *args)

        return compiler and compile_graph

    def compile_graphs(state: Any, captured: Any, partition: Any, *compilers: Any) -> Any:
        return real_compile(state, captured, partition, *map(looking, compilers))

    real_prepare = PipelineScheduleRuntime._prepare_schedule_with_comms
    real_compile = functorch_aot.aot_stage2_compile
    last = inductor_config.post_grad_custom_post_pass or look_last
    with (
        mock.patch.object(PipelineScheduleRuntime, "_prepare_schedule_with_comms", prepare),
        mock.patch.object(functorch_aot, "aot_stage2_compile", compile_graphs),
        inductor_config.patch(post_grad_custom_post_pass=last, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=world_size)
        torch.compiler.reset()  # what was compiled before is compiled again
        try:
            yield reports
        finally:
            torch.compiler.reset()
            if dist.is_initialized():  # else the block has destroyed it
                dist.destroy_process_group()
