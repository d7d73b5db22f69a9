"""`interlace demo`: a small tensor-parallel model trains through a verified, overlapped schedule.

$ interlace demo --world 4 --steps 50 --out demo
$ torchrun --nproc-per-node 4 -m interlace demo

Where there are two GPUs or more the ranks have one each, and the model is larger.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interlace.commands.files import count_gpus, make_folder, read_machine
from interlace.commands.options import Calibration, Device, Json, Strategy, TimeOut
from interlace.commands.output import command, print_json, say, table
from interlace.errors import BackendError, OptionError, TeamError

if TYPE_CHECKING:
    from interlace.demo.plan import TrainingPlan
    from interlace.launch import Tell


@command
def demo(
    world: Annotated[
        int | None,
        typer.Option(help="Ranks: processes on this machine. 2, or one for each GPU up to 4."),
    ] = None,
    device: Device = "auto",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 20,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for schedules, trace and page.")] = Path(
        "interlace-demo"
    ),
    strategy: Strategy = "auto",
    calibration: Calibration = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Train a fourth way: the same ops one by one.")
    ] = False,
    time_out: TimeOut = 300,
    json: Json = False,
) -> None:
    """Train a small tensor-parallel model three ways, and show what was overlapped.

    The model learns the source of Python's standard library, byte by byte: as eager DTensor, as the
    serial program, and overlapped; on GPUs a fourth way, the overlapped ops one by one. Losses are
    shown side by side, and at the end whether overlap paid on this machine.
    """
    from interlace.demo.plan import TrainingPlan

    if steps < 1:
        raise OptionError(f"--steps {steps}: give at least one step")
    if layers < 1:
        raise OptionError(f"--layers {layers}: give at least one block")
    if world is not None and world < 1:
        raise TeamError(f"--world {world}: give at least one rank")
    if calibration is not None:
        read_machine(calibration)
    place = str(calibration.resolve()) if calibration is not None else None
    given = {"steps": steps, "strategy": strategy, "calibration": place}
    started = "WORLD_SIZE" in os.environ  # by torchrun: this process is one of the ranks already
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else world
    device, world = _place(device, ranks)
    if os.environ.get("RANK", "0") == "0" or not started:
        make_folder(out)
    plan = TrainingPlan.on(device, layers=layers, in_order=in_order, **given)
    plan.model.check(int(os.environ["WORLD_SIZE"]) if started else world)
    work = functools.partial(train, out, time_out)
    if started:
        report = work(plan, lambda event: None)
    else:
        from interlace.launch import launch

        with _progress(plan, world, quiet=json) as hear:
            report = launch(work, plan, world, hear, time_out, "the demo")
    if report is None:
        return
    if json:
        print_json(report)
    else:
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


def train(out: Path, time_out_s: float, plan: TrainingPlan, tell: Tell) -> dict[str, Any] | None:
    """Works as one of the ranks."""
    from datetime import timedelta

    from interlace.demo.train import work
    from interlace.launch import joined

    limit = timedelta(seconds=plan.time_out_s)
    with joined(plan.device, limit, time_out_s, exact=True) as device:
        return work(plan, out, tell, device)


@contextlib.contextmanager
def _progress(plan: TrainingPlan, world: int, quiet: bool) -> Iterator[Tell]:
    """Shows rank 0's steps on stderr: as bars on a terminal, as lines elsewhere."""
    from rich.console import Console

    from interlace.demo.plan import WAYS

    starting = f"starting {world} ranks"
    terminal = Console(stderr=True)
    if quiet or not terminal.is_terminal:
        tell = (lambda text: None) if quiet else functools.partial(typer.echo, err=True)
        tell(starting)

        def line(event: dict[str, Any]) -> None:
            if event["event"] == "way":
                tell(f"{WAYS[event['way']]}: {event['doing']}")
            elif event["event"] == "step" and event["step"] in (0, plan.steps - 1):
                step = f"step {event['step'] + 1} of {plan.steps}"
                tell(f"{WAYS[event['way']]}: {step}, loss {event['loss']:.3f}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn())
    loss = TextColumn("{task.fields[loss]}")
    with Progress(*columns, loss, TimeElapsedColumn(), console=terminal) as bar:
        first = bar.add_task(starting, total=None, loss="")
        tasks = {
            way: bar.add_task(WAYS[way], total=plan.steps, start=False, loss="")
            for way in plan.ways
        }

        def hear(event: dict[str, Any]) -> None:
            if event["event"] == "way":
                bar.update(first, visible=False)
                bar.start_task(tasks[event["way"]])
                bar.update(tasks[event["way"]], loss=event["doing"])
            elif event["event"] == "step":
                bar.update(tasks[event["way"]], advance=1, loss=f"loss {event['loss']:.3f}")

        yield hear


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    from interlace.commands.explain import HEADINGS
    from interlace.demo.plan import WAYS

    lesson, model = report["lesson"], report["lesson"]["model"]
    where = "" if report["device"] == "cpu" else f" on {report['device']}"
    say(
        f"{lesson['steps']} steps of a Llama-style model ({model['layers']} layers, dim "
        f"{model['dim']}, sequence {model['sequence']}, batch {model['batch']}, {model['dtype']}) "
        f"on the source of Python's standard library: {report['world']} ranks{where}, torch "
        f"{report['torch']}\n"
    )
    losses, ways = report["losses"], {way: WAYS[way] for way in report["losses"]}
    rows = [
        (str(step + 1), *(f"{losses[way][step]:.6f}" for way in ways))
        for step in _some(lesson["steps"])
    ]
    table(("step", *ways.values()), rows, title="loss")
    say("")
    _equality(report)
    for graph in report["graphs"]:
        say("")
        table(HEADINGS, _sites(graph), title=f"sites, {graph['kind']}")
        for remark in graph["remarks"]:
            say(f"{remark['pass']}: {remark['text']}")
    say("")
    for graph in report["graphs"]:
        ops = f"{graph['verified_ops']} ops of {report['world']} ranks"
        time = f"{graph['verified_ms']:.0f} ms"
        say(f"verifier: {graph['kind']} is {graph['verdict']} ({ops}, {time})")
    say("")
    rows = [
        (
            title,
            f"{report['first_step_s'][way]:.1f} s",
            f"{report['step_ms'][way]:.1f} ms",
            *_overlap(report["overlap"].get(way)),
        )
        for way, title in ways.items()
    ]
    headings = ("way", "first step", "median step", "communication", "hidden", "exposed")
    notes = ["waiting for a peer is communication"]
    if lesson["device"] == "cuda":
        notes.append("events around every op of a Program, for the timeline, take their time too")
    title = f"measured in the median step, all ranks ({'; '.join(notes)})"
    table(headings, rows, title=title)
    say("")
    for path in report["files"]:
        say(f"wrote {path}")
    say("")
    for line in report["verdict"]["text"]:
        say(line)


def _some(steps: int) -> list[int]:
    """The steps that the table shows: all of few, else about twenty, with the last."""
    stride = -(-steps // 20)
    return sorted({*range(0, steps, stride), steps - 1})


def _equality(report: dict[str, Any]) -> None:
    """Says, of each way, whether it gave the same bits as the overlapped one."""
    from interlace.demo.plan import WAYS

    steps = report["lesson"]["steps"]
    for way, equal in report["equal"].items():
        same = [name for name in ("losses", "gradients", "parameters") if equal[name]]
        if len(same) == 3:
            what = f"{steps} losses, first gradients, last parameters"
            say(f"overlapped = {WAYS[way]}, bit for bit: {what}")
        else:
            apart = (
                f"{equal['largest_loss_difference']:.2g} apart in a loss, "
                f"{equal['first_loss_difference']:.2g} in the first; the norms of the first "
                f"gradients differ by {abs(equal['gradient_norm_ratio'] - 1):.2g} of one"
            )
            what = f"; bit for bit equal: {', '.join(same)}" if same else ""
            wrong = ", WHICH MUST NOT BE" if way == "in_order" else ""
            say(f"overlapped and {WAYS[way]}: at most {apart}{what}{wrong}")
    if report["lesson"]["device"] == "cuda":
        say("(in order are the same ops one after another: equal bit for bit. The others sum over")
        say("ranks and within kernels in another order, and bf16 keeps 8 bits of each number)")
    elif report["world"] > 2:
        say("(beyond two ranks, sums over ranks are taken in another order than gloo's)")


def _sites(graph: dict[str, Any]) -> list[tuple[str, ...]]:
    from interlace.commands.explain import site_rows
    from interlace.ir import Site

    return site_rows([Site(**site) for site in graph["sites"]])


def _overlap(figures: dict[str, float] | None) -> tuple[str, ...]:
    from interlace.trace.figures import milliseconds, percent

    if figures is None:
        return ("-", "-", "-")
    return (
        milliseconds(figures["comm_s"]),
        percent(figures["hidden"]),
        milliseconds(figures["exposed_s"]),
    )
