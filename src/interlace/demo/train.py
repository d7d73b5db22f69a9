"""Training of the demo's model in several ways, on every rank, and the report that compares them.

    report = work(TrainingPlan(steps=50), Path("interlace-demo"), tell, device)   # of rank 0

All ways start from the same weights and see the same batches, so their losses can be compared step
by step, and gradients and parameters by a digest of their bytes. The model learns the source text
of Python's own standard library, byte by byte: nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from interlace.commands.explain import explanation
from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import TrainingPlan
from interlace.errors import UnsupportedError
from interlace.frontend import Bound, backend, capture
from interlace.frontend.explain import report
from interlace.frontend.schedules import export
from interlace.launch import Tell
from interlace.torch_private import default_store

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ENOUGH = 2_000_000
"""Bytes that are read: more than the demo gets through."""


def read_text(enough: int = ENOUGH, folder: Path | None = None) -> bytes:
    """The modules of the standard library in order of their names, up to that many bytes."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        if sum(map(len, parts)) >= enough:
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
    """Results of one way: a rank's, and on rank 0 then those of all."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Wall time of each step; the first one compiles."""
    digests: dict[str, Any] = field(default_factory=dict)
    """Digests of the first step's gradients and the last parameters, by rank once gathered."""
    graphs: list[dict[str, Any]] = field(default_factory=list)
    """The compiled graphs as plain data: forward and backward."""
    overlap: dict[str, float] | None = None
    """Communication of this rank in the last step, and how much of it compute hid."""
    files: list[Path] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """The median step, without the first one."""
        return statistics.median(self.step_s[1:] or self.step_s) * 1e3


def train(
    way: str,
    plan: TrainingPlan,
    mesh: DeviceMesh,
    text: bytes,
    tell: Tell,
    device: torch.device,
    out: Path | None = None,
) -> Trained:
    """Trains from the plan's seed; `tell` hears of every step. `out` gets schedules and a page."""
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
    trained = Trained()
    with capture() as captured:
        for step in range(plan.steps):
            began = time.perf_counter()
            tokens, targets = (tensor.to(device) for tensor in batches[step])
            loss = F.cross_entropy(forward(tokens).flatten(0, 1).float(), targets.flatten())
            loss.backward()
            if step == 0:
                trained.digests["gradients"] = digest([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            trained.losses.append(loss.item())
            trained.step_s.append(time.perf_counter() - began)
            tell({"way": way, "step": step, "loss": trained.losses[-1], "event": "step"})
    trained.graphs = list(map(described, captured.bound))
    trained.overlap = overlap_of(captured.bound) if captured.bound else None
    if out is not None:
        page = report(forward, out / "timeline.html")
        trained.files = [*export(captured, out, overwrite=True), page]
    trained.digests["parameters"] = digest(model.parameters())
    return trained


def described(bound: Bound) -> dict[str, Any]:
    """A graph's schedule, the proof of it and its sites, as plain data."""
    return {
        "kind": bound.kind,
        "ops": len(bound.program.ops),
        "streams": list(bound.program.streams()),
        "verdict": "sound" if bound.report.sound else "unsound",
        "verified_ops": bound.report.num_ops,
        "verified_ms": bound.report.seconds * 1e3,
        **explanation(bound.program),
    }


def overlap_of(graphs: Iterable[Bound]) -> dict[str, float]:
    """Figures of all graphs' last runs on this rank."""
    figures = [bound.measured.figures() for bound in graphs if bound.measured is not None]
    comm = sum(figure.comm_s for figure in figures)
    hidden = sum(figure.overlap_s for figure in figures)
    share = hidden / comm if comm > 0 else float("nan")
    compute = sum(figure.compute_s for figure in figures)
    return {"compute_s": compute, "comm_s": comm, "exposed_s": comm - hidden, "hidden": share}


def registered() -> Any:
    """The backend by name, as users give it; the function itself where nothing is installed."""
    from interlace.torch_private.dynamo import list_backends

    names = list_backends(exclude_tags=None)
    return "interlace" if "interlace" in names else backend


def digest(tensors: Iterable[Tensor | None]) -> str:
    """A digest of the bytes that this rank holds of some tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            total.update(local.cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def work(plan: TrainingPlan, out: Path, tell: Tell, device: torch.device) -> dict[str, Any] | None:
    """Trains all ways on this rank of the default process group; rank 0 writes and reports."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan.model.check(world)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    text, store = read_text(), default_store()
    ways: dict[str, Trained] = {}
    for way in plan.ways(world):
        kept = out if rank == 0 and way == "overlapped" else None
        trained = ways[way] = train(way, plan, mesh, text, tell, device, kept)
        store.set(f"demo/{way}/{rank}", json.dumps(trained.digests))
        dist.barrier()
        if rank == 0:
            notes = [json.loads(store.get(f"demo/{way}/{other}")) for other in range(world)]
            trained.digests = {name: [note[name] for note in notes] for name in trained.digests}
    torch.compiler.reset()
    told = make_report(plan, world, ways) if rank == 0 else None
    dist.barrier()
    return told


def make_report(plan: TrainingPlan, world: int, ways: Mapping[str, Trained]) -> dict[str, Any]:
    """Compares the ways, as plain data."""
    overlapped = ways["overlapped"]
    return {
        "schema": 1,
        "world": world,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "plan": asdict(plan),
        "losses": {way: trained.losses for way, trained in ways.items()},
        "step_ms": {way: trained.step_ms for way, trained in ways.items()},
        "first_step_s": {way: trained.step_s[0] for way, trained in ways.items()},
        "speedup": ways["serial"].step_ms / overlapped.step_ms if plan.steps > 1 else None,
        "equal": {
            w: _equal(trained, overlapped) for w, trained in ways.items() if w != "overlapped"
        },
        "overlap": {w: trained.overlap for w, trained in ways.items() if trained.overlap},
        "graphs": overlapped.graphs,
        "files": list(map(str, overlapped.files)),
    }


def _equal(one: Trained, other: Trained) -> dict[str, Any]:
    """Compares the bits of two ways, and measures how far apart their losses are."""
    far = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    same = {name: one.digests[name] == other.digests[name] for name in other.digests}
    differences = {"largest_loss_difference": max(far), "first_loss_difference": far[0]}
    return {"losses": one.losses == other.losses, **same, **differences}
