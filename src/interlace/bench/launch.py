"""Running a benchmark on all ranks: those that torchrun started, or processes of our own.

    report = run("overlap", settings.to_json(), device="auto", world=None, time_out_s=600)

Alone, it starts a rank for each GPU (two on a CPU) and ends them all, whatever happens. Under
torchrun this process is a rank already. The report is rank 0's; other ranks get None.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from interlace.errors import TeamError
from interlace.launch import Report, Settings, Tell, launch


def run(
    bench: str,
    given: dict[str, Any],
    *,
    device: str,
    world: int | None,
    time_out_s: float,
    verbose: bool = False,
    rows: Tell = lambda event: None,
) -> Report | None:
    """Rank 0's report; None on other ranks of torchrun. `rows` hears of rows as they come."""
    from interlace.bench.ranks import default_world, pick_device

    device = pick_device(device)
    settings = {"bench": bench, "given": given, "device": device, "time_out_s": time_out_s}
    if "WORLD_SIZE" in os.environ:
        how = "bar" if os.environ.get("RANK", "0") == "0" else "none"
        if verbose and how == "bar":
            how = "lines"
        with progress(bench, how, rows) as hear:
            return measure(settings, hear)
    size = world or default_world(device)
    if size < 2:
        raise TeamError(f"{size} rank: a benchmark needs two at least; --device cpu runs anywhere")
    with progress(bench, "lines" if verbose else "bar", rows) as hear:
        return launch(measure, settings, size, hear, time_out_s, f"bench {bench}")


def measure(settings: Settings, tell: Tell) -> Report | None:
    """Runs one of the benchmarks as one rank."""
    from interlace.bench.ranks import join, register_in_graphs

    bench, given = settings["bench"], settings["given"]
    if bench in ("overlap", "layer"):  # and not where `auto` learns what users' runs take
        register_in_graphs()
    with join(settings["device"], settings["time_out_s"]) as ranks:
        match bench:
            case "overlap":
                from interlace.bench import overlap

                return overlap.work(overlap.Settings.from_json(given), ranks, tell)
            case "interconnect":
                from interlace.bench import interconnect

                return interconnect.work(interconnect.Settings.from_json(given), ranks, tell)
            case "calibrate":
                from interlace.bench import calibrate

                return calibrate.work(given, ranks, tell)
            case "host":
                from interlace.bench.kernels import host

                return {"rows": host.team_work(given["commit"], ranks)}
            case _:
                from interlace.bench import layer

                return layer.work(layer.Settings.from_json(given), ranks, tell)


@contextlib.contextmanager
def progress(bench: str, how: str, rows: Tell) -> Iterator[Tell]:
    """Shows what rank 0 tells: as a `bar` where stderr is a terminal, as `lines`, or not at all."""
    from rich.console import Console

    terminal = Console(stderr=True)
    if how == "lines":
        begun = time.monotonic()

        def say(event: dict[str, Any]) -> None:
            if "doing" in event:
                since = time.monotonic() - begun
                print(f"[{since:6.1f} s] {event['doing']}", file=sys.stderr, flush=True)
            rows(event)

        yield say
        return
    if how == "none" or not terminal.is_terminal:
        yield rows if how == "bar" else lambda event: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(bench), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=terminal) as bar:
        task = bar.add_task("starting", total=None)

        def show(event: dict[str, Any]) -> None:
            if "total" in event:
                bar.update(task, total=event["total"], completed=0)
            if "doing" in event:
                advance = 1 if event["event"] == "step" else 0
                bar.update(task, advance=advance, description=event["doing"])
            rows(event)

        yield show
