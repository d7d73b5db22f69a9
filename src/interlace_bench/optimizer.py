"""`interlace bench optimizer`: training steps with Muon over data parallelism, ours and others.

    report = work(OptimizerSettings(model="tiny"), ranks, tell)     # on every rank; rank 0 reports

A launch is the optimizer's step and then a forward and a backward, so that the gathers of a launch
end in it. All variants train in turn, in one process group, from the same weights; of ours each has
a bit-equal twin. What is exposed of the gathers is what a step takes beyond one without any gather.
The synchronous variant hides nothing, so its figure is that of all gathers.

Note [Repeatable gradients]
    Bits are compared with attention by torch's plain operators: the backward of the fused kernels
    adds up the gradient of q in any order.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from interlace.demo.model import Block
from interlace.launch import Tell
from interlace.optim import LayerWise, Muon, muon_groups
from interlace.options import Options
from interlace_bench.kernels.case import needed, relative
from interlace_bench.layers.models import LayerDims
from interlace_bench.race import (
    Opened,
    RacePlan,
    Racer,
    Variant,
    also,
    benchmark,
    close,
    held,
    peak,
    prepare,
    race,
    run_race,
    worst,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row
from interlace_bench.settings import OptimizerSettings
from interlace_bench.sites import DTYPES

OURS: dict[str, dict[str, Any]] = {
    "synchronous": {"overlap_param_gather": False},
    "overlap": {},
    "overlap-nccl": {"options": Options(transport="nccl")},
    "no-gather": {},
}
"""Arguments of LayerWise; without a gather, weights stay where they were updated."""
RATE = 1e-3
NUM_INPUTS, NUM_CHECKED = 3, 2
FAR = 0.1
"""Largest deviation of a change of weights by torch's Muon, relative, in the norm: gradients are
summed in another order, which the iteration in bfloat16 amplifies."""
LAUNCHES = (2, 4)
"""Steps of a burst."""
ROUNDS = (3, 25)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Dimensions, and what goes with them."""

    dims: LayerDims
    vocabulary: int
    layers: int
    batch: int
    sequence: int
    dtype: str
    bucket_bytes: int


SIZES = {
    "tiny": ModelSize(LayerDims(32, 2, 1, 64), 96, 2, 2, 16, "f32", 1 << 14),
    "llama3-8b": ModelSize(LayerDims(4096, 32, 8, 14336), 32768, 4, 1, 4096, "bf16", 64 << 20),
}


