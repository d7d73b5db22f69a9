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
from collections.abc import Callable, Iterator
from typing import Any

from interlace.errors import TeamError

Hear = Callable[[dict[str, Any]], None]


def run(
    bench: str,
    given: dict[str, Any],
    *,
    device: str,
    world: int | None,
    time_out_s: float,
    verbose: bool = False,
    rows: Hear = lambda event: None,
) -> dict[str, Any] | None:
    """Rank 0's report; None on other ranks of torchrun. `rows` hears of rows as they come."""
    from interlace.bench.rank import measure
    from interlace.bench.ranks import default_world, join, pick_device
    from interlace.demo.launch import launch

    device = pick_device(device)
    if "WORLD_SIZE" in os.environ:
        how = "bar" if os.environ.get("RANK", "0") == "0" else "none"
        if verbose and how == "bar":
            how = "lines"
        with join(device, time_out_s) as ranks, progress(bench, how, rows) as hear:
            return measure(bench, given, ranks, hear)
    size = world or default_world(device)
    if size < 2:
        raise TeamError(f"{size} rank: a benchmark needs two at least; --device cpu runs anywhere")
    settings = {"bench": bench, "given": given, "device": device, "time_out_s": time_out_s}
    with progress(bench, "lines" if verbose else "bar", rows) as hear:
        arguments = ("-m", "interlace.bench.rank")
        return launch(settings, size, hear, time_out_s, arguments, f"bench {bench}")


@contextlib.contextmanager
def progress(bench: str, how: str, rows: Hear) -> Iterator[Hear]:
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
