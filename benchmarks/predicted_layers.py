"""Training steps of whole layers, predicted beside measured: every row of `bench transformer`.

python -m benchmarks.predicted_layers                       # of results/transformer.csv
python -m benchmarks.predicted_layers ROWS.csv --gpu H200   # of another file, of one kind of GPU

No GPU is needed: one rank's layers are traced on fake tensors beside a fake process group, lowered
for the built-in machine and simulated. `inductor` is the serial Program, which in backward gathers
nothing again; `ideal` is that on links that take no time; `compile` is what `auto` overlaps. A row
is shown with the time of forward and backward, how far the prediction is off, and the gain over
NCCL: the time of the fastest of Inductor's ways over that of this one, as rows have it.

Note [In a burst]
    Rows are means of bursts of launches, each after a rest. The GPU computes at its boost clock for
    `Machine.boost_s`, and at its power limit for the rest of the burst.

Note [Beside the Programs]
    A step has a loss and an optimizer, which are torch's own kernels. Their rates were measured on
    one H200: the loss and its backward move seven tensors of the output's size in 101 us (8B on
    two ranks), and AdamW's fused step reads and writes a parameter, its gradient and its moments
    (seven tensors) at 1.9 TB/s (0.795 ms of 8B on two), half of what a copy has.

Note [The host decides]
    Rows of one layer whose host takes nearly as long as the whole step, or which are faster in
    graphs, tell the host's time: of the processor, of torch's DTensors, of autograd. No Program has
    those. They are marked `host`. With more layers the host runs ahead until its queue is full.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from interlace.cost import Machine, default_machine, run_after_run
from interlace.cost.machine import Link
from interlace.demo.model import Plain, block_plan, rotary_table
from interlace.frontend.compile import Compiled
from interlace.frontend.compiled_graph import CompiledGraph
from interlace.ir import Program
from interlace.options import Options
from interlace.passes import lower
from interlace.trace.figures import text_table
from interlace_bench.layers.models import MODELS, Layers
from interlace_bench.race import LAUNCHES

ROWS = Path(__file__).parent / "results" / "transformer.csv"
WAYS = {
    "inductor": "serial",
    "inductor-graph": "serial",
    "compile": "compile",
    "compile-graph": "compile",
    "ideal": "ideal",
}
"""Ways of the rows, and what predicts them."""
SAVE_ALL = 1 << 60
"""Bytes that backward may save, so that it gathers nothing again."""
ADAMW_RATE, LOSS_RATE = 1.92e12, 2.3e12
"""Bytes a second: Note [Beside the Programs]."""
TENSORS = 7
HOST, LATE = 0.865, 1.05
"""The part of the step, and the time over that in graphs, above which the host decides."""


@dataclass(frozen=True, slots=True)
class Case:
    """Layers that were trained, on so many ranks."""

    model: str
    layers: int
    batch: int
    sequence: int
    world: int


@dataclass(frozen=True, slots=True)
class Beside:
    """A measured row and its prediction, in milliseconds."""

    case: Case
    way: str
    commit: str
    gpu: str
    measured_ms: float
    predicted_ms: float
    step_ms: float
    predicted_step_ms: float
    gain: float
    """Over NCCL, as measured; NaN of a way that has none."""
    predicted_gain: float
    by_host: bool

    @property
    def off(self) -> float:
        """The prediction's relative error."""
        return self.predicted_ms / self.measured_ms - 1


def beside(path: Path = ROWS, gpu: str = "") -> list[Beside]:
    """The measured rows of a file that have a prediction, for GPUs whose name has this part."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if _has_prediction(row, gpu)]
    in_graphs = {_run(row): _both_ms(row) for row in rows if row["way"].endswith("graph")}
    found: list[Beside] = []
    for row in rows:
        sizes = {name: int(row[name]) for name in ("layers", "batch", "sequence", "world")}
        case, way = Case(model=row["model"], **sizes), row["way"]
        graph, ours = way.endswith("graph"), WAYS[way] == "compile"
        seconds = _seconds(case, WAYS[way], graph)
        host_part = float(row["host_us"]) / float(row["median_us"])
        late = _both_ms(row) > LATE * in_graphs.get(_run(row), math.inf)
        found.append(
            Beside(
                case,
                way,
                row["commit"][:8],
                row["gpu"].removeprefix("NVIDIA "),
                _both_ms(row),
                seconds * 1e3,
                float(row["step_ms"]),
                _step_s(case) * 1e3,
                float(row["speedup"]) if ours else math.nan,
                _seconds(case, "serial", True) / seconds if ours else math.nan,
                case.layers == 1 and (host_part > HOST or late),
            )
        )
    return found


def _run(row: dict[str, str]) -> tuple[str, ...]:
    """The case of a row, and the way up to graphs."""
    way = row["way"].removesuffix("-graph")
    return way, *(row[name] for name in ("commit", "gpu", "world", "model", "layers"))


def _both_ms(row: dict[str, str]) -> float:
    return float(row["forward_ms"]) + float(row["backward_ms"])


def _has_prediction(row: dict[str, str], gpu: str) -> bool:
    known = row["how"] == "measured" and not row["error"] and row["way"] in WAYS
    return known and gpu in row["gpu"] and row["dtype"] == "bf16" and row["model"] in MODELS


# -- predictions ---------------------------------------------------------------------------------


@functools.cache
def _seconds(case: Case, way: str, graph: bool) -> float:
    """Forward and backward of a launch, as rows have it: Note [In a burst]."""
    machine = default_machine("cuda")
    machine = machine.replayed if graph else machine
    place = machine
    if way == "ideal":
        links = tuple((name, Link(latency_s=0.0, bandwidth=math.inf)) for name, _ in machine.links)
        place = machine.replace(links=links)
    options = Options(overlap=way == "compile", regions="inductor")
    lowered = [lower(p, options, place) for p in traced(case, again=way == "compile")]
    step_s = _step_s(case)
    quick, limited = (_launch_s(case, lowered, m) + step_s for m in (place, place.power_limited))
    count = LAUNCHES[0]
    boosted = min(count, machine.boost_s / quick)
    return (boosted * quick + (count - boosted) * limited) / count - step_s


def _launch_s(case: Case, programs: Sequence[Program], machine: Machine) -> float:
    played = [run_after_run(program, machine, fold=True) for program in programs]
    output = 2 * case.batch * case.sequence // case.world * MODELS[case.model].dim
    loss_s = TENSORS * output / LOSS_RATE
    return loss_s + sum(max(timeline.makespan_s, host) for timeline, host in played)


def _step_s(case: Case) -> float:
    """AdamW's step."""
    elements = case.layers * MODELS[case.model].matmul_parameters / case.world
    return 2 * TENSORS * elements / ADAMW_RATE


