"""`interlace bench`: links, overlapped sites, whole layers and kernels, measured here and now.

$ interlace bench overlap --preset bars --check                  # starts a rank for each GPU
$ torchrun --nproc-per-node 4 -m interlace bench overlap         # takes torchrun's
$ interlace bench overlap --device cpu --preset tiny --dtype f32 --out /tmp/rows
$ interlace bench interconnect --device cpu --most 1MiB --no-plot --calibration mine.json
$ interlace bench layer --device cpu --dim 64 --hidden 128 --heads 4 --only eager,interlace
$ interlace bench kernels --device cpu --only adam,host --out /tmp/rows

Alone, a command starts its ranks as processes and ends them all, whatever happens; under torchrun
each process is a rank already, and rank 0 alone prints and writes.
"""

from __future__ import annotations

import faulthandler
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.commands.output import UNSOUND, command, print_json, say, table, words
from interlace.errors import BackendError, OptionError

if TYPE_CHECKING:
    from interlace.bench.bars import BarVerdict

RESULTS = Path("benchmarks/results")
"""Where rows go that are meant to be committed."""
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Commit = Annotated[str, typer.Option(help="Commit, where git cannot tell.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows for scripts.")]
Name = Annotated[str, typer.Option(help="Name of the CSV file.")]
Out = Annotated[Path, typer.Option(help="Folder of the CSV rows.")]
TimeOut = Annotated[float, typer.Option(help="Seconds after which all ranks end.")]
Verbose = Annotated[bool, typer.Option(help="Say on stderr what is under way.")]
World = Annotated[int | None, typer.Option(help="Ranks; default: a rank for each GPU.")]


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
    out: Annotated[Path, typer.Option(help="Folder of the CSV rows and the plot.")] = RESULTS,
    name: Name = "interconnect",
    plot: Annotated[bool, typer.Option(help="Draw the rows, where matplotlib is there.")] = True,
    device: Device = "auto",
    world: World = None,
    commit: Commit = "",
    time_out: TimeOut = 580,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Measure copies between ranks, collectives and matmuls; calibrate the cost model by them."""
    from interlace.bench.interconnect import InterconnectSettings, work
    from interlace.bench.ranks import pick_device, run
    from interlace.bench.rows import plain

    device = pick_device(device)
    on_cpu = device == "cpu"
    settings = InterconnectSettings(
        least=nbytes(least),
        most=nbytes(most or ("16MiB" if on_cpu else "1GiB")),
        links=links,
        collectives=collectives,
        device=compute,
        calibration=(_place(calibration) if calibrate else ""),
        commit=commit,
        dtypes=tuple(words(dtype or ("f32" if on_cpu else "bf16"))),
    )
    path = out / f"{name}.csv"
    ranks: dict[str, Any] = {"device": device, "world": world, "time_out_s": time_out}
    report = run("interconnect", work, settings, **ranks, verbose=verbose, path=path)
    if report is None:
        return
    written = [str(path), *filter(None, [report["calibration"]])]
    if plot:
        written += _drawn(report["rows"], path.with_suffix(".png"))
    if json:
        print_json({"schema": 1, **plain(report), "files": written})
        return
    _show_interconnect(report)
    say("")
    for item in written:
        say(f"wrote {item}")


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
    check: Annotated[
        bool, typer.Option(help="Judge the bars; code 1 where auto misses one.")
    ] = False,
    out: Out = RESULTS,
    name: Name = "overlap",
    device: Device = "auto",
    world: World = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file that auto asks.")
    ] = None,
    commit: Commit = "",
    time_out: TimeOut = 580,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Time AG+GEMM, GEMM+RS and GEMM+AR by every strategy and rival, and append rows of CSV."""
    from interlace.bench.bars import judge_overlap
    from interlace.bench.overlap import OverlapSettings, work
    from interlace.bench.ranks import run
    from interlace.bench.sites import cases_of

    cases = cases_of(preset, shapes, words(dtype))
    if not cases or seconds <= 0:
        raise OptionError("nothing to measure: give shapes or a preset, and --seconds > 0")
    settings = OverlapSettings(
        cases=tuple(cases),
        graphs=graphs,
        seconds=seconds,
        host_runs=host_runs,
        commit=commit,
        calibration=_place(calibration),
        **_only(only),
    )
    path = out / f"{name}.csv"
    ranks: dict[str, Any] = {"device": device, "world": world, "time_out_s": time_out}
    report = run("overlap", work, settings, **ranks, verbose=verbose, path=path)
    if report is None:
        return
    roof = report["roof"]
    _conclude(
        report,
        f"roof of a copy {roof['bandwidth'] / 1e9:.1f} GB/s ({roof['how']})",
        {
            "site": "{op} {m},{k},{n} {dtype}",
            "strategy": "{strategy}",
            "mode": "{mode}",
            "chosen": "{chosen}",
            "median us": "{median_us:.1f}",
            "p90 us": "{p90_us:.1f}",
            "host us": "{host_us:.1f}",
            "x eager": "{speedup_eager:.2f}",
            "x graph": "{speedup_graph:.2f}",
            "R": "{r:.3f}",
            "MHz": "{sm_mhz:.0f}",
        },
        "{op} {m},{k},{n} {strategy} {mode}",
        path,
        judge_overlap(report["rows"]) if check else [],
        json,
    )


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
    out: Out = RESULTS,
    name: Name = "layer",
    calibration: Annotated[Path | None, typer.Option(help="Calibration file.")] = None,
    device: Device = "auto",
    world: World = None,
    commit: Commit = "",
    time_out: TimeOut = 580,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Time a layer compiled by Interlace against torch.compile with NCCL, without gradients."""
    from interlace.bench.layer import LayerSettings, work
    from interlace.bench.ranks import run

    settings = LayerSettings(
        dim=dim,
        hidden=hidden,
        heads=heads,
        prefill=prefill,
        decode=decode,
        cached=cached,
        dtype=dtype,
        strategy=strategy,
        seconds=seconds,
        calibration=_place(calibration),
        commit=commit,
        **_only(only),
    )
    path = out / f"{name}.csv"
    ranks: dict[str, Any] = {"device": device, "world": world, "time_out_s": time_out}
    report = run("layer", work, settings, **ranks, verbose=verbose, path=path)
    if report is None:
        return
    columns = {
        "step": "{step}",
        "way": "{way}",
        "rows": "{rows}",
        "median us": "{median_us:.1f}",
        "p90 us": "{p90_us:.1f}",
        "host us": "{host_us:.1f}",
        "device us": "{device_us:.1f}",
        "x inductor": "{speedup:.2f}",
        "MHz": "{sm_mhz:.0f}",
    }
    _conclude(report, "one layer", columns, "{step} {way}", path, [], json)


@command
def kernels(
    only: Annotated[str, typer.Option(help="Ops, with commas; default: all.")] = "",
    seconds: Annotated[float, typer.Option(help="Time for all of it; the rest is left out.")] = 80,
    small: Annotated[
        bool | None, typer.Option("--small/--large", help="Small sizes; default: on a CPU.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Judge the bars; code 1 where one is missed.")
    ] = False,
    out: Out = RESULTS,
    name: Name = "kernels",
    device: Device = "auto",
    commit: Commit = "",
    time_out: Annotated[float, typer.Option(help="Seconds after which it ends.")] = 580,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Time losses, optimizers, layers and the host against torch and others; append rows of CSV."""
    import torch

    from interlace.bench.bars import judge_kernels
    from interlace.bench.kernels.work import KernelSettings, work
    from interlace.bench.ranks import pick_device, progress

    if seconds <= 0:
        raise OptionError("nothing to measure: give --seconds > 0")
    settings = KernelSettings(seconds=seconds, small=small, commit=commit, **_only(only))
    path = out / f"{name}.csv"
    where = torch.device(pick_device(device))
    faulthandler.dump_traceback_later(time_out, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        with progress("kernels", verbose, path) as tell:
            report = work(settings, where, tell)
    finally:
        faulthandler.cancel_dump_traceback_later()
    _conclude(
        report,
        f"Triton {report['facts']['triton'] or 'absent'}",
        {
            "case": "{op} {shape} {dtype} {does}",
            "way": "{way}",
            "median us": "{median_us:.1f}",
            "p90 us": "{p90_us:.1f}",
            "host us": "{host_us:.1f}",
            "GB/s": "{gbs:.0f}",
            "of copy": "{share:.3f}",
            "TFLOP/s": "{tflops:.0f}",
            "x torch": "{speedup_torch:.2f}",
            "peak GiB": "{peak_bytes_gib:.2f}",
            "state GiB": "{state_bytes_gib:.2f}",
            "off": "{deviation:.2f}",
            "MHz": "{sm_mhz:.0f}",
        },
        "{op} {shape} {dtype} {way}",
        path,
        judge_kernels(report["rows"]) if check else [],
        json,
    )


def _place(calibration: Path | None) -> str | None:
    return None if calibration is None else str(calibration.resolve())


def _only(text: str) -> dict[str, Any]:
    return {"only": tuple(words(text))} if text else {}


def _conclude(
    report: dict[str, Any],
    headline: str,
    columns: Mapping[str, str],
    place: str,
    path: Path,
    verdicts: Sequence[BarVerdict],
    json: bool,
) -> None:
    """The rows for scripts or for people: a table, what was not timed, the bars; code 1 where one
    is missed. `columns` and `place` are formats of a row."""
    from interlace.bench.bars import missed
    from interlace.bench.rows import plain

    if json:
        bars = [verdict.to_json() for verdict in verdicts]
        print_json({"schema": 1, **plain(report), "bars": bars})
    else:
        facts = report["facts"]
        say(f"{facts['gpu']}, torch {facts['torch']}, {headline}\n")
        cells = [[_cell(form, row) for form in columns.values()] for row in report["rows"]]
        good = [line for line, row in zip(cells, report["rows"], strict=True) if not row["error"]]
        table(tuple(columns), good)
        failed = [row for row in report["rows"] if row["error"]]
        say("\nnot timed:" if failed else "")
        for row in failed:
            say(f"  {place.format_map(row)}: {row['error']}")
        if report.get("skipped"):
            say(f"no time left for: {'; '.join(report['skipped'])}")
        if verdicts:
            _show_bars(verdicts)
        say(f"\nwrote {path}")
    if missed(verdicts):
        raise typer.Exit(UNSOUND)


def _cell(form: str, row: Mapping[str, Any]) -> str:
    """One cell; what a row has in bytes is there in GiB as well."""
    gib = {f"{name}_gib": row[name] / 2**30 for name in row if name.endswith("_bytes")}
    text = form.format_map({**row, **gib})
    return "-" if text == "nan" else text


def _show_bars(verdicts: Sequence[BarVerdict]) -> None:
    cells = [
        [v.bar, v.limit, f"{v.figure:.3f}", "pass" if v.passed else "MISSED"]
        + [str(value) for value in v.of.values()]
        for v in verdicts
    ]
    table(("bar", "limit", "figure", "", *verdicts[0].of), cells, title="bars")


def _drawn(rows: list[dict[str, Any]], path: Path) -> list[str]:
    """The picture of the rows; none without matplotlib."""
    from interlace.bench.plots import draw_interconnect

    try:
        draw_interconnect(rows, path)
    except BackendError as error:
        say(str(error))
        return []
    return [str(path)]


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


def _show_interconnect(report: dict[str, Any]) -> None:
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
                "x".join(map(str, g["shape"])),
                g["dtype"],
                f"{g['seconds'] * 1e6:.1f} us",
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


bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure links, overlapped sites, whole layers and kernels, here and now.",
)
for function in (interconnect, overlap, layer, kernels):
    bench.command(no_args_is_help=False)(function)
