"""`interlace bench layer`: a whole transformer layer, compiled by Interlace and by Inductor.

    report = work(LayerSettings(), ranks, tell)       # on every rank; rank 0 gets the report

A layer of an 8B-sized model under tensor parallelism, without gradients. `prefill` is sequence
parallel (gathers before, scatters after the matmuls); `decode` is one token of each of 16 sequences
against a cache, with an all-reduce after attention and after the feed-forward. The ways run
interleaved on the same weights, each checked against eager DTensor before it is timed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import interlace
from interlace.demo.model import Attention, Block, rotary_table
from interlace.demo.plan import ModelConfig
from interlace.demo.train import registered
from interlace.errors import OptionError
from interlace.frontend.compile import Compiled
from interlace.launch import Tell
from interlace.strategies import StrategyName
from interlace_bench.race.ways import (
    Opened,
    RaceSettings,
    Way,
    close,
    free,
    prepare,
    run_race,
    running,
    worst,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.sites import DTYPES
from interlace_bench.timing import ahead, race

WAYS = (
    "eager",
    "inductor",
    "inductor-graph",
    "interlace",
    "interlace-graph",
    "interlace.compile",
    "interlace.compile-graph",
)
"""`inductor` and `interlace` are backends of `torch.compile`; `-graph`: in CUDA graphs."""
NUM_INPUTS = 4
CLOSE = 2.0**-6
"""Largest deviation of a result from eager DTensor's, both by root mean square: roundings of 16
bits. One element may be 16 times further off: it may be as much larger than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings(RaceSettings):
    """Sizes of the layer and of its steps: an 8B-sized Llama's."""

    known = WAYS
    dim: int = 4096
    heads: int = 32
    hidden: int = 14336
    prefill: int = 2048
    decode: int = 16
    cached: int = 2048
    """Tokens in the cache of each sequence of a decode step."""
    dtype: str = "bf16"
    strategy: StrategyName = "auto"
    calibration: str | None = None


SMALL: dict[str, Any] = {
    "dim": 32,
    "heads": 4,
    "hidden": 64,
    "prefill": 32,
    "decode": 16,
    "cached": 8,
    "dtype": "f32",
}
"""Sizes for a try-out."""


