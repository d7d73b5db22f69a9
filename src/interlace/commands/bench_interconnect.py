"""`interlace bench interconnect`: what the links and collectives of this machine do.

$ interlace bench interconnect                      # every GPU, or two ranks on a CPU
$ interlace bench interconnect --device cpu --most 1MiB --no-plot --calibration mine.json
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.commands.output import command, print_json, say, table
from interlace.errors import OptionError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
CPU_MOST = "16MiB"


@command
def interconnect(
    least: Annotated[str, typer.Option(help="Smallest message.")] = "1KiB",
    most: Annotated[str, typer.Option(help="Largest; default: 1GiB on GPUs, 16MiB on CPUs.")] = "",
    dtype: Annotated[str, typer.Option(help="Element types of matmuls, with commas.")] = "",
    links: Annotated[bool, typer.Option(help="Copies between ranks.")] = True,
    collectives: Annotated[bool, typer.Option(help="Collectives of every backend.")] = True,
    compute: Annotated[bool, typer.Option(help="Matmuls, copies and launches.")] = True,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file to write; default: where auto looks.")
    ] = None,
    calibrate: Annotated[bool, typer.Option(help="Write a calibration file.")] = True,
    out: Annotated[Path, typer.Option(help="Folder of the CSV rows and the plot.")] = Path(
        "benchmarks/results"
    ),
    name: Annotated[str, typer.Option(help="Name of the CSV file.")] = "interconnect",
    plot: Annotated[bool, typer.Option(help="Draw the rows, where matplotlib is there.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    world: Annotated[int | None, typer.Option(help="Ranks; default: a rank for each GPU.")] = None,
    commit: Annotated[str, typer.Option(help="Commit, where git cannot tell.")] = "",
    time_out: Annotated[float, typer.Option(help="Seconds after which all ranks end.")] = 580,
    verbose: Annotated[bool, typer.Option(help="Say on stderr what is under way.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the rows for scripts.")] = False,
) -> None:
    """Measure copies between ranks, collectives and matmuls; calibrate the cost model by them."""
    from interlace.bench.interconnect import Settings
    from interlace.bench.launch import run
    from interlace.bench.ranks import pick_device
    from interlace.bench.rows import append, plain

    device = pick_device(device)
    wanted = "" if not calibrate else None if calibration is None else str(calibration.resolve())
    dtypes = dtype or ("f32" if device == "cpu" else "bf16")
    largest = nbytes(most or (CPU_MOST if device == "cpu" else "1GiB"))
    settings = Settings(
        **{"least": nbytes(least), "most": largest, "links": links, "collectives": collectives},
        **{"device": compute, "calibration": wanted, "commit": commit},
        dtypes=tuple(word.strip() for word in dtypes.split(",")),
    )
    path = out / f"{name}.csv"
    report = run(
        *("interconnect", settings.to_json()),
        **{"device": device, "world": world, "time_out_s": time_out, "verbose": verbose},
        rows=lambda event: append(path, event["rows"]) if event["event"] == "rows" else None,
    )
    if report is None:
        return
    written = [str(path), *([report["calibration"]] if report["calibration"] else [])]
    if plot:
        picture = draw(report["rows"], path.with_suffix(".png"))
        written += [str(picture)] if picture is not None else []
    if json:
        print_json({"schema": 1, **plain(report), "files": written})
        return
    show(report)
    say("")
    for item in written:
        say(f"wrote {item}")


def draw(rows: list[dict[str, Any]], path: Path) -> Path | None:
    """The picture of the rows; None without matplotlib."""
    from interlace.bench.plots import draw_interconnect
    from interlace.errors import BackendError

    try:
        draw_interconnect(rows, path)
    except BackendError as error:
        say(str(error))
        return None
    return path


def nbytes(text: str) -> int:
    """Bytes of text such as 64MiB, 1K or 4096."""
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (word[:-1], word[-1]) if word[-1:] in ("K", "M", "G") else (word, "")
    if not number.isdecimal() or int(number) < 1:
        raise OptionError(f"{text!r} is no size: write it as 4096, 64KiB or 1GiB")
    return int(number) * UNITS[unit]


def size(count: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} B"


def show(report: dict[str, Any]) -> None:
    """A line for each kind, backend and pattern: the latency, rates by size, the best rate."""
    facts = report["facts"]
    say(f"{report['world']} ranks, {facts['gpu']}, torch {facts['torch']}\n")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        key = (row["kind"], row["backend"], row["protocol"], row["pattern"])
        groups.setdefault(key, []).append(row)
    lines: list[tuple[str, ...]] = []
    for key, rows in groups.items():
        good = [row for row in rows if not row["error"]]
        rates = [row for row in good if not math.isnan(row["gbs"])]
        best = max(rates, key=lambda row: row["gbs"], default=None)
        lines.append(
            (
                *key,
                f"{good[0]['us']:.1f} us" if good else "-",
                f"{rates[-1]['us']:.0f} us" if rates else "-",
                f"{best['gbs']:.2f} GB/s at {size(best['nbytes'])}" if best else "-",
                next((row["error"] for row in rows if row["error"]), ""),
            )
        )
    headings = ("kind", "backend", "by", "who", "smallest", "largest", "best", "error")
    table(headings, lines, title="between ranks")
    if report["engine"]:
        say("")
        cells = [
            (e["pattern"], f"{e['gbs']:.1f} GB/s", f"{e['share']:.1%}", e["by"])
            for e in report["engine"]
        ]
        title = "copies of 64 MiB and more by engine (95 % of the best is the bar)"
        table(("who", "best", "of the best of all", "which is"), cells, title=title)
    gemms = [sample for sample in report["device"] if sample["kind"] == "gemm"]
    if gemms:
        say("")
        cells = [
            (
                *("x".join(map(str, g["shape"])), g["dtype"], f"{g['seconds'] * 1e6:.1f} us"),
                f"{2 * math.prod(g['shape']) / g['seconds'] / 1e12:.4g} TFLOP/s",
            )
            for g in gemms
        ]
        table(("matmul", "dtype", "time", "speed"), cells, title="matmuls")
    others = [s for s in report["device"] if s["kind"] != "gemm"]
    if others:
        say("")
        cells = [
            (
                s["kind"],
                s["protocol"],
                size(s["nbytes"]) if s["nbytes"] else "",
                f"{s['seconds'] * 1e6:.2f} us",
            )
            for s in others
        ]
        table(("what", "of", "size", "time"), cells, title="device and host")
    for name, why in report["absent"].items():
        say(f"{name} is absent: {why}")
