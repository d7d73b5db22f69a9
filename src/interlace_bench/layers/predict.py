"""Predicts by the simulator the time of a training step on machines that are not here.

    report = predict(TransformerSettings(model="llama3-70b"), default_machine("h200"), world=4)

The layers are DTensors of fake tensors on a fake process group: nothing is computed, and no memory
taken, whatever their size. One rank's trace gives the serial Program, which is compiled DTensors
without overlap, ours, and the ideal: the serial one on links that take no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg

from interlace.cost import Machine, run_after_run
from interlace.cost.machine import Link
from interlace.float8 import Recipe
from interlace.frontend.compile import Compiled
from interlace.ir import Program
from interlace.options import Options, Regions
from interlace.passes import lower
from interlace_bench.layers.models import (
    MODELS,
    LayerDims,
    Overlapped,
    on_shards,
    parallelized,
    shards_of,
)
from interlace_bench.layers.training import Stages, headline, rows_of
from interlace_bench.rows import Row, facts
from interlace_bench.settings import TransformerSettings
from interlace_bench.sites import DTYPES

MOMENTS = 2
"""Tensors of AdamW of a parameter's size, beside it and its gradient."""


def predict(settings: TransformerSettings, machine: Machine, world: int) -> Row:
    """The report, as `work` makes it."""
    dims = MODELS[settings.model]
    dims.check(world, settings.sequence)
    regions: Regions = "inductor" if machine.device == "cuda" else "eager"
    options = Options(strategy=settings.strategy, regions=regions)
    serial = Options(overlap=False, regions=regions)
    links = tuple((name, Link(latency_s=0.0, bandwidth=math.inf)) for name, _ in machine.links)
    traced = _programs(settings, dims, options, machine, world, None)
    ways = {
        "serial": (traced, serial, machine),
        "compile": (traced, options, machine),
        "ideal": (traced, serial, machine.replace(links=links)),
    }
    if dims.fits_float8(world):
        float8 = _programs(settings, dims, options, machine, world, Recipe())
        ways["compile-fp8"] = float8, options, machine
    step = _step_s(settings, dims, machine, world)
    times: dict[str, Stages] = {}
    for way, (programs, how, place) in ways.items():
        played = [run_after_run(lower(program, how, place), place) for program in programs]
        forward, backward = (max(timeline.makespan_s, host) for timeline, host in played)
        times[way] = Stages(forward, backward, step)
    common = facts("cpu", settings.commit) | {"gpu": machine.host or machine.name}
    absent = dict.fromkeys(("peak_bytes", "off", "sm_mhz"), math.nan)
    told = {**absent, "error": "", "how": "predicted", "world": world, **common}
    rows = [row | told for row in rows_of(settings, world, times)]
    return {"rows": rows, "facts": common, "headline": headline(settings, world)}


def _programs(
    settings: TransformerSettings,
    dims: LayerDims,
    options: Options,
    machine: Machine,
    world: int,
    recipe: Recipe | None,
) -> tuple[Program, ...]:
    """The serial Programs of forward and backward, as rank 0 traces them."""
    dtype = DTYPES[settings.dtype]
    with _fake_ranks(world):
        mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("tp",))
        with FakeTensorMode():
            layers = parallelized(dims, settings.layers, settings.sequence, dtype, mesh)
            if recipe is not None:
                maps = Overlapped(mesh.get_group(), {}, recipe)
                layers = on_shards(shards_of(layers), layers, dims, world, maps)
            x = torch.empty(settings.batch, settings.sequence // world, dims.dim, dtype=dtype)
        return Compiled(layers, mesh, options).trace(x.requires_grad_(), machine=machine)


@contextmanager
def _fake_ranks(world: int) -> Iterator[None]:
    """A default process group whose other ranks are not there."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _step_s(settings: TransformerSettings, dims: LayerDims, machine: Machine, world: int) -> float:
    """AdamW, bound by its bytes: all are read, and all but the gradient written."""
    elements = settings.layers * dims.matmul_parameters / world
    tensors = 2 * (1 + MOMENTS) + 1
    nbytes = elements * tensors * DTYPES[settings.dtype].itemsize
    return machine.launch_s + nbytes / machine.memory_bandwidth
