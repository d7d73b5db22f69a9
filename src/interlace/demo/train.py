"""Training of the demo's model in several ways, on every rank, and the report that compares them.

    report = work(TrainingPlan(steps=50), Path("interlace-demo"), tell, device)   # of rank 0

All ways start from the same weights and see the same batches, so their losses can be compared step
by step, and the last parameters by a digest of their bytes. The model learns the source text of
Python's own standard library, byte by byte: nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import TrainingPlan
from interlace.frontend import Bound, backend
from interlace.frontend.explain import explain, graphs_of, report
from interlace.frontend.schedules import export
from interlace.launch import Report, Tell
from interlace.torch_private import default_store
from interlace.torch_private.dynamo import list_backends

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ENOUGH = 2_000_000
"""Bytes that are read: more than the demo gets through."""


def read_text(enough: int = ENOUGH) -> bytes:
    """The modules of the standard library in order of their names, up to that many bytes."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) < enough:
            text += path.read_bytes()
    return text[:enough]


def batch_at(step: int, plan: TrainingPlan, text: bytes) -> tuple[Tensor, Tensor]:
    """Tokens and the bytes that follow them, both (batch, sequence), from places of the text that
    are drawn by seed and step alone."""
    length = plan.model.sequence + 1
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (plan.model.batch,), generator=generator).tolist()
    windows = torch.tensor([list(text[start : start + length]) for start in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(
    way: str, plan: TrainingPlan, mesh: DeviceMesh, text: bytes, tell: Tell, out: Path | None
) -> Report:
    """This rank's results of one way; `tell` hears of every step. With `out`, schedules and a page
    are written there."""
    torch.compiler.reset()
    torch.manual_seed(plan.seed)
    with torch.device(mesh.device_type):
        model = Transformer(plan.model).to(DTYPES[plan.model.dtype])
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate)
    forward: Callable[[Tensor], Tensor] = model
    if way != "eager":
        options: dict[str, Any] = {"strategy": plan.strategy, "calibration": plan.calibration}
        options |= {"overlap": way != "serial", "in_order": way == "in_order"}
        options |= {"timeout_s": plan.timeout_s, "trace": True}
        forward = torch.compile(model, backend=registered(), options=options)
    losses, step_s = list[float](), list[float]()
    for step in range(plan.steps):
        began = time.perf_counter()
        tokens, targets = (t.to(mesh.device_type) for t in batch_at(step, plan, text))
        loss = F.cross_entropy(forward(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step_s.append(time.perf_counter() - began)
        tell({"way": way, "step": step, "loss": losses[-1], "event": "step"})
    results: Report = {
        "losses": losses,
        "first_step_s": step_s[0],
        "step_ms": statistics.median(step_s[1:] or step_s) * 1e3,
        "parameters": digest(model.parameters()),
        "overlap": overlap_of(bound for graph in graphs_of(forward) for bound in graph.bound),
    }
    if out is not None:
        files = [*export(forward, out, overwrite=True), report(forward, out / "timeline.html")]
        results |= {"explained": explain(forward), "files": list(map(str, files))}
    return results


def overlap_of(graphs: Iterable[Bound]) -> dict[str, float] | None:
    """Communication of this rank in the last run of all graphs, and how much of it compute hid."""
    figures = [bound.measured.figures() for bound in graphs if bound.measured is not None]
    comm = sum(figure.comm_s for figure in figures)
    hidden = sum(figure.overlap_s for figure in figures)
    return {"comm_s": comm, "exposed_s": comm - hidden, "hidden": hidden / comm} if comm else None


def registered() -> str | Callable[..., object]:
    """The backend by name, as users give it; the function itself where nothing is installed."""
    return "interlace" if "interlace" in list_backends(exclude_tags=None) else backend


def digest(tensors: Iterable[Tensor]) -> str:
    """A digest of the bytes that this rank holds of some tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        total.update(local.cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def work(plan: TrainingPlan, out: Path, tell: Tell, device: torch.device) -> Report | None:
    """Trains all ways on this rank of the default process group; rank 0 writes and reports."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan.model.check(world)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    text, ways, store = read_text(), dict[str, Report](), default_store()
    for way in plan.ways(world):
        place = out if rank == 0 and way == "overlapped" else None
        results = ways[way] = train(way, plan, mesh, text, tell, place)
        store.set(f"demo/{way}/{rank}", results["parameters"])
        dist.barrier()
        results["parameters"] = [store.get(f"demo/{way}/{r}").decode() for r in range(world)]
    torch.compiler.reset()
    dist.barrier()
    if rank:
        return None
    return {
        "schema": 2,
        "world": world,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "plan": asdict(plan),
        "ways": ways,
    }
