"""`interlace bench transformer`: layers trained on the same weights, in turn, and what rows tell.

    report = work(TransformerSettings(model="tiny"), ranks, tell)   # on every rank; rank 0 reports

A launch is a training step: forward with a loss, backward, the optimizer's step. The learning rate
is 0, so that all variants keep the weights that they share, bit for bit, and compute what they
would. Each is checked against eager DTensor before it is timed. Rows tell the stages' times, tokens
and FLOP a second of a GPU, what communication costs beyond the ideal, and memory.

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
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace.demo.model import Plain
from interlace.demo.train import registered
from interlace.errors import UnsupportedError
from interlace.float8 import Recipe
from interlace.launch import Report, Tell
from interlace_bench.kernels.case import needed
from interlace_bench.layers.inference import apart
from interlace_bench.layers.models import (
    MODELS,
    DistGemm,
    Gathered,
    NoCommunication,
    Overlapped,
    flops,
    in_form,
    on_shards,
    parallelized,
    shards_of,
)
from interlace_bench.links import assert_no_multicast, enable_symmetric_memory
from interlace_bench.race import (
    Opened,
    RacePlan,
    Racer,
    Variant,
    benchmark,
    busy,
    held,
    median,
    peak,
    race,
    run_race,
    worst,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row
from interlace_bench.settings import FLOAT8_LAYERS, TRANSFORMERS, TransformerSettings, ours
from interlace_bench.sites import DTYPES

STAGES = ("forward", "backward", "step")
NUM_INPUTS = 3
BUSY = 5
"""Launches of which a mirror's busy time is the median."""
LIMIT = 8.0
"""Largest deviation of a loss or gradient, by root mean square, in roundings (`finfo.eps`) of the
dtype: each passes some ten roundings on its way through a layer, of which sums cancel most."""
FLOAT8_EPS = torch.finfo(torch.bfloat16).eps
"""The rounding of FP8's results, of whatever dtype."""
FLOAT8_LIMIT = 2.0
"""Largest deviation of FP8's results: Note [What FP8 may be off]."""
ASYNC_TP = {"_micro_pipeline_tp": True}
CUDA_GRAPHS = {"triton.cudagraphs": True}
OURS = ("compile", "layers")
"""Beginnings of the names of our ways."""
IN_GRAPHS: dict[str, Any] = {"graph": True, "static_outputs": True}
"""Options of ours for CUDA graphs."""


# -- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of the stages of a training step."""

    forward: float = math.nan
    backward: float = math.nan
    step: float = math.nan

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def rows_of(settings: TransformerSettings, world: int, times: Mapping[str, Stages]) -> list[Row]:
    """The columns that follow from the times of the variants of one case."""
    dims, none = MODELS[settings.model], Stages()
    sizes = {"layers": settings.depths[0], "batch": settings.batch, "sequence": settings.sequence}
    tokens, work = settings.batch * settings.sequence / world, 3 * flops(dims, **sizes) / world
    ideals = {way: none if way in FLOAT8_LAYERS else times.get("ideal", none) for way in times}
    base = [time.both for way, time in times.items() if way.startswith("inductor")]
    best = min((each for each in base if not math.isnan(each)), default=math.nan)
    return [
        {
            "model": settings.model,
            **sizes,
            "form": settings.forms,
            "dtype": settings.dtype,
            "way": way,
            "forward_ms": time.forward * 1e3,
            "backward_ms": time.backward * 1e3,
            "step_ms": time.step * 1e3,
            "tokens_s": tokens / (time.both + time.step),
            "tflops": work / time.both / 1e12,
            "exposed_ms": (time.both - ideals[way].both) * 1e3,
            "exposed_share": (time.both - ideals[way].both) / time.both,
            "speedup": best / time.both,
        }
        for way, time in times.items()
    ]


@benchmark
def work(settings: TransformerSettings, ranks: Ranks, tell: Tell) -> RacePlan:
    """Each number of layers in each form."""
    accounts: list[Report] = []

    def measure(case: TransformerSettings, share: float) -> list[Row]:
        found = raced(case, ranks, tell, accounts)
        torch.compiler.reset()  # while the group of its graphs is there
        return found

    who = f"a mirror of {ranks.size} ranks (no link)" if settings.mirror else f"{ranks.size} ranks"
    what = f"{settings.model} x {settings.layers}, {settings.batch} x {settings.sequence} tokens"
    return RacePlan(
        more={"accounts": accounts} if settings.account else {},
        cases={f"{c.layers} {c.forms}": functools.partial(measure, c) for c in settings.cases},
        facts={"how": "mirror" if settings.mirror else "measured", "world": ranks.size},
        headline=f", {who}, {what} in {settings.dtype}; in ms",
    )


