"""Runs real schedules of torch.distributed.pipelining on gloo, against one process.

    errors = pool(2).run(run_pipeline, Configuration("ZBVZeroBubble", 2, 4), seed)
    assert max(errors) < 1e-5         # relative, of the gradients of each rank's stages

A rank returns the largest relative error of its gradients. If its runtime raises, it dies with
`REFUSED`, and the others with it.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

WIDTH = 8
REFUSED = 7
"""Exit code of a rank whose runtime raised."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Configuration:
    """A schedule by torch's name, or one with communication that is loaded from a CSV file."""

    name: str
    ranks: int
    microbatches: int
    defer: bool = False
    csv: str = ""

    def __str__(self) -> str:
        made = f"{self.name}-{self.ranks}x{self.microbatches}"
        return made + "-deferred" * self.defer + "-file" * bool(self.csv)


def make_schedule(configuration: Configuration, stages: Any) -> Any:
    """The schedule object of one rank, from its stages."""
    kind = schedules.get_schedule_class(configuration.name)
    loss = torch.nn.functional.mse_loss
    if not configuration.csv:
        return kind(
            stages, configuration.microbatches, loss_fn=loss, defer_pp_recv=configuration.defer
        )
    schedule = schedules._PipelineScheduleRuntime(stages, configuration.microbatches, loss_fn=loss)
    schedule._load_csv(configuration.csv, format="compute_comms")
    return schedule


def stage_indices(configuration: Configuration, rank: int) -> list[int]:
    """The stages of a rank: two in a loop, or two in a V."""
    ranks = configuration.ranks
    return [rank, 2 * ranks - 1 - rank if configuration.name in V_SHAPED else rank + ranks]


def make_model(num_stages: int, seed: int) -> list[torch.nn.Module]:
    """One module a stage, alike on every rank."""
    torch.manual_seed(seed)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        for _ in range(num_stages)
    ]


def run_pipeline(configuration: Configuration, seed: int) -> float:
    """One step of the pipeline on this rank: the largest relative error of its gradients."""
    rank = dist.get_rank()
    mine = stage_indices(configuration, rank)
    num_stages = len(mine) * configuration.ranks
    expected, x, y = reference(configuration, num_stages, seed)
    modules = make_model(num_stages, seed)
    stages = [PipelineStage(modules[k], k, num_stages, torch.device("cpu")) for k in mine]
    try:
        schedule = make_schedule(configuration, stages)
        losses: list[torch.Tensor] = []
        inputs = (x,) if 0 in mine else ()
        target = y if num_stages - 1 in mine else None
        schedule.step(*inputs, target=target, losses=losses)
    except (AssertionError, RuntimeError):
        traceback.print_exc()
        os._exit(REFUSED)  # so that the other ranks do not wait for their time-out
    worst = 0.0
    for k in mine:
        for parameter, wanted in zip(modules[k].parameters(), expected[k], strict=True):
            assert parameter.grad is not None
            error = (parameter.grad - wanted).norm() / wanted.norm()
            worst = max(worst, error.item())
    return worst


def reference(
    configuration: Configuration, num_stages: int, seed: int
) -> tuple[list[list[torch.Tensor]], torch.Tensor, torch.Tensor]:
    """The gradients of each stage in one process, and the input and target."""
    modules = make_model(num_stages, seed)
    x = torch.randn(2 * configuration.microbatches, WIDTH)
    y = torch.randn(2 * configuration.microbatches, WIDTH)
    torch.nn.functional.mse_loss(torch.nn.Sequential(*modules)(x), y).backward()
    gradients = [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]
    return gradients, x, y
