"""`interlace bench overlap`: how close overlapped sites come to the machine's limit.

$ torchrun --nproc-per-node 4 -m interlace bench overlap --preset bars --check
$ interlace bench overlap --device cpu --preset tiny --dtype f32 --out /tmp/rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.errors import OptionError

if TYPE_CHECKING:
    from interlace.bench.bars import Verdict

RESULTS = Path("benchmarks/results")
"""Where rows go that are meant to be committed."""


@command
def overlap(
    preset: Annotated[
        str, typer.Option(help="Shapes: bars, others, tiny, or several with commas.")
    ] = "bars",
    shapes: Annotated[
        str, typer.Option(help="Shapes instead: 'ag_gemm:M,K,N gemm_rs:M,K,N gemm_ar:M,K,N'.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Element types, with commas.")] = "bf16",
    only: Annotated[str, typer.Option(help="Candidates, with commas; default: all.")] = "",
    graphs: Annotated[bool, typer.Option(help="CUDA graphs of ours as well.")] = True,
    seconds: Annotated[float, typer.Option(help="Time for all of it; the rest is left out.")] = 90,
    host_runs: Annotated[int, typer.Option(help="Calls by which host time is measured.")] = 1000,
    check: Annotated[bool, typer.Option(help="Judge the bars; code 1 where auto misses one.")] = (
        False
    ),
    out: Annotated[Path, typer.Option(help="Folder of the CSV rows.")] = RESULTS,
    name: Annotated[str, typer.Option(help="Name of the CSV file.")] = "overlap",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    world: Annotated[int | None, typer.Option(help="Ranks; default: a rank for each GPU.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file that auto asks.")
    ] = None,
    commit: Annotated[str, typer.Option(help="Commit, where git cannot tell.")] = "",
    time_out: Annotated[float, typer.Option(help="Seconds after which all ranks end.")] = 580,
    verbose: Annotated[bool, typer.Option(help="Say on stderr what is under way.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the rows for scripts.")] = False,
) -> None:
    """Time AG+GEMM, GEMM+RS and GEMM+AR by every strategy and rival, and append rows of CSV."""
    from interlace.bench.bars import judge
    from interlace.bench.launch import run
    from interlace.bench.overlap import Settings
    from interlace.bench.rows import append, plain
    from interlace.bench.sites import parse_shapes
    from interlace.bench.sites import preset as shapes_of

    dtypes = _words(dtype)
    cases = (
        parse_shapes(shapes, dtypes)
        if shapes
        else [case for word in _words(preset) for case in shapes_of(word, dtypes)]
    )
    if not cases or seconds <= 0:
        raise OptionError("nothing to measure: give shapes or a preset, and --seconds > 0")
    extra: dict[str, Any] = {"only": tuple(_words(only))} if only else {}
    settings = Settings(
        cases=tuple((c.op, c.m, c.k, c.n, c.dtype) for c in cases),
        **{"graphs": graphs, "seconds": seconds, "host_runs": host_runs, "commit": commit},
        calibration=str(calibration.resolve()) if calibration is not None else None,
        **extra,
    )
    path = out / f"{name}.csv"

    def keep(event: dict[str, Any]) -> None:
        if event["event"] == "rows":  # as they come: what was measured stays, whatever comes next
            append(path, event["rows"])

    report = run(
        *("overlap", settings.to_json()),
        **{"device": device, "world": world, "time_out_s": time_out, "verbose": verbose},
        rows=keep,
    )
    if report is None:
        return
    verdicts = judge(report["rows"]) if check else []
    if json:
        judged = [{name: getattr(v, name) for name in v.__slots__} for v in verdicts]
        print_json({"schema": 1, **plain(report), "bars": judged})
    else:
        show(report, verdicts)
        say(f"\nwrote {path}")
    if missed(verdicts):
        raise typer.Exit(UNSOUND)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def show(report: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    """The rows for people: a table for each shape, then what failed, then the bars."""
    roof, facts = report["roof"], report["facts"]
    say(
        f"{facts['gpu']}, torch {facts['torch']}, roof of a copy {roof['bandwidth'] / 1e9:.1f} GB/s"
        f" ({roof['how']})\n"
    )
    rows = report["rows"]
    cells = [
        (
            *(f"{row['op']} {row['m']},{row['k']},{row['n']} {row['dtype']}", row["strategy"]),
            *(row["mode"], row["chosen"], _figure(row["median_us"], 1), _figure(row["p90_us"], 1)),
            *(_figure(row["host_us"], 1), _figure(row["speedup_eager"], 2)),
            *(_figure(row["speedup_graph"], 2), _figure(row["r"], 3), _figure(row["sm_mhz"], 0)),
        )
        for row in rows
        if not row["error"]
    ]
    headings = ("site", "strategy", "mode", "chosen", "median us", "p90 us", "host us")
    table((*headings, "x eager", "x graph", "R", "MHz"), cells)
    failed = [row for row in rows if row["error"]]
    if failed:
        say("\nnot timed:")
    for row in failed:
        say(
            f"  {row['op']} {row['m']},{row['k']},{row['n']} {row['strategy']} {row['mode']}: "
            f"{row['error']}"
        )
    if report["skipped"]:
        say(f"\nno time left for: {'; '.join(report['skipped'])}")
    if verdicts:
        say("")
        bars(verdicts)


def bars(verdicts: Sequence[Verdict]) -> None:
    """The bars as a table."""
    rows = [
        (
            *(v.bar, v.limit, v.who, v.mode, f"{v.figure:.3f}", "pass" if v.passed else "MISSED"),
            *(str(v.count), v.worst),
        )
        for v in verdicts
    ]
    table(("bar", "limit", "who", "mode", "figure", "", "shapes", "furthest"), rows, title="bars")


def missed(verdicts: Sequence[Verdict]) -> list[str]:
    """The bars that `auto` misses in every mode."""
    passed: dict[str, bool] = {}
    for verdict in verdicts:
        if verdict.who == "auto":
            passed[verdict.bar] = passed.get(verdict.bar, False) or verdict.passed
    return [bar for bar, good in passed.items() if not good]


def _figure(value: float, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
