"""Training one way: eager DTensor, the serial Program, the overlapped one, or that in order.

    trained = train("overlapped", lesson, mesh, text, tell=print)
    trained.losses, trained.parameters

All ways start from the same weights and see the same batches, so their losses can be compared step
by step, and gradients and parameters by a digest of their bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.cost import Timeline
from interlace.demo.data import Batches
from interlace.demo.lesson import Lesson
from interlace.demo.model import Transformer, parallelize
from interlace.frontend import Captured, backend, capture

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


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
    lesson: Lesson,
    mesh: DeviceMesh,
    text: bytes,
    tell: Callable[[dict[str, Any]], None],
    device: torch.device,
) -> Trained:
    """Trains from the lesson's seed; `tell` hears of every step."""
    doing = "training" if way == "eager" else "compiling"
    tell({"event": "way", "way": way, "doing": doing})
    torch.compiler.reset()
    torch.manual_seed(lesson.seed)
    config = lesson.model
    with device:
        model = Transformer(config).to(DTYPES[config.dtype])
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.learning_rate)
    batches = Batches(text, config.sequence, config.batch, lesson.seed)
    forward: Callable[[Tensor], Tensor] = model
    if way != "eager":
        options = lesson.options(way)
        given = {name: getattr(options, name) for name in options.__dataclass_fields__}
        forward = torch.compile(model, backend=registered(), options=given)
    trained = Trained(way)
    with capture() as captured:
        for step in range(lesson.steps):
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