def raced(
    settings: TransformerSettings, ranks: Ranks, tell: Tell, accounts: list[Report]
) -> list[Row]:
    """The rows of one case, and accounts of it where they are asked for."""
    trained = LayerVariants(settings, ranks)
    racers = run_race(
        ranks,
        [trained.variant(name) for name in settings.names],
        lambda ready: race(ranks, ready, settings.seconds),
        tell,
        measure=trained.measure,
    )
    times = {
        name: slowest(ranks, Stages() if racer.problem else trained.laps[name].medians())
        for name, racer in racers.items()
    }
    for racer in racers.values() if settings.mirror else ():
        if racer.ready:  # behind the timing, which a profiler would change
            launches = [busy(ranks, lambda r=racer: r.run(*trained.sets[0])) for _ in range(BUSY)]
            racer.figures["busy_ms"] = median(launches) * 1e3
    if settings.account:
        from interlace_bench.layers.account import accounts_of  # which needs this module

        ready = [name for name, racer in racers.items() if not racer.problem]
        accounts += accounts_of(trained, ready, tell)
    known = zip(rows_of(settings, ranks.size, times), racers.values(), strict=True)
    rows = [{**row, **racer.row} for row, racer in known]
    for row in rows if settings.mirror else ():
        launch_ms = row["forward_ms"] + row["backward_ms"] + row["step_ms"]
        row["idle_ms"] = launch_ms - row.get("busy_ms", math.nan)
        row["idle_share"] = row["idle_ms"] / launch_ms
    return rows


def slowest(ranks: Ranks, mine: Stages) -> Stages:
    """The stages of the rank whose forward and backward take longest. The others are done sooner,
    and wait for it in the step, where the gradients of norms are summed."""
    told = ranks.exchange({"stages": dataclasses.astuple(mine)})
    return max((Stages(*note["stages"]) for note in told), key=lambda stages: stages.both)


# -- training ------------------------------------------------------------------------------------


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

    def medians(self) -> Stages:
        """The median seconds of each stage; NaN where nothing ran."""
        count = len(STAGES) + 1
        launches = [self.marks[at : at + count] for at in range(0, len(self.marks), count)]
        return Stages(
            *(median([self._between(*one[i : i + 2]) for one in launches]) for i in range(3))
        )

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start


