"""Training every way on each rank of the demo, and putting together what all ranks saw.

    report = work(plan, Path("interlace-demo"), tell, device)    # on every rank; rank 0 reports
    trained = train("overlapped", plan, mesh, text, tell, device)
    trained.losses, trained.parameters

All ways (eager DTensor, the serial Program, the overlapped one, that in order) start from the same
weights and see the same batches, so their losses can be compared step by step, and gradients and
parameters by a digest of their bytes. The model learns the source text of Python's own standard
library, byte by byte: nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from interlace.cost import Timeline
from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import TrainingPlan
from interlace.demo.report import DemoGraph, WayOutcome, make_report
from interlace.errors import UnsupportedError
from interlace.frontend import Captured, backend, capture
from interlace.launch import Tell

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ENOUGH = 2_000_000
"""Bytes that are read: more than the demo gets through."""


def read_text(enough: int = ENOUGH, folder: Path | None = None) -> bytes:
    """The modules of the standard library in order of their names, up to that many bytes."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= enough:
            break
    text = b"".join(parts)[:enough]
    if len(text) < 10_000:
        raise UnsupportedError(
            f"the demo learns the source of Python's standard library, and {folder} holds only "
            f"{len(text)} bytes of it: use a Python that has its library as files"
        )
    return text


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches by step: places drawn at random from the text, by seed and step alone."""

    text: bytes
    sequence: int
    batch: int
    seed: int = 0

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the bytes that follow them, both (batch, sequence)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        last = len(self.text) - self.sequence - 1
        starts = torch.randint(last, (self.batch,), generator=generator).tolist()
        rows = [list(self.text[start : start + self.sequence + 1]) for start in starts]
        windows = torch.tensor(rows, dtype=torch.long)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(slots=True)
class Trained:
    """What one rank saw while it trained one way."""

    way: str
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Wall time of each step; the first one compiles."""
    gradients: str = ""
    """Digest of this rank's gradients in the first step."""
    gradient_squares: float = 0.0
    """The sum of their squares."""
    parameters: str = ""
    """Digest of this rank's parameters after the last step."""
    captured: Captured = field(default_factory=Captured)
    timelines: list[list[Timeline]] = field(default_factory=list)
    """Of each step, how each compiled graph ran on this rank."""


def train(
    way: str,
    plan: TrainingPlan,
    mesh: DeviceMesh,
    text: bytes,
    tell: Tell,
    device: torch.device,
) -> Trained:
    """Trains from the plan's seed; `tell` hears of every step."""
    doing = "training" if way == "eager" else "compiling"
    tell({"event": "way", "way": way, "doing": doing})
    torch.compiler.reset()
    torch.manual_seed(plan.seed)
    config = plan.model
    with device:
        model = Transformer(config).to(DTYPES[config.dtype])
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate)
    batches = Batches(text, config.sequence, config.batch, plan.seed)
    forward: Callable[[Tensor], Tensor] = model
    if way != "eager":
        options = plan.options(way)
        given = {name: getattr(options, name) for name in options.__dataclass_fields__}
        forward = torch.compile(model, backend=registered(), options=given)
    trained = Trained(way)
    with capture() as captured:
        for step in range(plan.steps):
            began = time.perf_counter()
            tokens, targets = (tensor.to(device) for tensor in batches[step])
            loss = F.cross_entropy(forward(tokens).flatten(0, 1).float(), targets.flatten())
            loss.backward()
            if step == 0:
                gradients = [p.grad for p in model.parameters()]
                trained.gradients = digest(gradients)
                trained.gradient_squares = squares(gradients)
            optimizer.step()
            optimizer.zero_grad()
            trained.losses.append(loss.item())
            trained.step_s.append(time.perf_counter() - began)
            trained.timelines.append([bound.executor.timeline() for bound in captured.bound])
            tell({"event": "step", "way": way, "step": step, "loss": trained.losses[-1]})
    trained.parameters = digest(model.parameters())
    trained.captured = captured
    return trained


def registered() -> Any:
    """The backend by name, as users give it; the function itself where nothing is installed."""
    names = torch._dynamo.list_backends(exclude_tags=None)
    return "interlace" if "interlace" in names else backend


def digest(tensors: Iterable[Tensor | None]) -> str:
    """A digest of the bytes that this rank holds of some tensors."""
    found = hashlib.sha256()
    for tensor in local(tensors):
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def squares(tensors: Iterable[Tensor | None]) -> float:
    """The sum of the squares of what this rank holds of some tensors."""
    return sum(float(tensor.float().square().sum()) for tensor in local(tensors))


def local(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """What this rank holds of tensors that are there."""
    for tensor in tensors:
        if tensor is not None:
            yield (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def work(plan: TrainingPlan, out: Path, tell: Tell, device: torch.device) -> dict[str, Any] | None:
    """Trains all ways on this rank of the default process group; rank 0 writes and reports."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan.model.check(world)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    text = read_text()
    store = dist.distributed_c10d._get_default_store()
    outcomes: list[WayOutcome] = []
    for way in plan.ways:
        trained = train(way, plan, mesh, text, tell, device)
        if rank == 0:
            store.set(f"demo/{way}/step", str(middle(trained.step_s)))
        step = int(store.get(f"demo/{way}/step"))
        store.set(f"demo/{way}/{rank}", json.dumps(_seen(trained, step)))
        if rank == 0:
            seen = [json.loads(store.get(f"demo/{way}/{other}")) for other in range(world)]
            outcomes.append(_together(trained, step, seen))
        dist.barrier()
    torch.compiler.reset()
    report = make_report(plan, world, outcomes, out) if rank == 0 else None
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


def _together(trained: Trained, step: int, seen: list[dict[str, Any]]) -> WayOutcome:
    """One way, as all ranks saw it."""
    graphs: list[DemoGraph] = []
    for place, bound in enumerate(trained.captured.bound):
        parts = [Timeline.from_json(rank["timelines"][place]) for rank in seen]
        spans = tuple(span for part in parts for span in part.spans)
        measured = Timeline(spans, bound.program.name, "measured")
        graphs.append(DemoGraph(bound.kind, bound.program, bound.report, measured))
    return WayOutcome(
        way=trained.way,
        losses=trained.losses,
        step_s=trained.step_s,
        measured_step=step,
        gradients=[rank["gradients"] for rank in seen],
        parameters=[rank["parameters"] for rank in seen],
        gradient_norm=math.sqrt(sum(rank["gradient_squares"] for rank in seen)),
        graphs=graphs,
    )
