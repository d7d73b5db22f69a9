"""`interlace bench layer`: a prefill and a decode step of one transformer layer.

$ torchrun --nproc-per-node 4 -m interlace bench layer
$ interlace bench layer --device cpu --dim 64 --hidden 128 --heads 4 --only eager,interlace
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.commands.output import command, print_json, say, table


@command
def layer(
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 4096,
    hidden: Annotated[int, typer.Option(help="Width of the feed-forward.")] = 14336,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 32,
    prefill: Annotated[int, typer.Option(help="Rows of the prefill step.")] = 2048,
    decode: Annotated[int, typer.Option(help="Sequences of the decode step.")] = 16,
    cached: Annotated[int, typer.Option(help="Tokens in each sequence's cache.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bf16",
    only: Annotated[str, typer.Option(help="Ways, with commas; default: all.")] = "",
    strategy: Annotated[str, typer.Option(help="Interlace's strategy.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Time for timing, compiling apart.")] = 60,
    out: Annotated[Path, typer.Option(help="Folder of the CSV rows.")] = Path("benchmarks/results"),
    name: Annotated[str, typer.Option(help="Name of the CSV file.")] = "layer",
    calibration: Annotated[Path | None, typer.Option(help="Calibration file.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    world: Annotated[int | None, typer.Option(help="Ranks; default: a rank for each GPU.")] = None,
    commit: Annotated[str, typer.Option(help="Commit, where git cannot tell.")] = "",
    time_out: Annotated[float, typer.Option(help="Seconds after which all ranks end.")] = 580,
    verbose: Annotated[bool, typer.Option(help="Say on stderr what is under way.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the rows for scripts.")] = False,
) -> None:
    """Time a layer compiled by Interlace against torch.compile with NCCL, without gradients."""
    from interlace.bench.launch import run
    from interlace.bench.layer import WAYS, Settings
    from interlace.bench.rows import append, plain

    settings = Settings(
        **{"dim": dim, "hidden": hidden, "heads": heads, "prefill": prefill, "decode": decode},
        **{"cached": cached, "dtype": dtype, "strategy": strategy, "seconds": seconds},
        only=tuple(word.strip() for word in only.split(",")) if only else WAYS,
        calibration=str(calibration.resolve()) if calibration is not None else None,
        commit=commit,
    )
    path = out / f"{name}.csv"
    report = run(
        *("layer", settings.to_json()),
        **{"device": device, "world": world, "time_out_s": time_out, "verbose": verbose},
        rows=lambda event: append(path, event["rows"]) if event["event"] == "rows" else None,
    )
    if report is None:
        return
    if json:
        print_json({"schema": 1, **plain(report)})
        return
    show(report)
    say(f"\nwrote {path}")


def show(report: dict[str, Any]) -> None:
    """The rows for people."""
    facts = report["facts"]
    say(f"{facts['gpu']}, torch {facts['torch']}\n")

    def figure(value: float, digits: int) -> str:
        return "-" if math.isnan(value) else f"{value:.{digits}f}"

    cells = [
        (
            *(row["step"], row["way"], str(row["rows"]), figure(row["median_us"], 1)),
            *(figure(row["p90_us"], 1), figure(row["host_us"], 1), figure(row["device_us"], 1)),
            *(figure(row["speedup"], 2), figure(row["sm_mhz"], 0), row["error"]),
        )
        for row in report["rows"]
    ]
    headings = ("step", "way", "rows", "median us", "p90 us", "host us", "device us", "x inductor")
    table((*headings, "MHz", "error"), cells, title="one layer")
