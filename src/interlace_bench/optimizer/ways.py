"""The ways to train with Muon over data parallelism; of ours each has a bit-equal twin.

    trained = OptimizerWays(settings, ranks)
    racer = prepare(ranks, trained.way("overlap"), trained.sets)
    statistics.median(trained.waits["overlap"])      # seconds that a step waited for gathers

A launch is the optimizer's step and then a forward and a backward, so that the gathers of a launch
end in it. Every way begins with the same weights, and trains them.

Note [Repeatable gradients]
    Bits are compared with attention by torch's plain operators: the backward of the fused kernels
    adds up the gradient of q in any order.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from interlace.optim import LayerWise, Muon, muon_groups
from interlace.options import Options
from interlace_bench.kernels.case import needed
from interlace_bench.kernels.losses import relative
from interlace_bench.optimizer.link import slow_all_reduce, slow_link
from interlace_bench.optimizer.model import Llama
from interlace_bench.race.ways import Opened, Way, worst
from interlace_bench.ranks import Ranks
from interlace_bench.sites import DTYPES

if TYPE_CHECKING:
    from interlace_bench.optimizer.work import OptimizerSettings

SYNCHRONOUS, OVERLAP, NO_GATHER = "synchronous", "overlap", "no-gather"
BY_NCCL = "overlap-nccl"
OURS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {"overlap_param_gather": False},
    OVERLAP: {},
    BY_NCCL: {"options": Options(transport="nccl")},
    NO_GATHER: {},
}
"""Arguments of LayerWise by way; without a gather, weights stay where they were updated."""
DDP, TITAN = "torch-ddp", "torchtitan"
WAYS = (*OURS, DDP, TITAN)
RATE = 1e-3
NUM_INPUTS, NUM_CHECKED = 3, 2
FAR = 0.1
"""Largest deviation of a change of weights by torch's Muon, relative, in the norm: gradients are
summed in another order, which the iteration in bfloat16 amplifies."""


@dataclass(frozen=True, slots=True)
class TrainedWay:
    """A model that a way trains."""

    module: nn.Module
    step: Callable[[], Any]
    zero: Callable[[], Any]
    end: Callable[[], Any] = lambda: None
    """Completes what is in flight."""
    close: Callable[[], Any] = lambda: None
    waited: Callable[[], float] = lambda: math.nan
    """Seconds for which modules have waited for gathers."""

    def run(self, tokens: Tensor, target: Tensor) -> None:
        """A launch; there are gradients before it."""
        self.step()
        self.zero()
        self.backward(tokens, target)

    def backward(self, tokens: Tensor, target: Tensor) -> None:
        """Forward and backward."""
        F.cross_entropy(self.module(tokens).flatten(0, 1), target.flatten()).backward()


class OptimizerWays:
    """The inputs of a run, which differ by rank, and the ways."""

    def __init__(self, settings: OptimizerSettings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        draw = torch.Generator().manual_seed(1 + ranks.me)
        self.size = settings.size
        shape = (NUM_INPUTS, 2, self.size.batch, self.size.sequence)
        tokens = torch.randint(self.size.vocabulary, shape, generator=draw).to(ranks.device)
        self.sets = [(each[0], each[1]) for each in tokens]
        self.waits: dict[str, list[float]] = {}
        self._trained: dict[str, TrainedWay] = {}
        self._first: dict[str, Tensor] = {}
        """The weights that the first way of ours trained, by which others are judged."""

    def way(self, name: str) -> Way:
        """One of WAYS."""
        return Way(name, lambda: self._opened(name), lambda: self._closed(name))

    @sdpa_kernel(SDPBackend.MATH)  # see Note [Repeatable gradients]
    def _opened(self, name: str) -> Opened:
        model = self._model()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        make: dict[str, Callable[[Llama], TrainedWay]] = {
            **dict.fromkeys(OURS, lambda model: self._ours(name, model)),
            DDP: self._ddp,
            TITAN: self._titan,
        }
        trained = self._trained[name] = make[name](model)
        waits = self.waits[name] = []
        trained.backward(*self.sets[0])

        def run(tokens: Tensor, target: Tensor) -> None:
            start = trained.waited()
            trained.run(tokens, target)
            waits.append(trained.waited() - start)

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

        return Opened(run, off)

    def _off(self, name: str, model: Llama, before: dict[str, Tensor]) -> float:
        """0 where a way of ours has the bits of the first; how far off torch's is, in FAR. Of the
        others nothing is known: they have arithmetic of their own."""
        if name in (NO_GATHER, TITAN):
            return 0.0
        after = {n: p.detach() for n, p in model.named_parameters()}
        if name == DDP:
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

    def settle(self, name: str) -> None:
        """Completes what a way has in flight: where the next one fails, the teams are reset, and
        peers that are still in it would hear of that."""
        self._trained[name].end()

    def _closed(self, name: str) -> None:
        trained = self._trained.pop(name, None)
        if trained is not None:
            trained.close()

    def _model(self) -> Llama:
        """The same on all ranks, and for all ways."""
        torch.manual_seed(self.settings.seed)
        with self.ranks.device:
            return Llama(self.size).to(DTYPES[self.size.dtype])

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.ranks.device.type, (self.ranks.size,), mesh_dim_names=("dp",))

    def _ours(self, name: str, model: Llama) -> TrainedWay:
        adamw = {"lr": RATE, "stochastic_rounding": False}  # the same bits in any buckets
        muon = Muon(muon_groups(model), lr=RATE, adamw=adamw)
        with slow_link(self.settings.bandwidth):
            optimizer = LayerWise(
                muon,
                model,
                self._mesh(),
                bucket_bytes=self.size.bucket_bytes,
                main_grad_dtype=None,
                **OURS[name],
            )
        if name == NO_GATHER:
            weights: Any = optimizer._weights
            weights.start = lambda *_, **__: None

        def end() -> None:
            reducer = optimizer._reducer
            if reducer is not None and reducer.going:
                reducer.finish()
            optimizer.synchronize()

        return TrainedWay(
            model,
            optimizer.step,
            optimizer.zero_grad,
            end,
            optimizer.close,
            lambda: optimizer.waited_s,
        )

    def _ddp(self, model: Llama) -> TrainedWay:
        matrices, others = _parted(model)
        return self._under_ddp(
            model,
            torch.optim.Muon(matrices, lr=RATE),
            torch.optim.AdamW(others, lr=RATE, weight_decay=0.0),
        )

    def _under_ddp(self, model: Llama, *optimizers: torch.optim.Optimizer) -> TrainedWay:
        devices = [self.ranks.device] if self.ranks.cuda else None
        ddp: Any = DistributedDataParallel(model, device_ids=devices)
        if self.settings.bandwidth:
            ddp.register_comm_hook(None, slow_all_reduce(self.settings.bandwidth))
        return _stepped(ddp, *optimizers)

    def _titan(self, model: Llama) -> TrainedWay:
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


def _stepped(module: nn.Module, *optimizers: torch.optim.Optimizer) -> TrainedWay:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def zero() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    return TrainedWay(module, step, zero)