class CachedAttention(Attention):
    """One new token of each sequence against those in a cache; each rank holds some heads."""

    keys: Tensor
    values: Tensor

    def __init__(self, config: ModelConfig, settings: LayerSettings, world: int) -> None:
        super().__init__(config)
        shape = (settings.decode, settings.heads // world, settings.cached, self.head_dim)
        self.register_buffer("keys", torch.randn(shape), persistent=False)
        self.register_buffer("values", torch.randn(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Attention of (sequences, dim) over the cached tokens and the new one."""
        rows = x.shape[0]

        def heads(y: Tensor) -> Tensor:
            return y.view(rows, -1, 1, self.head_dim)

        q, k, v = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        self.keys[:, :, -1:] = k
        self.values[:, :, -1:] = v
        y = F.scaled_dot_product_attention(q, self.keys, self.values)
        return self.wo(y.reshape(rows, -1))


class DecodeBlock(Block):
    """A layer of a decode step."""

    def __init__(self, settings: LayerSettings, config: ModelConfig, world: int) -> None:
        super().__init__(config)
        self.attention = CachedAttention(config, settings, world)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """One layer for one token of each sequence."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class PrefillBlock(Block):
    """A layer of a prefill step, with the table of positions inside."""

    table: Tensor

    def __init__(self, settings: LayerSettings, config: ModelConfig) -> None:
        super().__init__(config)
        table = rotary_table(settings.prefill, config.head_dim)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """One layer on this rank's rows."""
        return super().forward(x, self.table)


def make(step: str, settings: LayerSettings, mesh: DeviceMesh, ranks: Ranks) -> nn.Module:
    """The layer of a step, sharded, with the same weights on every call."""
    torch.manual_seed(0)
    config = ModelConfig(
        layers=1,
        dim=settings.dim,
        heads=settings.heads,
        hidden=settings.hidden,
        sequence=settings.prefill,
    )
    with torch.device(ranks.device):
        module = (
            PrefillBlock(settings, config)
            if step == "prefill"
            else DecodeBlock(settings, config, ranks.size)
        )
    module = module.to(DTYPES[settings.dtype])
    rows = Shard(1) if step == "prefill" else Replicate()
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "attention.wo": RowwiseParallel(output_layouts=rows),
        "feed_forward.down": RowwiseParallel(output_layouts=rows),
    }
    if step == "prefill":
        one = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
        plan |= {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(rows, None), desired_input_layouts=(Replicate(), None)
            ),
            "feed_forward_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**one),
        }
    parallelize_module(module, mesh, plan)
    return module.requires_grad_(False)


def inputs(step: str, settings: LayerSettings, ranks: Ranks) -> list[tuple[Tensor]]:
    """Inputs in turn: this rank's rows of a prefill, all rows of a decode step."""
    generator = torch.Generator(ranks.device).manual_seed(ranks.me if step == "prefill" else 0)
    shape = (
        (1, settings.prefill // ranks.size, settings.dim)
        if step == "prefill"
        else (settings.decode, settings.dim)
    )
    kind = DTYPES[settings.dtype]
    return [
        (torch.randn(shape, generator=generator, device=ranks.device).to(kind),)
        for _ in range(NUM_INPUTS)
    ]


def compiled(
    way: str, module: nn.Module, settings: LayerSettings, mesh: DeviceMesh
) -> Callable[..., Any]:
    """The layer compiled one way."""
    match way:
        case "eager":
            return module
        case "inductor":
            return torch.compile(module)
        case "inductor-graph":
            return torch.compile(module, mode="reduce-overhead")
        case _:
            options: dict[str, Any] = {"strategy": settings.strategy, "time_out_s": 60.0}
            if settings.calibration is not None:
                options["calibration"] = settings.calibration
            if way.endswith("-graph"):
                options["graph"] = True
            if way.startswith("interlace.compile"):
                return interlace.compile(module, mesh=mesh, options=options)
            return torch.compile(module, backend=registered(), options=options)


def work(settings: LayerSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures both steps; rank 0 gets the report."""
    if settings.heads % ranks.size or settings.hidden % ranks.size:
        raise OptionError(f"{settings.heads} heads do not divide over {ranks.size} ranks")
    mesh = DeviceMesh(ranks.device.type, list(range(ranks.size)), mesh_dim_names=("tp",))
    common = facts(ranks.device.type, settings.commit)
    rows: list[Row] = []
    ways = [way for way in settings.only if ranks.cuda or not way.endswith("-graph")]
    tell({"event": "total", "total": 2 * (len(ways) + 1), "doing": "starting"})
    begun = time.monotonic()
    for number, step in enumerate(("prefill", "decode")):
        left = settings.seconds - max(ranks.maximum([time.monotonic() - begun]))
        with torch.no_grad():
            found = _step(step, settings, mesh, ranks, ways, left / (2 - number), tell)
        torch.compiler.reset()  # with it go graphs that hold collectives: NCCL would wait for them
        free(ranks)
        for row in found:
            row |= {"world": ranks.size, **common}
        tell({"event": "rows", "rows": found})
        rows += found
    return None if ranks.me else {"rows": rows, "facts": common}


def _step(
    step: str,
    settings: LayerSettings,
    mesh: DeviceMesh,
    ranks: Ranks,
    ways: list[str],
    seconds: float,
    tell: Tell,
) -> list[Row]:
    module = make(step, settings, mesh, ranks)
    given = inputs(step, settings, ranks)
    known = [(each, _local(module(*each))) for each in given[:2]]
    share = max(1.0, seconds / 4)
    racers = run_race(
        ways,
        lambda name: prepare(ranks, _way(name, module, settings, mesh, known), given),
        lambda runs, sets: race(ranks, runs, sets, share),
        tell,
        f"{step}: ",
    )
    hosts = ranks.maximum([racer.timed.host_median for racer in racers.values()])
    host_s = dict(zip(racers, hosts, strict=True))
    device_s = ahead(ranks, *running(racers.values()), host_s)
    close(racers.values())
    base = [racer.median for way, racer in racers.items() if way.startswith("inductor")]
    best = min((median for median in base if not math.isnan(median)), default=math.nan)
    return [
        {
            "step": step,
            "way": way,
            "dtype": settings.dtype,
            "dim": settings.dim,
            "hidden": settings.hidden,
            "heads": settings.heads,
            "rows": settings.prefill if step == "prefill" else settings.decode,
            **racer.columns("median_us", "p90_us"),
            "host_us": host_s[way] * 1e6,
            "device_us": device_s.get(way, math.nan) * 1e6,
            "speedup": best / racer.median,
            **racer.columns("sm_mhz", "error"),
        }
        for way, racer in racers.items()
    ]


def _way(
    name: str,
    module: nn.Module,
    settings: LayerSettings,
    mesh: DeviceMesh,
    known: Sequence[tuple[tuple[Tensor], Tensor]],
) -> Way:
    """The layer computed one way, which is right where the `known` results come out, twice."""
    made = contextlib.ExitStack()

    def opened() -> Opened:
        run = compiled(name, module, settings, mesh)
        if isinstance(run, Compiled):
            made.callback(run.close)
        return Opened(run, lambda: worst(apart(run(*at), y) / CLOSE for at, y in (*known, *known)))

    return Way(name, opened, made.close)


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
