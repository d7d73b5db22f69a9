"""Draws the committed rows of overlap and of kernels: a picture beside the CSV file.

python benchmarks/plot.py                          # all of benchmarks/results
python benchmarks/plot.py results/overlap.csv      # or some
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from interlace_bench.plots import draw_kernels, draw_overlap
from interlace_bench.rows import Row, read

RESULTS = Path(__file__).parent / "results"
GPU = "NVIDIA H200"
"""The GPU whose overlap rows are drawn: those of others are not compared with them."""


def drawer(rows: Sequence[Row], folder: Path) -> Callable[[Sequence[Row], Path], None] | None:
    """What draws these rows, by their columns; None where they have no picture."""
    columns = rows[0].keys()
    if "chosen" in columns and "calibrated" in columns:
        layers = folder / "transformer.csv"
        return partial(_overlap, layers=read(layers) if layers.exists() else ())
    return draw_kernels if "does" in columns else None


def _overlap(rows: Sequence[Row], path: Path, layers: Sequence[Row]) -> None:
    """Draws calibrated runs: where the built-in model chooses, `auto` may take another strategy."""
    rows = [row for row in rows if row["gpu"] == GPU and row["calibrated"] != "no"]
    draw_overlap(rows, path, layers)


def main(paths: Sequence[str]) -> None:
    """Draws each file's rows to a PNG beside it."""
    for path in map(Path, paths) if paths else sorted(RESULTS.glob("*.csv")):
        rows = read(path)
        draw = drawer(rows, path.parent) if rows else None
        if draw is None:
            print(f"no picture for {path}")
            continue
        picture = path.with_suffix(".png")
        draw(rows, picture)
        print(f"wrote {picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
