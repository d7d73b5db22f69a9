"""How far off the best a choice is that goes by one run's rows, judged by another run's.

    python benchmarks/choosing.py benchmarks/results/overlap.csv

For each pair of runs of `bench overlap` with the same sites: of our fixed strategies the one that
is quickest by the first run's rows, against the best by the second run's medians. What the first
run's time is taken to be differs by the row: the median (0), the least of the rounds (1), or what
lies between. `interlace calibrate` goes by what comes out best.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from interlace.bench.candidates import OURS

FIXED = set(OURS) - {"auto"}
Site = tuple[str, ...]


def times(path: Path) -> dict[str, dict[Site, dict[str, tuple[float, float]]]]:
    """Median and least by commit, site and strategy."""
    found: dict[str, dict[Site, dict[str, tuple[float, float]]]] = defaultdict(dict)
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["strategy"] in FIXED and row["least_us"] and not row["error"]:
                site = tuple(row[key] for key in ("world", "op", "m", "k", "n", "dtype", "mode"))
                pair = float(row["median_us"]), float(row["least_us"])
                found[row["commit"]].setdefault(site, {})[row["strategy"]] = pair
    return found


def off(path: Path, world: str, weight: float) -> list[float]:
    """By how much each choice is off."""
    runs, found = times(path), list[float]()
    for mine, theirs in ((a, b) for a in runs for b in runs if a != b):
        for site in runs[mine].keys() & runs[theirs].keys():
            one, other = runs[mine][site], runs[theirs][site]
            names = sorted(one.keys() & other.keys())
            if site[0] == world and len(names) > 2:
                by = {n: (1 - weight) * one[n][0] + weight * one[n][1] for n in names}
                best = min(other[name][0] for name in names)
                found.append(other[min(names, key=by.__getitem__)][0] / best - 1)
    return found


def main() -> None:
    """Prints a line for each number of GPUs and way to take the time."""
    print("GPUs  weight of the least  choices  off by (mean)  more than 3 % off")
    for world in ("2", "4"):
        for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
            found = off(Path(sys.argv[1]), world, weight)
            beyond = sum(each > 0.03 for each in found) / len(found)
            mean = statistics.mean(found)
            print(f"{world:>4}  {weight:19}  {len(found):7}  {mean:13.2%}  {beyond:17.1%}")


if __name__ == "__main__":
    main()
