"""Draws the committed rows: a picture beside every CSV file.

python benchmarks/plot.py                          # all of benchmarks/results
python benchmarks/plot.py results/overlap.csv      # or some
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from interlace.bench.plots import draw_interconnect, draw_kernels, draw_layer, draw_overlap
from interlace.bench.rows import Row, read

RESULTS = Path(__file__).parent / "results"


def drawer(rows: Sequence[Row]) -> Callable[[Sequence[Row], Path], None]:
    """What draws these rows: told by their columns."""
    columns = rows[0].keys()
    if "strategy" in columns:
        return draw_overlap
    if "does" in columns:
        return draw_kernels
    return draw_layer if "way" in columns else draw_interconnect


def main(paths: Sequence[str]) -> None:
    """Draws each file's rows to a PNG beside it."""
    for path in map(Path, paths) if paths else sorted(RESULTS.glob("*.csv")):
        rows = read(path)
        if rows and "pass" not in rows[0]:  # the passes' times need no picture
            picture = path.with_suffix(".png")
            drawer(rows)(rows, picture)
            print(f"wrote {picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