@functools.cache
def traced(case: Case, again: bool) -> tuple[Program, ...]:
    """The serial Programs of forward and backward, which may gather `again` in backward."""
    dims, dtype = MODELS[case.model], torch.bfloat16
    options = Options(regions="inductor", memory="auto" if again else SAVE_ALL)
    with _fake_ranks(case.world), _default(dtype):
        mesh = DeviceMesh("cpu", list(range(case.world)), mesh_dim_names=("tp",))
        with FakeTensorMode():
            table = rotary_table(case.sequence, dims.dim // dims.heads).to(dtype)
            layers = Layers(dims, case.layers, table, 1, Plain())
            for layer in layers.layers:
                parallelize_module(layer, mesh, block_plan(Shard(1)))
            x = torch.empty(case.batch, case.sequence // case.world, dims.dim)
        compiled = Compiled(layers, mesh, options)
        compiled.prepare(x.requires_grad_())
        return tuple(graph._imported()[0].program for graph in compiled.graphs)


@contextmanager
def _fake_ranks(world: int) -> Iterator[None]:
    """A process group whose other ranks are not there: nothing is bound, and none is asked."""
    within, machine = "interlace.frontend", default_machine("cuda")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with (
            mock.patch.object(CompiledGraph, "prepare"),
            mock.patch(f"{within}.partition.consent_of_ranks", lambda _, w, __: [x for _, x in w]),
            mock.patch(f"{within}.backend.shared_machine", return_value=machine),
        ):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made of this dtype: fake ones cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- what is printed -----------------------------------------------------------------------------


def table(found: Sequence[Beside]) -> str:
    """The rows, and the errors of those that the host does not decide."""
    head = ("model", "ranks", "way", "commit", "measured", "predicted", "off", "gain", "predicted")
    lines = [text_table((*head, "step", "predicted"), [_cells(each) for each in found])]
    for way in dict.fromkeys(WAYS.values()):
        off = [abs(e.off) for e in found if WAYS[e.way] == way and not e.by_host]
        if off:
            lines.append(
                f"{way}: off by {statistics.fmean(off):.1%} on average, {max(off):.1%} at most, "
                f"of {len(off)} rows"
            )
    gains = [abs(e.predicted_gain - e.gain) for e in found if _has_gain(e)]
    if gains:
        lines.append(f"gain over NCCL: off by {statistics.fmean(gains):.3f}, {max(gains):.3f}")
    return "\n".join(lines)


def _has_gain(row: Beside) -> bool:
    return not (row.by_host or math.isnan(row.gain))


def _cells(row: Beside) -> tuple[str, ...]:
    case, gains = row.case, ("", "")
    if not math.isnan(row.gain):
        gains = (f"{row.gain:.3f}", f"{row.predicted_gain:.3f}")
    return (
        f"{case.model} x {case.layers}",
        f"{case.world} x {row.gpu.split()[0]}",
        row.way,
        row.commit,
        f"{row.measured_ms:.2f} ms",
        f"{row.predicted_ms:.2f} ms",
        "host" if row.by_host else f"{row.off:+.1%}",
        *gains,
        f"{row.step_ms:.2f} ms",
        f"{row.predicted_step_ms:.2f} ms",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", nargs="*", type=Path, default=[ROWS], help="files of rows")
    parser.add_argument("--gpu", default="", help="a part of the GPU's name")
    given = parser.parse_args()
    print(table([each for path in given.rows for each in beside(path, given.gpu)]))
