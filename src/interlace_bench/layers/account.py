"""`interlace bench transformer --account`: where a step's time over the ideal goes, part by part.

    found = Accounts(variants).of(["compile", "inductor"])   # on every rank: of its own steps

Steps of a variant, the same recorded, the ideal and the ideal profiled take turns. Here a step is
forward and backward of a given gradient, so that no loss stands outside of what is compiled, and of
each kind the shortest counts, the one that others on the machine disturbed least. Ours, compiled as
one and without CUDA graphs, is recorded op by op (the option `trace`); another one by torch's
profiler, which knows kernels by name and neither ops nor modules. What recording adds is a line of
its own, and what profiling adds to the ideal is the rest, the time that no line explains.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from interlace.commands.output import say, table
from interlace.cost import Span
from interlace.cost.op_times import at_hand, matmul_shape
from interlace.frontend import Bound
from interlace.frontend.explain import graphs_of
from interlace.ir import Arg, Box, Call, View
from interlace.launch import Report, Tell
from interlace.runtime.calling.operators import decode, resolve
from interlace.runtime.values import DTYPES
from interlace.torch_private import cuda_sleep
from interlace.trace.account import (
    HEADINGS,
    AccountLine,
    OpId,
    account,
    account_rows,
    beyond,
    divided,
    ids,
    totals,
)
from interlace.trace.figures import milliseconds
from interlace_bench.layers.training import Laps, LayerVariants, Stages, Training
from interlace_bench.race import LEAD_CYCLES, burst, median, step
from interlace_bench.settings import FLOAT8_LAYERS

ROUNDS = 12
"""Steps of each kind at least; while the time for timing lasts, in equal parts, there are more."""
CALLS = 9
"""Calls of a matmul that tell what it takes alone."""
KINDS = {
    "comm": r"nccl|gloo|c10d|PtoP|P2P|^exchange_kernel",
    "attention": r"attention|flash|fmha|sdpa|cudnn::fusion",
    "matmuls": r"gemm|matmul|nvjet|cutlass|xmma|^(gather|scatter)_kernel"
    r"|::(linear|(_scaled_|_grouped_|add|b|badd)?b?mm)\b",
    "copies": r"Memcpy",
    "sums": r"^(awaited_)?sum_kernel",
}
"""Patterns of the names of kernels and of torch's operators; others are elementwise."""
CPU_WORK = re.compile(r"^(aten|c10d|_c10d_functional|gloo|interlace)\b|cpp_fused")
MARK = "interlace_bench::begin"
"""Name of what a profile has before the step: on a GPU, a kernel that spins is there."""
GAP = AccountLine("idle, launch", "nothing runs")


Lines = Sequence[AccountLine]
"""Lines that add up to the seconds of a step."""


