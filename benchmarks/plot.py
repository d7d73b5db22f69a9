"""Draws the committed rows of overlap, and of layers below them: a picture beside the CSV file.

python benchmarks/plot.py              # those of benchmarks/results
python benchmarks/plot.py DIR          # overlap.csv and transformer.csv of another folder

It needs matplotlib (`pip install interlace[bench]`).
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace.errors import BackendError
from interlace_bench.rows import Row, number, read
from interlace_bench.shapes import FLOAT8

RESULTS = Path(__file__).parent / "results"
GPU = "NVIDIA H200"
"""The GPU whose overlap rows are drawn: those of others are not compared with them."""

Times = dict[tuple[str, str], float]
"""Ratios of times by way and mode."""


def draw_overlap(rows: Sequence[Row], path: Path, layers: Sequence[Row] = ()) -> None:
    """Time over the roof by shape, of NCCL and a matmul in sequence, async-TP and ours: a column
    for each number of ranks; below the kernels, layers of `bench transformer` over the ideal. Rows
    in FP8 are left out.

    Each is shown in its faster mode, eager or as a CUDA graph. A dark picture goes beside the
    light one, as `-dark.png`.
    """
    try:
        importlib.import_module("matplotlib").use("agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise BackendError(
            "no plot: matplotlib is not there (pip install 'interlace[bench]')"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in rows if row["dtype"] != FLOAT8]
    columns = kernels_over_roof(rows)
    where = ", ".join(dict.fromkeys(f"{row['gpu']}, {row['dtype']}" for row in rows))
    for world, found in layers_over_ideal(layers).items():
        columns.setdefault(world, {}).update(found)
    for suffix, (ink, paper, colours) in THEMES.items():
        inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        papers = ("figure.facecolor", "axes.facecolor")
        with pyplot.rc_context(dict.fromkeys(inks, ink) | dict.fromkeys(papers, paper)):
            most = max((len(lines) for lines in columns.values()), default=1)
            size = {"figsize": (6.5 * max(1, len(columns)), 2 + 0.19 * most), "squeeze": False}
            figure, axes = pyplot.subplots(1, max(1, len(columns)), layout="constrained", **size)
            for axis, (world, lines) in zip(axes[0], sorted(columns.items()), strict=False):
                axis.set_title(f"{world} ranks", fontsize=10)
                _dots(axis, lines, ink, colours)
                axis.set_ylim(most - 0.3, -1.2)
            handles, labels = axes[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
            figure.suptitle(f"{where}. {OVERLAP_SAID}", fontsize=10)
            figure.savefig(path.with_name(f"{path.stem}{suffix}{path.suffix}"), dpi=120)
            pyplot.close(figure)


OURS = "Interlace"
WAYS = {"sequential": "NCCL, then matmul", "async-tp": "async-TP", "auto": OURS}
LAYER_WAYS = {"inductor": "NCCL, then matmul", "async-tp": "async-TP", "compile": OURS}
"""Counterparts of WAYS for layers: Inductor with NCCL, torch's async-TP, and ours."""
OPS = {"ag_gemm": "AG+GEMM", "gemm_rs": "GEMM+RS", "gemm_ar": "GEMM+AR"}
MARKS = {"NCCL, then matmul": "s", "async-TP": "D", OURS: "o"}
MOST_R = 4.0
"""Upper end of the scale; a larger ratio is written there as a number."""
THEMES = {
    "": ("#1b2330", "#ffffff", ("#8793a5", "#d9480f", "#2459c9")),
    "-dark": ("#e4e9f0", "#0d1117", ("#8b98ab", "#ff9a6b", "#7aa7ff")),
}
"""Ink, paper, and a colour of each way, by the suffix of the file."""
OVERLAP_SAID = """\
The roof of a kernel is its matmul alone or its bytes at full bandwidth, whichever is longer; of a
layer (forward and backward), the layer without communication. Kernels of M x K x N of a rank, each
way in its faster mode, eager or as a CUDA graph (async-TP is eager); each shape of one run."""

Lines = dict[str, dict[str, float]]
"""Time over the roof, by shape and way."""


