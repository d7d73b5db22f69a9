"""Pictures of benchmark rows, by matplotlib (`pip install interlace[bench]`).

draw_interconnect(read(Path("benchmarks/results/interconnect.csv")), Path("interconnect.png"))
draw_overlap(read(Path("benchmarks/results/overlap.csv")), Path("overlap.png"))
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from interlace.bench.rows import Row, number
from interlace.errors import BackendError

STYLES = {"peer": "--", "gloo": ":", "put": "--", "send": ":"}
Series = dict[str, list[tuple[float, float, float]]]
Times = dict[tuple[str, str], float]
"""By case and name."""


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise BackendError(
            "no plot: matplotlib is not there (pip install 'interlace[bench]', or --no-plot)"
        ) from error


def draw_interconnect(rows: Sequence[Row], path: Path) -> None:
    """Bandwidth and time over size: copies between ranks, and collectives."""
    pyplot = _pyplot()
    good = [row for row in rows if not row["error"] and number(row["nbytes"]) > 0]
    copies, teams = Series(), Series()
    for row in good:
        point = number(row["nbytes"]), number(row["us"]), number(row["gbs"])
        if row["pattern"] == "team":
            name, place = f"{row['backend']} {row['kind']}", teams
        elif ">" in row["pattern"] and row["pattern"] != "0>1":
            continue  # one pair stands for all
        else:
            name, place = f"{row['kind']} {row['protocol']} {row['pattern']}", copies
        place.setdefault(name, []).append(point)
    figure, axes = pyplot.subplots(2, 2, figsize=(14, 10), layout="constrained")
    for column, (title, series) in enumerate((("copies", copies), ("collectives", teams))):
        for name, points in sorted(series.items()):
            sizes, times, rates = zip(*sorted(points), strict=True)
            style = {"marker": ".", "label": name, "linestyle": STYLES.get(name.split()[0], "-")}
            axes[0][column].plot(sizes, rates, **style)
            axes[1][column].plot(sizes, times, **style)
        axes[0][column].set(title=title, xscale="log", ylabel="GB/s of a rank")
        axes[1][column].set(xscale="log", yscale="log", xlabel="bytes", ylabel="us")
        if series:
            axes[0][column].legend(fontsize=7)
    _save(pyplot, figure, path)


def draw_overlap(rows: Sequence[Row], path: Path) -> None:
    """Time over the roof, R, by site and strategy: panels for eager runs and for graphs, of as many
    ranks each as there are rows of."""
    pyplot = _pyplot()
    latest: dict[tuple[str, str], Times] = {}
    for row in rows:
        if not (row["error"] or math.isnan(number(row["r"])) or row["strategy"][:4] == "gemm"):
            site = f"{row['op']} {row['m']},{row['k']},{row['n']}"
            times = latest.setdefault((row["world"], row["mode"]), {})
            times[site, row["strategy"]] = number(row["r"])
    panels = sorted(latest, key=lambda panel: (-number(panel[0]), panel[1]))
    every = dict.fromkeys(name for times in latest.values() for _, name in times)
    colours = {name: f"C{i}" for i, name in enumerate(every)}
    most = max((len({site for site, _ in times}) for times in latest.values()), default=0)
    shape = {"figsize": (max(8.0, 0.7 * most), 5 * max(1, len(panels))), "squeeze": False}
    figure, axes = pyplot.subplots(max(1, len(panels)), 1, layout="constrained", **shape)
    for (world, mode), (axis,) in zip(panels, axes, strict=False):
        sites = list(dict.fromkeys(site for site, _ in latest[world, mode]))
        for name, places, heights, width in _bars(latest[world, mode]):
            axis.bar(places, heights, width, label=name, color=colours[name])
        axis.axhline(1.0, color="black", linewidth=0.8)
        title = f"{world} ranks, {mode}"
        axis.set(title=title, ylabel="R: time over the roof", ylim=(0, 3))
        axis.set_xticks([i + 0.4 for i in range(len(sites))])
        axis.set_xticklabels(sites, rotation=60, ha="right", fontsize=7)
        axis.legend(fontsize=7, ncols=4)
    _save(pyplot, figure, path)


def _bars(times: Times) -> Iterator[tuple[str, list[float], list[float], float]]:
    """Of each name: its bars' places beside those of the others, their lengths, their width."""
    cases = list(dict.fromkeys(case for case, _ in times))
    names = list(dict.fromkeys(name for _, name in times))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        lengths = [times.get((case, name), math.nan) for case in cases]
        yield name, [i + place * width for i in range(len(cases))], lengths, width


