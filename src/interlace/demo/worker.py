"""What each rank of the demo does: train every way, then put together what all ranks saw.

report = work(lesson, out=Path("interlace-demo"), tell=print)   # under torchrun, on every rank
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from interlace.cost import Timeline
from interlace.demo.data import read_text
from interlace.demo.lesson import Lesson
from interlace.demo.report import Graph, Outcome, make_report
from interlace.demo.train import Trained, train

Tell = Callable[[dict[str, Any]], None]


def work(
    lesson: Lesson, out: Path, tell: Tell, device: torch.device | None = None
) -> dict[str, Any] | None:
    """Trains all ways on this rank of the default process group; rank 0 writes and reports."""
    device = device or torch.device("cpu")
    rank, world = dist.get_rank(), dist.get_world_size()
    lesson.model.check(world)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    text = read_text()
    store = dist.distributed_c10d._get_default_store()
    outcomes: list[Outcome] = []
    for way in lesson.ways:
        trained = train(way, lesson, mesh, text, tell, device)
        if rank == 0:
            store.set(f"demo/{way}/step", str(middle(trained.step_s)))
        step = int(store.get(f"demo/{way}/step"))
        store.set(f"demo/{way}/{rank}", json.dumps(_seen(trained, step)))
        if rank == 0:
            seen = [json.loads(store.get(f"demo/{way}/{other}")) for other in range(world)]
            outcomes.append(_together(trained, step, seen))
        dist.barrier()
    torch.compiler.reset()
    report = make_report(lesson, world, outcomes, out) if rank == 0 else None
    dist.barrier()
    return report


def middle(step_s: list[float]) -> int:
    """The step whose time is the median of all but the first, which compiles."""
    later = sorted(range(1, len(step_s)), key=lambda step: step_s[step])
    return later[len(later) // 2] if later else 0


def _seen(trained: Trained, step: int) -> dict[str, Any]:
    """What rank 0 needs to know of this rank."""
    return {
        "gradients": trained.gradients,
        "parameters": trained.parameters,
        "gradient_squares": trained.gradient_squares,
        "timelines": [timeline.to_json() for timeline in trained.timelines[step]],
    }


def _together(trained: Trained, step: int, seen: list[dict[str, Any]]) -> Outcome:
    """One way, as all ranks saw it."""
    graphs: list[Graph] = []
    for place, bound in enumerate(trained.captured.bound):
        parts = [Timeline.from_json(rank["timelines"][place]) for rank in seen]
        spans = tuple(span for part in parts for span in part.spans)
        measured = Timeline(spans, bound.program.name, "measured")
        graphs.append(Graph(bound.kind, bound.program, bound.report, measured))
    return Outcome(
        way=trained.way,
        losses=trained.losses,
        step_s=trained.step_s,
        measured_step=step,
        gradients=[rank["gradients"] for rank in seen],
        parameters=[rank["parameters"] for rank in seen],
        gradient_norm=math.sqrt(sum(rank["gradient_squares"] for rank in seen)),
        graphs=graphs,
    )
