"""The ways to train layers: all on the same weights, checked against eager DTensor before timing.

    trained = Candidates(settings, ranks)
    racer = prepare(ranks, trained.way("compile"), trained.sets, limit("compile"))
    trained.laps["compile"].medians()          # seconds of forward, backward and step

A launch is a training step: forward with a loss, backward, the optimizer's step. The learning rate
is 0, so that all ways keep the weights that they share, bit for bit, and compute what they would.

Note [What FP8 may be off]
    A value that is rounded otherwise in bf16 comes to lie on another number of FP8, 16 to 32 times
    as far away, and the more often the more layers there are. On an H200 (70B, two ranks, 2048
    tokens) the gradients of a recipe on the serial strategy move by up to 8.7, 10.0, 11.1 and 11.6
    roundings of bf16 for one to four layers where each input is rounded otherwise. All ways of the
    recipe, and torchao's, are as far from fp32: 0.085 for three layers. So FP8 is held against the
    same recipe on the serial strategy, tensor by tensor, in what that moves by: without other
    roundings ours has its bits; fused by Inductor, which rounds less, it is 0.7 to 1.2 away.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.demo.train import registered
from interlace.errors import UnsupportedError
from interlace.float8 import Recipe
from interlace_bench.layer import apart
from interlace_bench.race.ways import Opened, Way, worst
from interlace_bench.ranks import Ranks
from interlace_bench.sites import DTYPES
from interlace_bench.transfers import assert_no_multicast, enable_symmetric_memory
from interlace_bench.transformer.models import (
    MODELS,
    Gathered,
    NoCommunication,
    Overlapped,
    Plain,
    on_shards,
    parallelized,
    shards_of,
)

if TYPE_CHECKING:
    from interlace_bench.transformer.work import TransformerSettings

FLOAT8 = ("layers-fp8", "compile-fp8", "compile-fp8-graph")
WAYS = (
    *("eager", "inductor", "inductor-graph", "async-tp"),
    *("compile", "layers", "compile-graph", *FLOAT8, "ideal"),
)
STAGES = ("forward", "backward", "step")
NUM_INPUTS = 3
LIMIT = 8.0
"""Largest deviation of a loss or gradient, by root mean square, in roundings (`finfo.eps`) of the
dtype: each passes some ten roundings on its way through a layer, of which sums cancel most."""
FLOAT8_EPS = torch.finfo(torch.bfloat16).eps
"""The rounding of FP8's results, of whatever dtype."""
FLOAT8_LIMIT = 2.0
"""Largest deviation of FP8's results: Note [What FP8 may be off]."""
ASYNC_TP = {"_micro_pipeline_tp": True}
CUDA_GRAPHS = {"triton.cudagraphs": True}
IN_GRAPHS: dict[str, Any] = {"graph": True, "static_outputs": True}
"""Options of ours for CUDA graphs."""


@dataclass(slots=True)
class Laps:
    """When each launch of a way came from one stage to the next."""

    cuda: bool
    marks: list[Any] = field(default_factory=list)

    def mark(self) -> None:
        """Notes that all issued until now is done: one more than there are stages in a launch."""
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def medians(self) -> list[float]:
        """The median seconds of each stage; NaN where nothing ran."""
        count = len(STAGES) + 1
        launches = [self.marks[at : at + count] for at in range(0, len(self.marks), count)]
        return [
            statistics.median([self._between(*one[i : i + 2]) for one in launches] or [math.nan])
            for i in range(len(STAGES))
        ]

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start


@dataclass(frozen=True, slots=True)
class Training:
    """Parameters, how an output is computed of them, and how they are trained."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    forward: Callable[..., Any]
    summed: Callable[[], None] = lambda: None
    """Sums, at the end of backward, the gradients of what every rank has a copy of."""

    def step(self, laps: Laps, x: Tensor, target: Tensor) -> None:
        """A training step."""
        laps.mark()
        loss = _loss(self.forward(x), target)
        laps.mark()
        loss.backward()
        self.summed()
        laps.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        x.grad = None
        laps.mark()

    def results(self, x: Tensor, target: Tensor) -> list[Tensor]:
        """The output, and this rank's part of the gradients of the input and of parameters."""
        y = self.forward(x)
        _loss(y, target).backward()
        self.summed()
        assert x.grad is not None
        # What is added to all keys cancels in softmax: the gradient of their bias is noise.
        mine = [p for name, p in self.parameters.items() if not name.endswith("wk.bias")]
        found = [y.detach(), x.grad, *map(_gradient, mine)]
        x.grad = None
        self.optimizer.zero_grad()
        return found


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target, reduction="sum")


def _gradient(parameter: Any) -> Tensor:
    """This rank's part of a gradient, summed where every rank has a copy."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return gradient


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with its moments, so that no way's memory counts them; at rate 0 nothing changes."""
    mine = list(parameters)
    optimizer = torch.optim.AdamW(mine, lr=0.0, fused=mine[0].device.type == "cuda" or None)
    for parameter in mine:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def limit(way: str) -> float:
    """Largest deviation that a way may have."""
    return FLOAT8_LIMIT if way in FLOAT8 else LIMIT