class Llama(nn.Module):
    """An embedding, layers (without positions), a norm and a head; layers' matrices are Muon's."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        dim = size.dims.dim
        self.embedding = nn.Embedding(size.vocabulary, dim)
        self.layers = nn.ModuleList(Block(size.dims) for _ in range(size.layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass(frozen=True, slots=True)
class ModelUnderTraining:
    """A model that a variant trains."""

    module: nn.Module
    step: Callable[[], Any]
    zero: Callable[[], Any]
    end: Callable[[], Any] = lambda: None
    """Completes what is in flight."""
    close: Callable[[], Any] = lambda: None

    def run(self, tokens: Tensor, target: Tensor) -> None:
        """A launch; there are gradients before it."""
        self.step()
        self.zero()
        self.backward(tokens, target)

    def backward(self, tokens: Tensor, target: Tensor) -> None:
        """Forward and backward."""
        F.cross_entropy(self.module(tokens).flatten(0, 1), target.flatten()).backward()


class OptimizerVariants:
    """The inputs of a run, which differ by rank, and the variants."""

    def __init__(self, settings: OptimizerSettings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        draw = torch.Generator().manual_seed(1 + ranks.me)
        self.model = settings.model or ("llama3-8b" if ranks.cuda else "tiny")
        self.size = SIZES[self.model]
        shape = (NUM_INPUTS, 2, self.size.batch, self.size.sequence)
        tokens = torch.randint(self.size.vocabulary, shape, generator=draw).to(ranks.device)
        self.sets = [(each[0], each[1]) for each in tokens]
        self._trained: dict[str, ModelUnderTraining] = {}
        self._before = math.nan
        self._first: dict[str, Tensor] = {}
        """The weights that the first variant of ours trained, by which others are judged."""

    def variant(self, name: str) -> Variant:
        """A way to train."""
        how = lambda: self._opened(name), lambda: self._closed(name)
        return Variant(name, *how, self.sets)

    def measure(self, racer: Racer) -> None:
        """Most bytes that it holds in a launch, beyond those before it was opened."""

        def launches() -> None:
            for given in self.sets:
                racer.run(*given)

        if self.ranks.cuda:
            racer.figures["peak_bytes"] = peak(self.ranks, launches) - self._before
        # Where the next variant fails, the teams are reset, and peers that are still in this one
        # would hear of that.
        self._trained[racer.variant.name].end()

    def time(self, ready: list[Racer]) -> None:
        """Times the variants."""
        race(self.ranks, ready, self.settings.seconds, ROUNDS, LAUNCHES)

    @sdpa_kernel(SDPBackend.MATH)  # see Note [Repeatable gradients]
    def _opened(self, name: str) -> Opened:
        if self.ranks.cuda:
            self._before = held(self.ranks)
        model = self._model()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        others = {"torch-ddp": self._ddp, "torchtitan": self._titan}
        trained = others[name](model) if name in others else self._ours(name, model)
        self._trained[name] = trained
        trained.backward(*self.sets[0])

        @sdpa_kernel(SDPBackend.MATH)
        def off() -> float:
            for _ in range(NUM_CHECKED):
                trained.run(*self.sets[0])
            trained.step()
            trained.end()
            found = self._off(name, model, before)
            trained.zero()
            trained.backward(*self.sets[0])
            return found

        return Opened(trained.run, off)

    def _off(self, name: str, model: Llama, before: dict[str, Tensor]) -> float:
        """0 where a variant of ours has the bits of the first; how far off torch's is, in FAR. Of
        the others nothing is known: they have arithmetic of their own."""
        if name in ("no-gather", "torchtitan"):
            return 0.0
        after = {n: p.detach() for n, p in model.named_parameters()}
        if name == "torch-ddp":
            names = [n for n in self._first if "layers" in n and after[n].ndim == 2]
            eps = torch.finfo(DTYPES[self.size.dtype]).eps
            return worst(
                relative(after[n] - before[n], change)
                / (FAR + eps * float(after[n].norm() / change.norm()))  # each weight is rounded
                for n, change in ((n, self._first[n] - before[n]) for n in names)
            )
        self._first = self._first or {n: value.clone() for n, value in after.items()}
        same = all(torch.equal(value, self._first[n]) for n, value in after.items())
        return 0.0 if same else math.inf

    def _closed(self, name: str) -> None:
        trained = self._trained.pop(name, None)
        if trained is not None:
            trained.close()

    def _model(self) -> Llama:
        """The same on all ranks, and for all variants."""
        torch.manual_seed(0)
        with self.ranks.device:
            return Llama(self.size).to(DTYPES[self.size.dtype])

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.ranks.device.type, (self.ranks.size,), mesh_dim_names=("dp",))

    def _ours(self, name: str, model: Llama) -> ModelUnderTraining:
        adamw = {"lr": RATE, "stochastic_rounding": False}  # the same bits in any buckets
        muon = Muon(muon_groups(model), lr=RATE, adamw=adamw)
        optimizer = LayerWise(
            muon,
            model,
            self._mesh(),
            bucket_bytes=self.size.bucket_bytes,
            main_grad_dtype=None,
            **OURS[name],
        )
        if name == "no-gather":
            weights: Any = optimizer._weights
            weights.start = lambda *_, **__: None

        def end() -> None:
            reducer = optimizer._reducer
            if reducer is not None and reducer.going:
                reducer.finish()
            optimizer.synchronize()

        return ModelUnderTraining(model, optimizer.step, optimizer.zero_grad, end, optimizer.close)

    def _ddp(self, model: Llama) -> ModelUnderTraining:
        matrices, others = _parted(model)
        ddp: Any = DistributedDataParallel(
            model, device_ids=[self.ranks.device] if self.ranks.cuda else None
        )
        muon = torch.optim.Muon(matrices, lr=RATE)
        return _stepped(ddp, muon, torch.optim.AdamW(others, lr=RATE, weight_decay=0.0))

    def _titan(self, model: Llama) -> ModelUnderTraining:
        """Shards of FSDP2, which gathers weights itself: DistMuon moves momentum and updates."""
        flex = needed("torchtitan.distributed.flex_shard", "torchtitan", self.ranks.device)
        fsdp: Any = importlib.import_module("torch.distributed.fsdp")
        mesh = self._mesh()
        for part in (*model.layers, model):
            fsdp.fully_shard(part, mesh=mesh)
        matrices, others = _parted(model)
        names = [n for n, p in model.named_parameters() if any(p is m for m in matrices)]
        owned = flex.ComputeLayout(shardings_by_mesh_axis={"dp": flex.Owned()})
        muon = flex.build_dist_muon(
            [{"params": matrices, "param_names": names}],
            compute_sharding_by_fqn=dict.fromkeys(names, owned),
            bucket_configs=[
                flex.BucketConfig(patterns=(f"layers.{i}.*",)) for i in range(len(model.layers))
            ],
            lr=RATE,
        )
        return _stepped(model, muon, torch.optim.AdamW(others, lr=RATE, weight_decay=0.0))


def _parted(model: Llama) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of layers, and the rest, which is for AdamW."""
    matrices = [param for param in model.layers.parameters() if param.ndim == 2]
    inside = {id(param) for param in matrices}
    return matrices, [param for param in model.parameters() if id(param) not in inside]


