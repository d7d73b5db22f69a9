"""`interlace demo`: a small tensor-parallel model trains through a verified, overlapped schedule.

$ interlace demo --world 4 --steps 50 --out /tmp/demo
$ torchrun --nproc-per-node 2 -m interlace demo
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.commands.files import read_machine
from interlace.commands.output import command, print_json, say, table
from interlace.errors import OptionError, TeamError

if TYPE_CHECKING:
    from interlace.demo.lesson import Lesson


@command
def demo(
    world: Annotated[int, typer.Option(help="Ranks: processes on this machine.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 20,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for schedules, trace and page.")] = Path(
        "interlace-demo"
    ),
    strategy: Annotated[str, typer.Option(help="How sites are overlapped.")] = "auto",
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file; without it, the built-in model.")
    ] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Train a fourth way: the same ops one by one.")
    ] = False,
    time_out: Annotated[float, typer.Option(help="Seconds after which it gives up.")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report for scripts.")] = False,
) -> None:
    """Train a small tensor-parallel model three ways, and show what was overlapped.

    The model learns the source of Python's standard library, byte by byte: as eager DTensor, as the
    serial program, and overlapped. Losses are shown side by side.
    """
    from interlace.demo.lesson import Config, Lesson
    from interlace.options import Options

    if steps < 1:
        raise OptionError(f"--steps {steps}: give at least one step")
    if layers < 1:
        raise OptionError(f"--layers {layers}: give at least one block")
    if world < 1:
        raise TeamError(f"--world {world}: give at least one rank")
    Options(strategy=strategy)  # raises for a strategy that there is not
    if calibration is not None:
        read_machine(calibration)
    place = str(calibration.resolve()) if calibration is not None else None
    model = Config(layers=layers)
    lesson = Lesson(
        steps=steps, strategy=strategy, calibration=place, in_order=in_order, model=model
    )
    if "WORLD_SIZE" in os.environ:
        report = _rank_of_torchrun(lesson, out)
    else:
        from interlace.demo.launch import launch

        lesson.model.check(world)
        settings = {"lesson": lesson.to_json(), "out": str(out)}
        with _progress(lesson, quiet=json) as hear:
            report = launch(settings, world, hear, time_out)
    if report is None:
        return
    if json:
        print_json(report)
    else:
        show(report)


def _rank_of_torchrun(lesson: Lesson, out: Path) -> dict[str, Any] | None:
    """This process is one of the ranks already."""
    import torch.distributed as dist

    from interlace.demo.worker import work

    dist.init_process_group("gloo")
    try:
        return work(lesson, out, lambda event: None)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _progress(lesson: Lesson, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows rank 0's steps as a bar on a terminal, and nothing elsewhere."""
    from rich.console import Console

    terminal = Console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield lambda event: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from interlace.demo.lesson import WAYS

    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn())
    loss = TextColumn("{task.fields[loss]}")
    with Progress(*columns, loss, TimeElapsedColumn(), console=terminal) as bar:
        tasks = {
            way: bar.add_task(WAYS[way], total=lesson.steps, start=False, loss="")
            for way in lesson.ways
        }

        def hear(event: dict[str, Any]) -> None:
            if event["event"] == "way":
                bar.start_task(tasks[event["way"]])
                bar.update(tasks[event["way"]], loss=event["doing"])
            elif event["event"] == "step":
                bar.update(tasks[event["way"]], advance=1, loss=f"loss {event['loss']:.3f}")

        yield hear


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    from interlace.commands.explain import HEADINGS
    from interlace.demo.lesson import WAYS

    lesson, model = report["lesson"], report["lesson"]["model"]
    say(
        f"{lesson['steps']} steps of a Llama-style model ({model['layers']} layers, dim "
        f"{model['dim']}, sequence {model['sequence']}, batch {model['batch']}) on the source of "
        f"Python's standard library: {report['world']} ranks, torch {report['torch']}\n"
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
    table(
        headings,
        rows,
        title="measured in the median step, all ranks (waiting for a peer is communication)",
    )
    say("")
    for path in report["files"]:
        say(f"wrote {path}")


def _some(steps: int) -> list[int]:
    """The steps that the table shows: all of few, else about twenty, with the last."""
    stride = -(-steps // 20)
    return sorted({*range(0, steps, stride), steps - 1})


def _equality(report: dict[str, Any]) -> None:
    """Says, of each way, whether it gave the same bits as the overlapped one."""
    from interlace.demo.lesson import WAYS

    steps = report["lesson"]["steps"]
    for way, equal in report["equal"].items():
        same = [name for name in ("losses", "gradients", "parameters") if equal[name]]
        if len(same) == 3:
            what = f"{steps} losses, first gradients, last parameters"
            say(f"overlapped = {WAYS[way]}, bit for bit: {what}")
        else:
            difference = equal["largest_loss_difference"]
            what = f"; bit for bit equal: {', '.join(same)}" if same else ""
            say(f"overlapped and {WAYS[way]}: at most {difference:.2g} apart in a loss{what}")
    if report["world"] > 2:
        say("(beyond two ranks, sums over ranks are taken in another order than gloo's)")


def _sites(graph: dict[str, Any]) -> list[tuple[str, ...]]:
    from interlace.commands.explain import site_rows
    from interlace.ir import Site

    return site_rows([Site(**site) for site in graph["sites"]])


def _overlap(figures: dict[str, float] | None) -> tuple[str, ...]:
    from interlace.trace.figures import milliseconds

    if figures is None:
        return ("-", "-", "-")
    return (
        milliseconds(figures["comm_s"]),
        f"{figures['hidden']:.0%}",
        milliseconds(figures["exposed_s"]),
    )
