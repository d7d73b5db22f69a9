"""What a check of a whole training step on 1,024 GPUs takes: rows in `results/whole_step.csv`.

python -m benchmarks.whole_step                  # llama3-70b, tp 8 x pp 4 x dp 32
python -m benchmarks.whole_step --microbatches 4 --strategy ring --check
python -m benchmarks.whole_step --model tiny --tp 2 --pp 2 --dp 4 --sequence 64 --out /tmp

The Programs of the stages are built first (step.py), which takes longer than to
check them. The time is the processor's, of one core; the best of some rounds, since other work on
a machine only adds to it. Nothing here runs a Program. `--check` ends with 1 where it is over its
bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.step import LAYERS, StepSettings, step_of

from interlace.strategies import StrategyName
from interlace.verify import check
from interlace_bench.rows import append, facts

BAR_S = 10.0


def measure(settings: StepSettings, rounds: int) -> dict[str, Any]:
    """The row of the best of some checks."""
    programs = step_of(settings)
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        report = check(programs)
        best = min(best, time.process_time() - begun)
        print(f"{best:.2f} s of {BAR_S:.0f}: {str(report).splitlines()[0]}")
    report.raise_if_unsound()
    named = {name: getattr(settings, name) for name in ("model", "tp", "pp", "dp")}
    return {
        **named,
        "microbatches": settings.microbatches,
        "sequence": settings.sequence,
        "strategy": settings.strategy,
        "ranks": report.num_ranks,
        "ops": report.num_ops,
        "visited": report.num_visited,
        "rounds": rounds,
        "best_s": best,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and appends; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=[*LAYERS], default="llama3-70b")
    parser.add_argument("--strategy", choices=get_args(StrategyName), default="peer")
    for name, default in (("tp", 8), ("pp", 4), ("dp", 32), ("microbatches", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="hold the time against the bar")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = vars(parser.parse_args(arguments))
    out, held, rounds = given.pop("out"), given.pop("check"), given.pop("rounds")
    if rounds < 1:
        parser.error("--rounds >= 1 is what can be measured")
    row = measure(StepSettings(**given), rounds)
    append(out / "whole_step.csv", [row | facts("cpu")])
    print(f"wrote {out / 'whole_step.csv'}")
    return int(held and row["best_s"] > BAR_S)


if __name__ == "__main__":
    sys.exit(main())
