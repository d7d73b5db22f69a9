"""`interlace bench kernels`: losses, optimizers, layers and the host, against torch and others.

$ interlace bench kernels --check
$ interlace bench kernels --device cpu --only adam,host --out /tmp/rows
"""

from __future__ import annotations

import faulthandler
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.commands.bench_overlap import RESULTS
from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.errors import OptionError

if TYPE_CHECKING:
    from interlace.bench.kernels.bars import Verdict


@command
def kernels(
    only: Annotated[str, typer.Option(help="Ops, with commas; default: all.")] = "",
    seconds: Annotated[float, typer.Option(help="Time for all of it; the rest is left out.")] = 80,
    small: Annotated[
        bool | None, typer.Option("--small/--large", help="Small sizes; default: on a CPU.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Judge the bars; code 1 where one is missed.")] = (
        False
    ),
    out: Annotated[Path, typer.Option(help="Folder of the CSV rows.")] = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the CSV file.")] = "kernels",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    commit: Annotated[str, typer.Option(help="Commit, where git cannot tell.")] = "",
    time_out: Annotated[float, typer.Option(help="Seconds after which it ends.")] = 580,
    verbose: Annotated[bool, typer.Option(help="Say on stderr what is under way.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the rows for scripts.")] = False,
) -> None:
    """Time losses, optimizers, layers and the host against torch and others; append rows of CSV."""
    import torch

    from interlace.bench.kernels.bars import judge, missed
    from interlace.bench.kernels.work import Settings, work
    from interlace.bench.launch import progress
    from interlace.bench.ranks import pick_device
    from interlace.bench.rows import append, plain

    if seconds <= 0:
        raise OptionError("nothing to measure: give --seconds > 0")
    extra: dict[str, Any] = {"only": tuple(w.strip() for w in only.split(","))} if only else {}
    settings = Settings(seconds=seconds, small=small, commit=commit, **extra)
    path = out / f"{name}.csv"

    def keep(event: dict[str, Any]) -> None:
        if event["event"] == "rows":  # as they come: what was measured stays, whatever comes next
            append(path, event["rows"])

    where = torch.device(pick_device(device))
    faulthandler.dump_traceback_later(time_out, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        with progress("kernels", "lines" if verbose else "bar", keep) as tell:
            report = work(settings, where, tell)
    finally:
        faulthandler.cancel_dump_traceback_later()
    verdicts = judge(report["rows"]) if check else []
    if json:
        judged = [{name: getattr(v, name) for name in v.__slots__} for v in verdicts]
        print_json({"schema": 1, **plain(report), "bars": judged})
    else:
        show(report, verdicts)
        say(f"\nwrote {path}")
    if missed(verdicts):
        raise typer.Exit(UNSOUND)


def show(report: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    """The rows for people, then what was not timed, then the bars."""
    facts = report["facts"]
    say(f"{facts['gpu']}, torch {facts['torch']}, Triton {facts['triton'] or 'absent'}\n")
    cells = [
        (
            *(f"{row['op']} {row['shape']} {row['dtype']} {row['does']}", row["way"]),
            *(_figure(row["median_us"], 1), _figure(row["p90_us"], 1), _figure(row["host_us"], 1)),
            *(_figure(row["gbs"], 0), _figure(row["share"], 3), _figure(row["tflops"], 0)),
            *(_figure(row["speedup_torch"], 2), _gib(row["peak_bytes"])),
            *(_gib(row["state_bytes"]), _figure(row["deviation"], 2), _figure(row["sm_mhz"], 0)),
        )
        for row in report["rows"]
        if not row["error"]
    ]
    headings = ("case", "way", "median us", "p90 us", "host us", "GB/s", "of copy", "TFLOP/s")
    rest = ("x torch", "peak GiB", "state GiB", "off", "MHz")
    table((*headings, *rest), cells)
    failed = [row for row in report["rows"] if row["error"]]
    if failed:
        say("\nnot timed:")
    for row in failed:
        say(f"  {row['op']} {row['shape']} {row['dtype']} {row['way']}: {row['error']}")
    if report["skipped"]:
        say(f"\nno time left for: {'; '.join(report['skipped'])}")
    if verdicts:
        say("")
        rows = [
            (v.bar, v.limit, v.case, v.way, f"{v.figure:.3f}", "pass" if v.passed else "MISSED")
            for v in verdicts
        ]
        table(("bar", "limit", "case", "way", "figure", ""), rows, title="bars")


def _figure(value: float, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _gib(value: float) -> str:
    return "-" if value is None or math.isnan(value) else f"{value / 2**30:.2f}"