class Candidates:
    """The layers of a run, inputs in turn, and the ways."""

    def __init__(self, settings: TransformerSettings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.dims = MODELS[settings.model]
        self.dims.check(ranks.size, settings.sequence)
        self.laps = {name: Laps(ranks.cuda) for name in WAYS}
        mesh = DeviceMesh(ranks.device.type, list(range(ranks.size)), mesh_dim_names=("tp",))
        self._group, dtype = mesh.get_group(), DTYPES[settings.dtype]
        with ranks.device:
            self.layers = parallelized(self.dims, settings.layers, settings.sequence, dtype, mesh)
        parameters = dict(self.layers.named_parameters())
        self._eager = Training(parameters, _optimizer(parameters.values()), self.layers)
        self._shards = shards_of(self.layers)
        self._optimizer = _optimizer(self._shards.values())
        self.sets = self._inputs(dtype)
        """The input and the target of a step."""
        self._known = self._eager.results(*self.sets[0])

    def way(self, name: str) -> Way:
        """A way to train, which is right where loss and gradients are eager's."""
        laps = self.laps[name]

        def opened() -> Opened:
            training = self._training(name)
            training.results(*self.sets[0])  # compiles
            known, units = self._float8() if name in FLOAT8 else (self._known, None)

            def off() -> float:
                found = training.results(*self.sets[0])
                off = 0.0 if name == "ideal" else self._off(found, known, units)
                if math.isfinite(off):  # else the optimizer would spoil the weights of all ways
                    training.step(laps, *self.sets[0])
                laps.marks.clear()
                return off

            return Opened(lambda x, target: training.step(laps, x, target), off)

        return Way(name, opened)

    def _training(self, name: str) -> Training:
        eager, settings = self._eager, self.settings
        ours: dict[str, Any] = {"strategy": settings.strategy, "time_out_s": 60.0}
        if settings.calibration is not None:
            ours["calibration"] = settings.calibration
        match name:
            case "inductor":
                return self._compiled(eager)
            case "inductor-graph" | "async-tp" if not self.ranks.cuda:
                raise UnsupportedError(f"{name} needs GPUs")
            case "inductor-graph":
                return self._compiled(eager, CUDA_GRAPHS)
            case "async-tp":
                assert_no_multicast(self.ranks.device)
                enable_symmetric_memory(self._group)
                return self._compiled(eager, ASYNC_TP)
            case "compile":
                return self._compiled(eager, ours, backend=registered())
            case "compile-graph":
                return self._compiled(eager, ours | IN_GRAPHS, backend=registered())
            case "layers" | "layers-fp8":
                return self._layers(ours, Recipe() if name in FLOAT8 else None)
            case "compile-fp8" | "compile-fp8-graph":
                how = ours | (IN_GRAPHS if name.endswith("graph") else {})
                return self._compiled(self._layers({}, Recipe()), how, backend=registered())
            case "ideal":
                x = self.sets[0][0]
                full = torch.cat([x.detach()] * self.ranks.size, 1)
                local = self._local(NoCommunication(full, x.shape[1]))
                return self._compiled(local, {"post_grad_custom_pre_pass": Gathered()})
            case _:
                return eager

    def _compiled(self, training: Training, options: Any = None, **how: Any) -> Training:
        run = torch.compile(training.forward, dynamic=False, options=options or None, **how)
        return dataclasses.replace(training, forward=run)

    def _layers(self, options: dict[str, Any], recipe: Recipe | None) -> Training:
        copied = [weight for key, weight in self._shards.items() if "norm" in key]
        maps = Overlapped(self._group, options, recipe)
        return self._local(maps, lambda: self._sum(copied))

    def _local(self, maps: Plain, summed: Callable[[], None] = lambda: None) -> Training:
        module = on_shards(self._shards, self.layers, self.dims, self.ranks.size, maps)
        return Training(self._shards, self._optimizer, module, summed)

    def _sum(self, copied: Sequence[nn.Parameter]) -> None:
        for parameter in copied:
            dist.all_reduce(parameter.grad, group=self._group)

    def _inputs(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        settings, ranks = self.settings, self.ranks
        generator = torch.Generator(ranks.device).manual_seed(ranks.me)
        shape = settings.batch, settings.sequence // ranks.size, self.dims.dim
        how: Any = {"generator": generator, "device": ranks.device}
        drawn = [torch.randn(shape, **how).to(dtype) for _ in range(2 * NUM_INPUTS)]
        return [(x.requires_grad_(), y) for x, y in zip(drawn[::2], drawn[1::2], strict=True)]

    def _float8(self) -> tuple[list[Tensor], list[float]]:
        """The results of the recipe on the serial strategy, and how far the loss and each of them
        move where the input is rounded otherwise: Note [What FP8 may be off]."""
        serial, (x, target) = self._layers({"strategy": "serial"}, Recipe()), self.sets[0]
        generator = torch.Generator(x.device).manual_seed(self.ranks.me)
        drawn = torch.rand(x.shape, generator=generator, device=x.device) - 0.5
        moved = (x.detach() * (1 + FLOAT8_EPS * drawn)).to(x.dtype).requires_grad_()
        known = serial.results(x, target)
        found = self._distances(serial.results(moved, target), known)
        return known, [max(distance, FLOAT8_EPS) for distance in found]

    def _off(
        self, found: Sequence[Tensor], known: Sequence[Tensor], units: Sequence[float] | None
    ) -> float:
        """The largest deviation of the loss and the results from the reference, in these units or
        in roundings of the dtype."""
        distances = self._distances(found, known)
        units = units or [torch.finfo(found[0].dtype).eps] * len(distances)
        return worst(far / unit for far, unit in zip(distances, units, strict=True))

    def _distances(self, found: Sequence[Tensor], known: Sequence[Tensor]) -> list[float]:
        """Deviations of the loss and of each result from the reference."""
        target = self.sets[0][1].double()
        losses = [_loss(y[0].double(), target).reshape(1) for y in (found, known)]
        pairs = zip([losses[0], *found], [losses[1], *known], strict=True)
        return [apart(result, want) for result, want in pairs]