def draw_layer(rows: Sequence[Row], path: Path) -> None:
    """The median time of each way, by step."""
    pyplot = _pyplot()
    good = {(r["step"], r["way"]): number(r["median_us"]) for r in rows if not r["error"]}
    steps = list(dict.fromkeys(step for step, _ in good))
    figure, axes = pyplot.subplots(
        1, max(1, len(steps)), figsize=(5 * max(1, len(steps)), 4), layout="constrained"
    )
    for axis, step in zip([axes] if len(steps) < 2 else axes, steps, strict=False):
        ways = {way: time for (s, way), time in good.items() if s == step}
        axis.barh(list(ways), list(ways.values()))
        axis.set(title=step, xlabel="us")
    _save(pyplot, figure, path)


def draw_transformer(rows: Sequence[Row], path: Path) -> None:
    """Forward, backward and step of each way, one after another, by what was trained and where."""
    pyplot = _pyplot()
    latest: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row["error"]:
            sizes = f"{row['model']} x {row['layers']}, {row['batch']} x {row['sequence']} tokens"
            where = f"{row['world']} ranks, {row['how']}, {row['gpu']}"
            latest.setdefault(f"{sizes}, {row['dtype']}\n{where}", {})[row["way"]] = row
    size = {"figsize": (10, 1 + 3 * max(1, len(latest))), "squeeze": False}
    figure, axes = pyplot.subplots(max(1, len(latest)), 1, layout="constrained", **size)
    for (title, ways), (axis,) in zip(latest.items(), axes, strict=False):
        begin = dict.fromkeys(ways, 0.0)
        for stage in ("forward", "backward", "step"):
            took = {way: number(row[f"{stage}_ms"]) for way, row in ways.items()}
            axis.barh(list(ways), list(took.values()), left=list(begin.values()), label=stage)
            begin = {way: at + took[way] for way, at in begin.items()}
        axis.set(title=title, xlabel="ms")
        axis.invert_yaxis()
        axis.legend(fontsize=7)
    _save(pyplot, figure, path)


def draw_kernels(rows: Sequence[Row], path: Path) -> None:
    """The median time of each way over ours, by case: a panel for each op."""
    pyplot = _pyplot()
    latest: dict[str, Times] = {}
    for row in rows:
        if not row["error"] and row["way"] != "copy":
            case = " ".join(row[name] for name in ("shape", "dtype", "does"))
            latest.setdefault(row["op"], {})[case, row["way"]] = number(row["median_us"])
    size = {"figsize": (12, 1 + 5 * max(1, len(latest))), "squeeze": False}
    figure, axes = pyplot.subplots(max(1, len(latest)), 1, layout="constrained", **size)
    for (op, times), (axis,) in zip(latest.items(), axes, strict=False):
        cases = list(dict.fromkeys(case for case, _ in times))
        ours = {case: times.get((case, "interlace"), math.nan) for case in cases}
        over = {(case, way): time / ours[case] for (case, way), time in times.items()}
        for way, places, lengths, width in _bars(over):
            axis.barh(places, lengths, width, label=way)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(title=op, xlabel="time over ours")
        axis.set_yticks([i + 0.4 for i in range(len(cases))], cases, fontsize=7)
        axis.legend(fontsize=7)
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