class Accounts:
    """The steps of variants beside the ideal's, on this rank. All ranks do the same."""

    def __init__(self, variants: LayerVariants) -> None:
        self.variants, self.ranks, self.settings = variants, variants.ranks, variants.settings
        self.x, self.gradient = variants.sets[0]

    def of(self, name: str) -> tuple[float, float, Lines]:
        """Seconds of the variant's step and of the ideal's, and lines of the difference."""
        torch.compiler.reset()  # TorchDynamo compiles the layers only so many times
        settings, training, begun = self.settings, self.variants.training, time.monotonic()
        plain, without = training(name), training("ideal")
        whole = settings.forms == "whole" and not name.endswith("graph")
        by_op = whole and name.startswith("compile")
        traced = training(name, trace=True) if by_op else plain
        record = self._traced if by_op else self._profiled
        limit, spent = settings.seconds / len(settings.names), 0.0
        steps: list[tuple[float, Lines, float, Lines]] = []
        while len(steps) <= ROUNDS or spent < limit:
            own, lines = self._run(plain).both, record(traced)
            steps.append((own, lines, self._run(without).both, self._profiled(without)))
            (spent,) = self.ranks.maximum([time.monotonic() - begun])
        usual, recorded, of_ideal, profiled = zip(*steps[1:], strict=True)  # the first one compiles
        took, ideal, shown = min(usual), min(of_ideal), min(recorded, key=length)
        known = totals(min(profiled, key=length))
        if by_op:  # whose gaps are boundaries, or else between its ops
            known["boundaries"] = known.pop(GAP.part, 0.0)
        lines = beyond(shown, known, self._alone(traced, shown) if by_op else {})
        lines.append(AccountLine("recording", "what it adds", seconds=took - length(shown)))
        rest = took - ideal - length(lines)
        lines.append(AccountLine("rest", "what no line explains", seconds=rest))
        return took, ideal, lines

    def _run(self, training: Training) -> Stages:
        """The stages of a step behind another one."""
        self.ranks.align()
        for _ in range(2):
            laps = Laps(self.ranks.cuda)
            if self.ranks.cuda:
                cuda_sleep(LEAD_CYCLES)
            with torch.profiler.record_function(MARK):
                pass
            laps.mark()
            y = training.forward(self.x)
            laps.mark()
            y.backward(self.gradient)
            training.summed()
            laps.mark()
            training.optimizer.zero_grad()
            self.x.grad = None
            laps.mark()
        self.ranks.synchronize()
        return laps.medians()

    def _traced(self, training: Training) -> Lines:
        """A step of ours: its Programs op by op, and what each stage has beside its Program."""
        stages = self._run(training)
        beside = {"forward": stages.forward, "backward": stages.backward}
        lines: list[AccountLine] = []
        for bound in bound_of(training):
            if (timeline := bound.measured) is not None:
                lines += account(bound.program, timeline)
                beside[bound.kind] -= timeline.makespan_s
        for stage, seconds in beside.items():
            lines.append(AccountLine("boundaries", f"{stage}: outside of its Program", "", seconds))
        return lines

    def _profiled(self, training: Training) -> Lines:
        """A step by torch's profiler: kernels, or on a CPU operators; and what has none."""
        kind = torch.profiler.ProfilerActivity
        activities = [kind.CPU, *([kind.CUDA] if self.ranks.cuda else [])]
        with torch.profiler.profile(activities=activities) as profile:
            seconds = self._run(training).both
        spans = kernels(profile.events() or (), self.ranks.cuda)
        found = divided(spans, of_kernel, lambda _: GAP)
        lines = [line for line in found if line.part != GAP.part]
        return [*lines, replace(GAP, seconds=seconds - length(lines))]

    def _alone(self, training: Training, lines: Lines) -> dict[OpId, float]:
        """Seconds of the matmuls of these lines, each alone on this rank."""
        of = {bound.program.name: bound for bound in bound_of(training)}
        wanted = [op for line in lines if line.part == "matmuls" for op in line.ops]
        times: dict[object, float] = {}
        found: dict[OpId, float] = {}
        for name, index in sorted(wanted):
            program = of[name].program
            call, box = program.ops[index], at_hand(program.boxes(of[name].executor.rank))
            if isinstance(call, Call) and matmul_shape(call, box) is not None:
                boxes = map(box, (*call.views(), *call.outs))
                key = call.fn, *((each.sizes, each.strides) for each in boxes)
                if key not in times:
                    run = of_layouts(call, box, self.ranks.device)
                    each, host, _ = burst(self.ranks, run, ((),), CALLS, warm=2)
                    times[key] = each if self.ranks.cuda else median(host)
                found[name, index] = times[key]
        return found


def length(lines: Lines) -> float:
    """The seconds of the lines together."""
    return sum(line.seconds for line in lines)


def bound_of(training: Training) -> list[Bound]:
    """The bound Program of each stage of a compiled variant."""
    return [bound for graph in graphs_of(training.forward) for bound in graph.bound[-1:]]


def of_layouts(
    call: Call, box: Callable[[View], Box], device: torch.device
) -> Callable[[], object]:
    """The operator of a call on random numbers of the same layouts."""

    def value(arg: Arg) -> Any:
        return drawn(box(arg), device) if isinstance(arg, View) else decode(arg, device)

    args, kwargs = [*map(value, call.args)], {name: value(arg) for name, arg in call.kwargs}
    operator = resolve(call.fn)
    if call.outs and not call.mutates:  # one in place has it among its arguments
        kwargs["out"] = value(call.outs[0])
    return torch.no_grad()(lambda: operator(*args, **kwargs))


