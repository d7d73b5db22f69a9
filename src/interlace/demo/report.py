"""What the demo found, as data, and the files that it writes.

report = make_report(plan, world, outcomes, Path("interlace-demo"))
report["equal"]["losses"], report["overlap"]["overlapped"]["hidden"]
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from interlace.commands.explain import explanation
from interlace.cost import Machine, Timeline, default_machine, simulate
from interlace.demo.plan import TrainingPlan
from interlace.ir import Program
from interlace.runtime.machine import machine_for
from interlace.trace import Run, write_page, write_perfetto
from interlace.trace.tracks import write_whole
from interlace.verify import Report

NOISE = 0.03
"""Medians of steps that are closer than this part of them are the same."""
ONE_STEP = "whether overlap pays cannot be told from one step, which compiles"


@dataclass(frozen=True, slots=True)
class DemoGraph:
    """A compiled graph: its Program, the proof of it, and how one run went on all ranks."""

    kind: str
    program: Program
    report: Report
    measured: Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class WayOutcome:
    """One way of training, as all ranks saw it; digests are by rank."""

    way: str
    losses: list[float]
    step_s: list[float]
    measured_step: int
    """The step of median time, whose timelines stand in `graphs`."""
    gradients: list[str]
    parameters: list[str]
    gradient_norm: float = 0.0
    """Of the first step's gradients, over all ranks' shards."""
    graphs: list[DemoGraph] = field(default_factory=list)


def make_report(
    plan: TrainingPlan, world: int, outcomes: Sequence[WayOutcome], out: Path
) -> dict[str, Any]:
    """Compares the ways, writes the files and says all of it as plain data."""
    by_way = {outcome.way: outcome for outcome in outcomes}
    eager, serial, overlapped = (by_way[way] for way in ("eager", "serial", "overlapped"))
    machine = machine_for(plan.options("overlapped"), plan.device)
    built_in = machine.name == default_machine(plan.device).name
    graphs = [
        {
            "kind": graph.kind,
            "ops": len(graph.program.ops),
            "streams": list(graph.program.streams()),
            "verdict": "sound" if graph.report.sound else "unsound",
            "verified_ops": graph.report.num_ops,
            "verified_ms": graph.report.seconds * 1e3,
            **explanation(graph.program),
        }
        for graph in overlapped.graphs
    ]
    overlap = {outcome.way: _overlap(outcome) for outcome in outcomes if outcome is not eager}
    equal = {
        outcome.way: {
            "losses": outcome.losses == overlapped.losses,
            "gradients": outcome.gradients == overlapped.gradients,
            "parameters": outcome.parameters == overlapped.parameters,
            "largest_loss_difference": _difference(outcome, overlapped),
            "first_loss_difference": abs(outcome.losses[0] - overlapped.losses[0]),
            "gradient_norm_ratio": _ratio(outcome.gradient_norm, overlapped.gradient_norm),
        }
        for outcome in outcomes
        if outcome is not overlapped
    }
    report: dict[str, Any] = {
        "schema": 1,
        "world": world,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "machine": machine.name,
        "lesson": asdict(plan),
        "losses": {outcome.way: outcome.losses for outcome in outcomes},
        "step_ms": {outcome.way: _step_ms(outcome) for outcome in outcomes},
        "first_step_s": {outcome.way: outcome.step_s[0] for outcome in outcomes},
        "equal": equal,
        "graphs": graphs,
        "overlap": overlap,
        "verdict": verdict(plan, world, outcomes, built_in),
    }
    report["files"] = _write(overlapped, serial, machine, out, report)
    return report


def verdict(
    plan: TrainingPlan, world: int, outcomes: Sequence[WayOutcome], built_in: bool
) -> dict[str, Any]:
    """Whether a step was faster overlapped than serial, by how much, and what decided that."""
    serial, overlapped = (next(o for o in outcomes if o.way == w) for w in ("serial", "overlapped"))
    if plan.steps == 1:
        return {"paid": None, "speedup": None, "text": [f"{ONE_STEP}: give --steps 2 or more"]}
    before, after = _step_ms(serial), _step_ms(overlapped)
    speedup = before / after
    paid = speedup > 1 + NOISE
    what = "paid" if paid else "did not pay" if speedup < 1 - NOISE else "made no difference"
    text = [
        f"overlap {what} on this machine: a step takes {after:.1f} ms overlapped and {before:.1f} "
        f"ms serial ({speedup:.2f}x)"
    ]
    was, now = (_overlap(outcome) for outcome in (serial, overlapped))
    less, more = (
        (one - other) / world * 1e3
        for one, other in (
            (was["exposed_s"], now["exposed_s"]),
            (now["compute_s"], was["compute_s"]),
        )
    )
    if less > 0:
        text.append(
            f"why: a rank waits {less:.1f} ms less for communication, and computes "
            f"{abs(more):.1f} ms {'longer' if more > 0 else 'less'}"
        )
    else:
        text.append(f"why: a rank waits {-less:.1f} ms more for communication")
    if not paid and plan.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        text.append(
            f"  {world} ranks share {cores} core{'s' * (cores > 1)}: copies and compute contend "
            "for them, so hiding one behind the other gains little. GPUs copy by engines of their "
            "own: there overlap pays where communication is a large part of a step"
        )
    elif not paid:
        text.append(
            "  a site gains where its matmul takes longer than its communication, and is cut into "
            "chunks that still fill the GPU: larger matmuls and slower links gain more"
        )
    if not paid and built_in:
        text.append(
            "  strategies were chosen by the built-in model: after `interlace calibrate`, auto "
            "chooses by what this machine takes, and leaves serial what is fastest serial"
        )
    return {"paid": paid, "speedup": speedup, "text": text}


def _difference(one: WayOutcome, other: WayOutcome) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def _ratio(one: float, other: float) -> float:
    return one / other if other else float(one == other)


def _step_ms(outcome: WayOutcome) -> float:
    """The median step, without the first one, which compiles."""
    return statistics.median(outcome.step_s[1:] or outcome.step_s) * 1e3


def _overlap(outcome: WayOutcome) -> dict[str, float]:
    """Communication of a whole step, forward and backward, and how much compute hid of it."""
    figures = [graph.measured.figures() for graph in outcome.graphs]
    comm = sum(figure.comm_s for figure in figures)
    hidden = sum(figure.overlap_s for figure in figures)
    return {
        "compute_s": sum(figure.compute_s for figure in figures),
        "comm_s": comm,
        "overlap_s": hidden,
        "exposed_s": comm - hidden,
        "hidden": hidden / comm if comm > 0 else math.nan,
    }


def _write(
    overlapped: WayOutcome, serial: WayOutcome, machine: Machine, out: Path, report: dict[str, Any]
) -> list[str]:
    """The Programs' text, the trace and the page; returns their paths."""
    written: list[Path] = []
    for outcome, suffix in ((overlapped, ""), (serial, ".serial")):
        for graph in outcome.graphs:
            written.append(write_whole(out / f"{graph.kind}{suffix}.ilc", f"{graph.program}\n"))
    runs = [
        _run(graph, machine, before=_run(plain, machine))
        for graph, plain in zip(overlapped.graphs, serial.graphs, strict=True)
    ]
    written.append(write_perfetto(runs, out / "trace.json"))
    equal = report["equal"]["serial"]
    same = equal["losses"] and equal["gradients"] and equal["parameters"]
    verdicts = ", ".join(f"{graph['kind']} {graph['verdict']}" for graph in report["graphs"])
    facts = [
        ("ranks", str(report["world"])),
        ("verifier", verdicts),
        ("overlapped = serial", "bit for bit" if same else "to rounding"),
        ("measured", f"the step of median time of {len(overlapped.losses)}"),
    ]
    written.append(write_page(runs, out / "timeline.html", "interlace demo", facts))
    return [str(path) for path in written]


def _run(graph: DemoGraph, machine: Machine, before: Run | None = None) -> Run:
    """A graph for the page; `before` is how its serial schedule ran."""
    label = "serial" if before is None else "overlapped"
    predicted = simulate(graph.program, machine)
    return Run((graph.program,), predicted, graph.measured, graph.kind, label, before)
