"""`interlace bench layer`: a whole transformer layer, compiled by Interlace and by Inductor.

    report = work(LayerSettings(), ranks, tell)       # on every rank; rank 0 gets the report

A layer of an 8B-sized model under tensor parallelism, without gradients. `prefill` is sequence
parallel (gathers before, scatters after the matmuls); `decode` is one token of each of 16 sequences
against a cache, with an all-reduce after attention and after the feed-forward. The variants take
turns on the same weights, each checked against eager DTensor before it is timed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

import interlace
from interlace.demo.model import Attention, Block, block_plan
from interlace.demo.train import registered
from interlace.errors import OptionError
from interlace.frontend.compile import Compiled
from interlace.launch import Tell
from interlace_bench.layers.models import LayerDims, parallelized
from interlace_bench.race import (
    Opened,
    RacePlan,
    Racer,
    Variant,
    benchmark,
    race,
    run_race,
    time_device,
    worst,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row
from interlace_bench.settings import LayerSettings, ours
from interlace_bench.sites import DTYPES

NUM_INPUTS = 4
CLOSE = 2.0**-6
"""Largest deviation of a result from eager DTensor's, both by root mean square: roundings of 16
bits. One element may be 16 times further off: it may be as much larger than the others."""


EIGHT_B = LayerDims(4096, 32, 32, 14336)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Sizes of the layer and of its steps: an 8B-sized Llama's, or small ones for a try-out."""

    dims: LayerDims = EIGHT_B
    prefill: int = 2048
    decode: int = 16
    cached: int = 2048
    """Tokens in the cache of each sequence of a decode step."""
    dtype: str = "bf16"


SMALL = StepSizes(dims=LayerDims(32, 4, 4, 64), prefill=32, cached=8, dtype="f32")


class CachedAttention(Attention):
    """One new token of each sequence against those in a cache; each rank holds some heads."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: StepSizes, world: int) -> None:
        super().__init__(sizes.dims)
        shape = (sizes.decode, sizes.dims.heads // world, sizes.cached, self.head_dim)
        self.register_buffer("keys", torch.randn(shape), persistent=False)
        self.register_buffer("values", torch.randn(shape), persistent=False)

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Attention of (sequences, dim) over the cached tokens and the new one."""
        q, k, v = (
            linear(x).view(x.shape[0], -1, 1, self.head_dim)
            for linear in (self.wq, self.wk, self.wv)
        )
        self.keys[:, :, -1:] = k
        self.values[:, :, -1:] = v
        y = F.scaled_dot_product_attention(q, self.keys, self.values)
        return self.wo(y.reshape(x.shape[0], -1))


def make(step: str, sizes: StepSizes, mesh: DeviceMesh, ranks: Ranks) -> nn.Module:
    """The layer of a step, sharded, with the same weights on every call."""
    dtype = DTYPES[sizes.dtype]
    with ranks.device:
        if step == "prefill":
            whole = parallelized(sizes.dims, 1, sizes.prefill, dtype, mesh)
            return whole.requires_grad_(False)
        torch.manual_seed(0)
        layer = Block(sizes.dims)
        layer.attention = CachedAttention(sizes, ranks.size)
    layer.to(dtype)
    parallelize_module(layer, mesh, block_plan(Replicate()))
    return layer.requires_grad_(False)


def inputs(step: str, sizes: StepSizes, ranks: Ranks) -> list[tuple[Tensor]]:
    """Inputs in turn: this rank's rows of a prefill, all rows of a decode step."""
    generator = torch.Generator(ranks.device).manual_seed(ranks.me if step == "prefill" else 0)
    rows = (1, sizes.prefill // ranks.size) if step == "prefill" else (sizes.decode,)
    how: Any = {"generator": generator, "device": ranks.device}
    drawn = [torch.randn(*rows, sizes.dims.dim, **how) for _ in range(NUM_INPUTS)]
    return [(x.to(DTYPES[sizes.dtype]),) for x in drawn]


def compiled(
    name: str, module: nn.Module, settings: LayerSettings, mesh: DeviceMesh
) -> Callable[..., Any]:
    """The layer compiled one way."""
    match name:
        case "eager":
            return module
        case "inductor":
            return torch.compile(module)
        case "inductor-graph":
            return torch.compile(module, mode="reduce-overhead")
        case _:
            options = ours(settings, **({"graph": True} if name.endswith("-graph") else {}))
            if name.startswith("interlace.compile"):
                return interlace.compile(module, mesh=mesh, options=options)
            return torch.compile(module, backend=registered(), options=options)


@benchmark
def work(settings: LayerSettings, ranks: Ranks, tell: Tell) -> RacePlan:
    """Both steps."""
    small = not ranks.cuda if settings.small is None else settings.small
    sizes = SMALL if small else StepSizes()
    if sizes.dims.heads % ranks.size or sizes.dims.hidden % ranks.size:
        raise OptionError(f"{sizes.dims.heads} heads do not divide over {ranks.size} ranks")
    mesh = DeviceMesh(ranks.device.type, list(range(ranks.size)), mesh_dim_names=("tp",))

    def measure(step: str, share: float) -> list[Row]:
        with torch.no_grad():
            found = _step(step, settings, sizes, mesh, ranks, share, tell)
        torch.compiler.reset()  # with it go graphs that hold collectives: NCCL would wait for them
        return found

    return RacePlan(
        cases={step: functools.partial(measure, step) for step in ("prefill", "decode")},
        seconds=settings.seconds,
        facts={"world": ranks.size},
    )


def _step(
    step: str,
    settings: LayerSettings,
    sizes: StepSizes,
    mesh: DeviceMesh,
    ranks: Ranks,
    seconds: float,
    tell: Tell,
) -> list[Row]:
    module, given = make(step, sizes, mesh, ranks), inputs(step, sizes, ranks)
    known = [(each, _local(module(*each))) for each in given[:2]]

    def variant(name: str) -> Variant:
        """The layer computed one way, which is right where the known results come out, twice."""
        made = contextlib.ExitStack()

        def opened() -> Opened:
            run = compiled(name, module, settings, mesh)
            if isinstance(run, Compiled):
                made.callback(run.close)
            pairs = (*known, *known)
            return Opened(run, lambda: worst(apart(run(*at), y) / CLOSE for at, y in pairs))

        return Variant(name, opened, made.close, given)

    def timer(ready: list[Racer]) -> None:
        race(ranks, ready, max(1.0, seconds / 4))
        time_device(ranks, ready)

    racers = run_race(
        ranks,
        [variant(name) for name in settings.names if ranks.cuda or not name.endswith("-graph")],
        timer,
        tell,
        f"{step}: ",
    )
    base = [racer.median for name, racer in racers.items() if name.startswith("inductor")]
    best = min((median for median in base if not math.isnan(median)), default=math.nan)
    return [
        {
            "step": step,
            "way": name,
            "dtype": sizes.dtype,
            "dim": sizes.dims.dim,
            "hidden": sizes.dims.hidden,
            "heads": sizes.dims.heads,
            "rows": sizes.prefill if step == "prefill" else sizes.decode,
            "speedup": best / racer.median,
            **racer.row,
        }
        for name, racer in racers.items()
    ]


def _local(value: Any) -> Tensor:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.clone()  # a graph writes its results into the same place again


def apart(result: Any, want: Tensor) -> float:
    """The difference, of the root mean square: its own, or a 16th of its largest element."""
    found = _local(result)
    if found.shape != want.shape:
        return math.inf
    off, size = found.double() - want.double(), want.double().square().mean().sqrt()
    return (torch.maximum(off.square().mean().sqrt(), off.abs().max() / 16) / size).item()
