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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from interlace.commands.explain import explanation
from interlace.cost import Machine, Timeline, simulate
from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import TrainingPlan
from interlace.errors import UnsupportedError
from interlace.frontend import backend, capture
from interlace.ir import Program
from interlace.launch import Tell
from interlace.runtime.machine import machine_for
from interlace.trace import Run, write_page, write_perfetto
from interlace.trace.tracks import write_whole
from interlace.verify import Report

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
class DemoGraph:
    """A compiled graph: its Program, the proof of it, and how its last run went."""

    kind: str
    program: Program
    proof: Report
    measured: Timeline


@dataclass(slots=True)
class Trained:
    """Results of one way: a rank's, and on rank 0 then those of all."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Wall time of each step; the first one compiles."""
    digests: dict[str, Any] = field(default_factory=dict)
    """Digests of the first step's gradients and the last parameters, by rank once gathered."""
    graphs: list[DemoGraph] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """The median step, without the first one."""
        return statistics.median(self.step_s[1:] or self.step_s) * 1e3

    def overlap(self) -> dict[str, float]:
        """Communication of a whole step, and how much of it compute hid."""
        figures = [graph.measured.figures() for graph in self.graphs]
        comm = sum(figure.comm_s for figure in figures)
        hidden = sum(figure.overlap_s for figure in figures)
        share = hidden / comm if comm > 0 else float("nan")
        compute = sum(figure.compute_s for figure in figures)
        exposed = comm - hidden
        return {"compute_s": compute, "comm_s": comm, "exposed_s": exposed, "hidden": share}


def train(
    way: str, plan: TrainingPlan, mesh: DeviceMesh, text: bytes, tell: Tell, device: torch.device
) -> Trained:
    """Trains from the plan's seed; `tell` hears of every step."""
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
    trained.graphs = [
        DemoGraph(bound.kind, bound.program, bound.report, bound.executor.timeline())
        for bound in captured.bound
    ]
    trained.digests["parameters"] = digest(model.parameters())
    return trained


def registered() -> Any:
    """The backend by name, as users give it; the function itself where nothing is installed."""
    names = torch._dynamo.list_backends(exclude_tags=None)
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
    text, store = read_text(), dist.distributed_c10d._get_default_store()
    ways: dict[str, Trained] = {}
    for way in plan.ways(world):
        trained = ways[way] = train(way, plan, mesh, text, tell, device)
        note = {"timelines": [graph.measured.to_json() for graph in trained.graphs]}
        store.set(f"demo/{way}/{rank}", json.dumps(note | trained.digests))
        dist.barrier()
        if rank == 0:
            notes = [json.loads(store.get(f"demo/{way}/{other}")) for other in range(world)]
            trained.digests = {name: [note[name] for note in notes] for name in trained.digests}
            for place, graph in enumerate(trained.graphs):
                parts = [Timeline.from_json(note["timelines"][place]) for note in notes]
                spans = tuple(span for part in parts for span in part.spans)
                graph.measured = Timeline(spans, graph.program.name, "measured")
    torch.compiler.reset()
    report = make_report(plan, world, ways, out) if rank == 0 else None
    dist.barrier()
    return report


def make_report(
    plan: TrainingPlan, world: int, ways: Mapping[str, Trained], out: Path
) -> dict[str, Any]:
    """Compares the ways, writes the files and says all of it as plain data."""
    overlapped, machine = ways["overlapped"], machine_for(plan.options("overlapped"), plan.device)
    return {
        "schema": 1,
        "world": world,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "machine": machine.name,
        "plan": asdict(plan),
        "losses": {way: trained.losses for way, trained in ways.items()},
        "step_ms": {way: trained.step_ms for way, trained in ways.items()},
        "first_step_s": {way: trained.step_s[0] for way, trained in ways.items()},
        "speedup": ways["serial"].step_ms / overlapped.step_ms if plan.steps > 1 else None,
        "equal": {
            w: _equal(trained, overlapped) for w, trained in ways.items() if w != "overlapped"
        },
        "overlap": {w: trained.overlap() for w, trained in ways.items() if trained.graphs},
        "graphs": [
            {
                "kind": graph.kind,
                "ops": len(graph.program.ops),
                "streams": list(graph.program.streams()),
                "verdict": "sound" if graph.proof.sound else "unsound",
                "verified_ops": graph.proof.num_ops,
                "verified_ms": graph.proof.seconds * 1e3,
                **explanation(graph.program),
            }
            for graph in overlapped.graphs
        ],
        "files": [str(path) for path in _write(ways["serial"], overlapped, machine, out)],
    }


def _equal(one: Trained, other: Trained) -> dict[str, Any]:
    """Compares the bits of two ways, and measures how far apart their losses are."""
    far = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    same = {name: one.digests[name] == other.digests[name] for name in other.digests}
    differences = {"largest_loss_difference": max(far), "first_loss_difference": far[0]}
    return {"losses": one.losses == other.losses, **same, **differences}


def _write(serial: Trained, overlapped: Trained, machine: Machine, out: Path) -> Sequence[Path]:
    """Writes the Programs' text, the trace and the page."""
    paths: list[Path] = []
    runs: list[list[Run]] = []
    for trained, suffix in ((overlapped, ""), (serial, ".serial")):
        label = "serial" if suffix else "overlapped"
        runs.append([])
        for graph in trained.graphs:
            program, predicted = graph.program, simulate(graph.program, machine)
            paths.append(write_whole(out / f"{graph.kind}{suffix}.ilc", f"{program}\n"))
            runs[-1].append(Run((program,), predicted, graph.measured, graph.kind, label))
    pairs = [replace(run, before=before) for run, before in zip(*runs, strict=True)]
    page = write_page(pairs, out / "timeline.html", "interlace demo", [("machine", machine.name)])
    return [*paths, write_perfetto(pairs, out / "trace.json"), page]