def _stepped(module: nn.Module, *optimizers: torch.optim.Optimizer) -> ModelUnderTraining:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def zero() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    return ModelUnderTraining(module, step, zero)


@benchmark
def work(settings: OptimizerSettings, ranks: Ranks, tell: Tell) -> RacePlan:
    """All variants, in one race."""
    trained = OptimizerVariants(settings, ranks)
    size = trained.size

    def measure(seconds: float) -> list[Row]:
        variants = [trained.variant(name) for name in settings.names]
        if ranks.cuda:  # what stays of memory from a first one is nobody's
            first = prepare(ranks, variants[0])
            also(ranks, first, trained.measure)
            close([first])
        racers = run_race(ranks, variants, trained.time, tell, measure=trained.measure)
        return _rows(trained, racers)

    said = f"{trained.model} x {size.layers}, {size.batch} x {size.sequence} tokens in {size.dtype}"
    return RacePlan(cases={"steps": measure}, headline=f", {ranks.size} ranks, {said}; in ms")


def _rows(trained: OptimizerVariants, racers: dict[str, Racer]) -> list[Row]:
    """The rows; of memory the greatest of all ranks'."""
    ranks, size = trained.ranks, trained.size
    none = racers["no-gather"].median if "no-gather" in racers else math.nan
    gather = racers["synchronous"].median - none if "synchronous" in racers else math.nan
    return [
        {
            "model": trained.model,
            **{each: getattr(size, each) for each in ("layers", "batch", "sequence", "dtype")},
            "bucket_bytes": size.bucket_bytes,
            "world": ranks.size,
            "device": ranks.device.type,
            "way": name,
            "step_ms": racer.median * 1e3,
            "p90_ms": racer.row["p90_us"] / 1e3,
            "exposed_ms": (racer.median - none) * 1e3,
            "gather_ms": gather * 1e3,
            "exposed_share": (racer.median - none) / gather,
            "over_no_gather": racer.median / none,
            **racer.row,
        }
        for name, racer in racers.items()
    ]
