"""`interlace demo`: a small tensor-parallel model trains through a verified, overlapped schedule.

$ interlace demo --world 4 --steps 50 --out demo
$ torchrun --nproc-per-node 4 -m interlace demo

Where there are two GPUs or more the ranks have one each, and the model is larger.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interlace.commands.files import count_gpus, make_folder, read_machine
from interlace.commands.options import Calibration, Device, Json, Strategy, Timeout
from interlace.commands.output import command, print_json, say, table
from interlace.errors import BackendError

if TYPE_CHECKING:
    from interlace.demo.plan import TrainingPlan
    from interlace.launch import Tell

NOISE = 0.03
"""Medians of steps that are closer than this part of them are the same."""


@command
def demo(
    world: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks: processes on this machine. 2, or one for each GPU up to 4."
        ),
    ] = None,
    device: Device = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for schedules and a page.")] = Path(
        "interlace-demo"
    ),
    strategy: Strategy = "auto",
    calibration: Calibration = None,
    timeout: Timeout = 300,
    json: Json = False,
) -> None:
    """Train a small tensor-parallel model three ways, and show what was overlapped.

    The model learns the source of Python's standard library, byte by byte: as eager DTensor, as the
    serial program, and overlapped; on GPUs and beyond two ranks also as the overlapped ops one by
    one, which must have the same bits. At the end it says whether overlap paid on this machine.
    """
    if calibration is not None:
        read_machine(calibration)
    started = "WORLD_SIZE" in os.environ  # by torchrun: this process is one of the ranks already
    device, world = _place(device, int(os.environ["LOCAL_WORLD_SIZE"]) if started else world)
    if not started or os.environ["RANK"] == "0":
        make_folder(out)
    plan = _plan(
        device,
        layers,
        steps=steps,
        strategy=strategy,
        calibration=str(calibration.resolve()) if calibration else None,
    )
    plan.model.check(int(os.environ["WORLD_SIZE"]) if started else world)
    work = functools.partial(train, out, timeout)
    if started:
        report = work(plan, lambda event: None)
    else:
        from interlace.launch import launch

        report = launch(work, plan, world, _progress(plan, world, json), timeout, "the demo")
    if report is not None and json:
        print_json(report)
    elif report is not None:
        show(report)


def _place(device: Device, ranks: int | None) -> tuple[Literal["cpu", "cuda"], int]:
    """The device, and how many ranks there are on this machine, where that is left open."""
    gpus = count_gpus() if device != "cpu" else 0
    if device == "auto":
        device = "cuda" if gpus >= max(2, ranks or 0) else "cpu"
    if device == "cpu":
        return device, 2 if ranks is None else ranks
    if gpus < (ranks or 1):
        raise BackendError(
            f"--device cuda: torch sees {gpus} GPUs here, and each of {ranks or 'the'} ranks needs "
            "one; take --device cpu (`interlace doctor` says what is missing)"
        )
    return device, next(n for n in (4, 2, 1) if n <= gpus) if ranks is None else ranks


def _plan(device: str, layers: int, **options: Any) -> TrainingPlan:
    """The plan for a device: small and exact on the CPU, large and in bf16 on GPUs."""
    from dataclasses import replace

    from interlace.demo.plan import LARGE, ModelConfig, TrainingPlan

    if device == "cpu":
        return TrainingPlan(model=ModelConfig(layers=layers), **options)
    # AdamW's first steps move every weight by the rate: in so wide a model, 3e-4 is too far.
    options |= {"device": device, "learning_rate": 3e-5}
    return TrainingPlan(model=replace(LARGE, layers=layers), **options)


def train(out: Path, timeout_s: float, plan: TrainingPlan, tell: Tell) -> dict[str, Any] | None:
    """Works as one of the ranks."""
    from datetime import timedelta

    from interlace.demo.train import work
    from interlace.launch import joined

    limit = timedelta(seconds=plan.timeout_s)
    with joined(plan.device, limit, timeout_s, exact=True) as device:
        return work(plan, out, tell, device)


def _progress(plan: TrainingPlan, world: int, quiet: bool) -> Tell:
    """Shows rank 0's first and last step of each way, as lines on stderr."""
    from interlace.demo.plan import WAYS

    say = (lambda text: None) if quiet else functools.partial(typer.echo, err=True)
    say(f"starting {world} ranks")

    def hear(event: dict[str, Any]) -> None:
        step = event.get("step")
        if step in (0, plan.steps - 1):
            title = WAYS[event["way"]]
            say(f"{title}: step {step + 1} of {plan.steps}, loss {event['loss']:.3f}")

    return hear


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    from interlace.demo.plan import WAYS
    from interlace.trace.figures import milliseconds, percent

    plan, model, ways = report["plan"], report["plan"]["model"], report["ways"]
    say(
        f"{plan['steps']} steps of a Llama-style model ({model['layers']} layers, dim "
        f"{model['dim']}, sequence {model['sequence']}, {model['dtype']}) on the source of "
        f"Python's standard library: {report['world']} ranks, {report['device']}, torch "
        f"{report['torch']}\n"
    )
    steps = sorted({*range(0, plan["steps"], -(-plan["steps"] // 20)), plan["steps"] - 1})
    losses = [of["losses"] for of in ways.values()]
    rows = [(str(step + 1), *(f"{loss[step]:.6f}" for loss in losses)) for step in steps]
    table(("step", *map(WAYS.__getitem__, ways)), rows, title="loss")
    say("")
    for way in ways:
        if way != "overlapped":
            say(equality(way, ways[way], ways["overlapped"]))
    say(f"\n{ways['overlapped']['explained']}\n")
    rows = []
    for way, of in ways.items():
        row, comm = (WAYS[way], f"{of['first_step_s']:.1f} s", f"{of['step_ms']:.1f} ms"), "-"
        exposed = hidden = comm
        if (overlap := of["overlap"]) is not None:
            comm, exposed = milliseconds(overlap["comm_s"]), milliseconds(overlap["exposed_s"])
            hidden = percent(overlap["hidden"])
        rows.append((*row, comm, exposed, hidden))
    headings = ("way", "first step", "median step", "communication", "exposed", "hidden")
    table(headings, rows, title="times; of communication those of rank 0 in the last step")
    say("")
    for path in ways["overlapped"]["files"]:
        say(f"wrote {path}")
    say(f"\n{verdict(report)}")


def equality(way: str, results: dict[str, Any], overlapped: dict[str, Any]) -> str:
    """Says whether a way gave the same bits as the overlapped one, and else how far it is."""
    from interlace.demo.plan import WAYS

    if all(results[name] == overlapped[name] for name in ("losses", "parameters")):
        return f"overlapped = {WAYS[way]}, bit for bit: losses and last parameters"
    far = [abs(a - b) for a, b in zip(results["losses"], overlapped["losses"], strict=True)]
    wrong = ", WHICH MUST NOT BE" if way == "in_order" else ": sums are taken in another order"
    return (
        f"overlapped and {WAYS[way]}: losses {max(far):.2g} apart, {far[0]:.2g} in the first{wrong}"
    )


def verdict(report: dict[str, Any]) -> str:
    """Verdict on overlap: if a step got faster, by how much, and what may change that."""
    if report["plan"]["steps"] == 1:
        return "whether overlap pays cannot be told from one step, which compiles: give --steps 2"
    serial, overlapped = (report["ways"][way]["step_ms"] for way in ("serial", "overlapped"))
    speedup = serial / overlapped
    paid = speedup > 1 + NOISE
    what = "paid" if paid else "did not pay" if speedup < 1 - NOISE else "made no difference"
    text = (
        f"overlap {what} on this machine: a whole step takes {overlapped:.1f} ms overlapped and "
        f"{serial:.1f} ms serial ({speedup:.2f}x)"
    )
    if paid:
        return text
    if report["device"] == "cpu":
        text += ". On CPUs copies and compute contend for the same cores; GPUs copy by engines"
    return text + ". After `interlace calibrate`, auto chooses by what this machine takes"