@dataclass(frozen=True, slots=True)
class Training:
    """Parameters, how an output is computed of them, and how they are trained."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    forward: Any
    """`Layers`, until they are compiled as one."""
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
        found = [y.detach(), x.grad, *map(_gradient, self.parameters.values())]
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


def allocated(ranks: Ranks, peak: bool = False) -> float:
    """Bytes of tensors on the GPU, now or at most; NaN on a CPU, where torch counts none."""
    if not ranks.cuda:
        return math.nan
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def limit(way: str) -> float:
    """Largest deviation that a variant may have."""
    return FLOAT8_LIMIT if way in FLOAT8_LAYERS else LIMIT


class LayerVariants:
    """The layers of a run, inputs in turn, and the variants."""

    def __init__(self, settings: TransformerSettings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.dims = MODELS[settings.model]
        self.dims.check(ranks.size, settings.sequence)
        self.laps = {name: Laps(ranks.cuda) for name in TRANSFORMERS}
        mesh = DeviceMesh(ranks.device.type, list(range(ranks.size)), mesh_dim_names=("tp",))
        self._group, dtype = mesh.get_group(), DTYPES[settings.dtype]
        with ranks.device:
            self.layers = parallelized(
                self.dims, settings.depths[0], settings.sequence, dtype, mesh
            )
        parameters = dict(self.layers.named_parameters())
        forward = in_form(self.layers, settings.forms)
        self._eager = Training(parameters, _optimizer(parameters.values()), forward)
        self._shards = shards_of(self.layers)
        self._optimizer = _optimizer(self._shards.values())
        self.sets = self._inputs(dtype)
        """The input and the target of a step."""
        self._known = self._eager.results(*self.sets[0])
        self._before = self._allocated = math.nan
        names = [n for n in settings.names if settings.mirror and n.startswith(OURS)]
        self._in_order = {name: self._results_in_order(name) for name in names}
        """Where each of ours is its own reference, its results in order or why there are none."""
        if names:
            torch.compiler.reset()

    def variant(self, name: str) -> Variant:
        """A way to train, which is right where loss and gradients are eager's."""
        laps = self.laps[name]

        def opened() -> Opened:
            self._before = held(self.ranks)
            self._allocated = allocated(self.ranks)
            training = self.training(name)
            training.results(*self.sets[0])  # compiles
            known, units = self._reference(name)

            def off() -> float:
                found = training.results(*self.sets[0])
                off = 0.0 if name == "ideal" else self._off(found, known, units)
                if math.isfinite(off):  # else the optimizer would spoil the weights of all variants
                    training.step(laps, *self.sets[0])
                laps.marks.clear()
                return off

            return Opened(lambda x, target: training.step(laps, x, target), off)

        exact = name in self._in_order and not self.ranks.cuda  # where attention sums in any order
        return Variant(name, opened, sets=self.sets, limit=0.0 if exact else limit(name))

    def _reference(self, name: str) -> tuple[list[Tensor], list[float] | None]:
        """The results that a variant must have, and the units of deviations from them."""
        if (known := self._in_order.get(name)) is not None:
            if isinstance(known, Exception):
                raise known
            return known, self._float8()[1] if name in FLOAT8_LAYERS else None
        return self._float8() if name in FLOAT8_LAYERS else (self._known, None)

    def _results_in_order(self, name: str) -> list[Tensor] | Exception:
        """In a mirror: those of the same Programs, one op after another. Made before anything is
        raced, since torch compiles a function only so many times."""
        try:
            return self.training(name, in_order=True).results(*self.sets[0])
        except Exception as error:  # so has the variant, or says so
            return error

    def measure(self, racer: Racer) -> None:
        """Most bytes that opening and a step take beyond weights and moments: of the device, and of
        torch's allocator, which sees neither slots nor what graphs keep; what stays at rest."""
        most = peak(self.ranks, lambda: racer.run(*self.sets[0]))
        racer.figures["peak_bytes"] = most - self._before
        racer.figures["torch_peak_bytes"] = allocated(self.ranks, peak=True) - self._allocated
        racer.figures["rest_bytes"] = held(self.ranks) - self._before

    def training(self, name: str, **more: Any) -> Training:
        """A way to train, opened anew; of ours with more options."""
        eager, options = self._eager, ours(self.settings, **more)
        in_graphs = options | (IN_GRAPHS if name.endswith("graph") else {})
        match name:
            case "inductor":
                return self._compiled(eager)
            case "inductor-graph" | "async-tp" | "dist-gemm" if not self.ranks.cuda:
                raise UnsupportedError(f"{name} needs GPUs")
            case "async-tp" | "dist-gemm" if self.settings.mirror:
                raise UnsupportedError(f"{name} is torch's own over memory of real peers")
            case "inductor-graph":
                return self._compiled(eager, CUDA_GRAPHS)
            case "async-tp":
                assert_no_multicast(self.ranks.device)
                enable_symmetric_memory(self._group)
                return self._compiled(eager, ASYNC_TP)
            case "dist-gemm":
                functions = needed("torchtitan.distributed.linear", "torchtitan", self.ranks.device)
                assert_no_multicast(self.ranks.device)
                enable_symmetric_memory(self._group)
                return self._on_shards(DistGemm(self._group, functions))
            case "compile" | "compile-graph":
                return self._compiled(eager, in_graphs, backend=registered())
            case "layers" | "layers-fp8":
                return self._layers(options, Recipe() if name in FLOAT8_LAYERS else None)
            case "compile-fp8" | "compile-fp8-graph":
                return self._compiled(self._layers({}, Recipe()), in_graphs, backend=registered())
            case "ideal":
                x = self.sets[0][0]
                full = torch.cat([x.detach()] * self.ranks.size, 1)
                local = self._local(NoCommunication(full, x.shape[1]))
                return self._compiled(local, {"post_grad_custom_pre_pass": Gathered()})
            case _:
                return eager

    def _compiled(self, training: Training, options: Any = None, **how: Any) -> Training:
        if self.settings.account and not how:  # profiles know Inductor's kernels on a CPU, too
            options = {**(options or {}), "cpp.enable_kernel_profile": not self.ranks.cuda}
        run = functools.partial(torch.compile, dynamic=False, options=options or None, **how)
        layers = training.forward
        if "blocks" not in self.settings.forms:
            return dataclasses.replace(training, forward=run(layers))
        return dataclasses.replace(training, forward=layers.mapped(run))

    def _layers(self, options: dict[str, Any], recipe: Recipe | None) -> Training:
        return self._on_shards(Overlapped(self._group, options, recipe))

    def _on_shards(self, maps: Plain) -> Training:
        copied = [weight for key, weight in self._shards.items() if "norm" in key]
        return self._local(maps, lambda: self._sum(copied))

    def _local(self, maps: Plain, summed: Callable[[], None] = lambda: None) -> Training:
        module = on_shards(self._shards, self.layers, self.dims, self.ranks.size, maps)
        forward = in_form(module, self.settings.forms)
        return Training(self._shards, self._optimizer, forward, summed)

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