def drawn(box: Box, device: torch.device) -> Tensor:
    """A tensor of a box's layout, of normal numbers where it has no element twice."""
    sizes, strides = [*map(int, box.sizes)], [*map(int, box.strides)]
    tensor = torch.empty_strided(sizes, strides, dtype=DTYPES[box.dtype], device=device)
    return tensor.copy_(torch.randn(sizes, device=device)) if all(strides) else tensor


# -- reports ---------------------------------------------------------------------------------------


def accounts_of(variants: LayerVariants, names: Sequence[str], tell: Tell) -> list[Report]:
    """The account of each variant but the ideal, on rank 0; all ranks call it."""
    accounts, settings, found = Accounts(variants), variants.settings, list[Report]()
    for name in names:
        if name == "ideal" or name in FLOAT8_LAYERS:  # whose ideal would be another
            continue
        step(tell, f"account of {name}")
        took, ideal, of = accounts.of(name)
        over = took - ideal
        head = {"model": settings.model, "layers": settings.depths[0], "form": settings.forms}
        head |= {"dtype": settings.dtype, "way": name, "took_ms": took * 1e3}
        head |= {"ideal_ms": ideal * 1e3}
        lines = [
            head
            | {"part": line.part, "ms": line.seconds * 1e3, "share": line.seconds / over}
            | {"layer": line.layer, "module": line.module, "what": line.what, "ops": ids(line, 99)}
            for line in of
        ]
        tables = [account_rows(of), layer_rows(of)]
        found.append({**head, "over_ms": over * 1e3, "lines": lines, "tables": tables})
    return found


def layer_rows(lines: Lines) -> list[list[str]]:
    """Cells of a row for each part, with its time in each layer, in order; first the headings."""
    layers = sorted(
        {line.layer for line in lines}, key=lambda layer: (not layer, len(layer), layer)
    )
    rows = [["part", *(layer or "in none" for layer in layers)]]
    for part in totals(lines):
        of = {layer: 0.0 for layer in layers}
        for line in lines:
            of[line.layer] += line.seconds if line.part == part else 0.0
        rows.append([part, *map(milliseconds, of.values())])
    return rows


def show(accounts: Sequence[Report]) -> None:
    """Prints the accounts: by part, with the longest lines of each, and by layer."""
    for each in accounts:
        took, ideal, over = (f"{each[key]:.3f} ms" for key in ("took_ms", "ideal_ms", "over_ms"))
        what = (
            f"{each['way']}, forward and backward on rank 0: {took}, ideal {ideal}, over it {over}"
        )
        rows, (heads, *layers) = each["tables"]
        say("")
        table(HEADINGS, rows, title=what)
        say("")
        table(heads, layers, title=f"{each['way']}, by layer")


# -- what torch's profiler tells -------------------------------------------------------------------


def kernels(events: Iterable[Any], cuda: bool) -> list[Span]:
    """The kernels of a profile, or the outermost operators on a CPU, behind the last mark."""
    found: list[Span] = []
    begin = 0.0
    for event in events:
        start, end = event.time_range.start / 1e6, event.time_range.end / 1e6
        if cuda and event.device_type != DeviceType.CUDA:
            continue
        if "spin_kernel" in event.name if cuda else event.name == MARK:
            begin = max(begin, end)
        elif not event.is_user_annotation and (cuda or is_outermost(event)):
            kind = "comm" if re.search(KINDS["comm"], event.name) else "compute"
            found.append(Span(0, "", len(found), event.name, start, end, kind=kind))
    return [span for span in found if span.start_s >= begin]


def is_outermost(event: Any) -> bool:
    """True if an event of the CPU is work, and in none that is."""
    parent = event.cpu_parent
    while parent is not None and not CPU_WORK.search(parent.name):
        parent = parent.cpu_parent
    return parent is None and CPU_WORK.search(event.name) is not None


def of_kernel(span: Span) -> AccountLine:
    """A line for a kernel, by its name."""
    found = (part for part, names in KINDS.items() if re.search(names, span.name))
    part = next(found, "elementwise")
    return AccountLine("exposed communication" if part == "comm" else part, span.name[:60])
