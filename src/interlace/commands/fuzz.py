"""`interlace fuzz`: whether the verifier and an exhaustive oracle agree on random schedules.

$ interlace fuzz --programs 100000 --jobs 2
seed 1186354102: 100,000 sets of Programs, 2,618,033 ops, in 131.8 s (758 sets/s in 2 processes)
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.commands.options import Json
from interlace.commands.output import UNSOUND, command, print_json, say

if TYPE_CHECKING:
    from interlace.verify.fuzz import Tally


@command
def fuzz(
    programs: Annotated[int, typer.Option(min=1, help="Random sets of Programs.")] = 10_000,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of them all. Default: a fresh one, printed.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    seconds: Annotated[
        float | None, typer.Option(help="Time after which no more are begun. Default: no limit.")
    ] = None,
    json: Json = False,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for a file of each disagreement, made small.")
    ] = None,
) -> None:
    """Hold the verifier against an oracle that tries every order, on random schedules.

    Sets of 2 or 3 ranks with up to three streams and three teams, checked over one to three runs.
    They hold every op (`call`, `copy`, `alloc`, `free`, `record`, `wait`, `host_sync`, all kinds of
    collective, `send`, `recv`, `group`, `put`, `get`, `notify`, `expect`, `fused`), events recorded
    again, slots taken several times in a run, chunks and buffers by per-rank tables, and registered
    parameters. They do not hold compiled regions, kernels of a `fused` op, named sizes or FP8.

    Ends with code 0 if both agree on all, and with 1 if the verifier misses a fault, reports one
    that the oracle does not find, or fails. The same seed gives the same sets in any number of
    processes.
    """
    from interlace.verify import fuzz as campaign

    drawn = secrets.randbits(32) if seed is None else seed
    plan = campaign.Plan(programs, drawn, jobs, seconds)
    with _progress(plan.programs, drawn) as hear:
        tally = campaign.run(plan, hear)
    paths = campaign.keep(tally, keep) if keep is not None else []
    if json:
        print_json({**tally.to_json(), "files": list(map(str, paths))})
    else:
        say(str(tally))
        for found in tally.found:
            say(f"\n{found.text}")
        for path in paths:
            say(f"kept {path}")
    if tally.misses or tally.false_alarms:
        raise typer.Exit(UNSOUND)


@contextlib.contextmanager
def _progress(programs: int, seed: int) -> Iterator[Callable[[Tally], None]]:
    """A bar where stderr is a terminal, else the seed: a run that is interrupted has told it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        typer.echo(f"seed {seed}", err=True)
        yield lambda tally: None
        return
    columns = (TextColumn(f"seed {seed}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    said = TextColumn("{task.fields[said]}")
    with Progress(*columns, said, console=terminal) as bar:
        task = bar.add_task("", total=programs, said="")

        def hear(tally: Tally) -> None:
            counts = f"{tally.misses} misses, {tally.false_alarms} false alarms"
            bar.update(task, completed=tally.programs, said=f"{tally.rate:,.0f}/s, {counts}")

        yield hear