def kernels_over_roof(rows: Sequence[Row]) -> dict[int, Lines]:
    """Times over the roof by number of ranks, with shapes in order of op and size.

    Compared times were measured together: a shape's times are those of one commit, the last that
    timed as many ways as any.
    """
    shapes: dict[tuple[int, tuple[str, ...]], dict[str, Times]] = {}
    for row in rows:
        if row["strategy"] in WAYS and not (row["error"] or math.isnan(number(row["r"]))):
            shape = row["op"], row["m"], row["k"], row["n"]
            commits = shapes.setdefault((int(row["world"]), shape), {})
            times = commits.pop(row["commit"], {})
            times[WAYS[row["strategy"]], row["mode"]] = number(row["r"])
            commits[row["commit"]] = times  # the last one
    places = list(OPS)
    columns: dict[int, Lines] = {}
    for (world, (op, *sizes)), commits in sorted(
        shapes.items(), key=lambda item: (places.index(item[0][1][0]), int(item[0][1][1]))
    ):
        found = [_faster_mode(times) for times in commits.values()]
        whole = max(map(len, found))
        line = next(times for times in reversed(found) if len(times) == whole)
        columns.setdefault(world, {})[f"{OPS[op]} {' x '.join(sizes)}"] = line
    return columns


def _faster_mode(times: Times) -> dict[str, float]:
    """The lesser of each way's times in its modes."""
    best: dict[str, float] = {}
    for (way, _), r in times.items():
        best[way] = min(r, best.get(way, math.inf))
    return best


def layers_over_ideal(rows: Sequence[Row]) -> dict[int, Lines]:
    """Forward and backward of layers over the same without communication: of the latest measured
    run that timed all ways."""
    runs: dict[tuple[int, str, str], dict[str, float]] = {}
    for row in rows:
        if row["way"] in LAYER_WAYS and row["how"] == "measured" and not row["error"]:
            line = f"layer {row['model']}, {int(row['batch']) * int(row['sequence'])} tokens"
            found = runs.setdefault((int(row["world"]), line, row["commit"]), {})
            found[LAYER_WAYS[row["way"]]] = 1 / (1 - number(row["exposed_share"]))
    columns: dict[int, Lines] = {}
    for (world, line, _), found in runs.items():
        if len(found) == len(LAYER_WAYS):
            columns.setdefault(world, {})[line] = found
    return columns


def _dots(axis: Any, lines: Lines, ink: str, colours: Sequence[str]) -> None:
    """A line for each shape, from its fastest way to its slowest, a mark for each of them."""
    names = list(lines)
    for y, times in enumerate(lines.values()):
        span = [min(r, MOST_R) for r in times.values()]
        axis.plot([min(span), max(span)], [y, y], color=ink, alpha=0.25, linewidth=1, zorder=1)
    for (way, mark), colour in zip(MARKS.items(), colours, strict=True):
        shown = [(y, times[way]) for y, times in enumerate(lines.values()) if way in times]
        near = [(y, r) for y, r in shown if r <= MOST_R]
        style = {"color": colour, "marker": mark, "linestyle": "none", "label": way}
        axis.plot([r for _, r in near], [y for y, _ in near], markersize=5, zorder=3, **style)
        for y, r in shown:
            if r > MOST_R:
                given = {"color": colour, "fontsize": 7, "va": "center"}
                axis.text(MOST_R * 1.02, y, f"{r:.0f} \u2192", **given)
    axis.axvline(1.0, color=ink, linewidth=1.2, label="the roof", zorder=2)
    for y in range(1, len(names)):
        if names[y].split()[0] != names[y - 1].split()[0]:
            axis.axhline(y - 0.5, color=ink, alpha=0.3, linewidth=0.6)
    ticks = [1, 1.25, 1.5, 2, 3, 4]
    axis.set(xscale="log", xlim=(0.9, MOST_R * 1.25), xlabel="time over the roof")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.grid(axis="x", color=ink, alpha=0.12)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", top=True, labeltop=True)
    axis.spines[["right", "left"]].set_visible(False)


def main(folder: Path) -> None:
    """Draws calibrated runs: where the built-in model chooses, `auto` may take another strategy."""
    rows = [row for row in read(folder / "overlap.csv") if row["gpu"] == GPU]
    layers = folder / "transformer.csv"
    picture = folder / "overlap.png"
    draw_overlap(
        [row for row in rows if row["calibrated"] != "no"],
        picture,
        read(layers) if layers.exists() else (),
    )
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
