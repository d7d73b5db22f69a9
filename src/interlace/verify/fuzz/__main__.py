"""`interlace fuzz` where neither typer nor rich is installed, with nothing but Python's own.

$ python -m interlace.verify.fuzz --programs 2000000 --jobs 16 --seconds 560
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path

from interlace.verify.fuzz.campaign import Plan, Tally, keep, run


def main() -> int:
    """0: no disagreement; 1: there is one; 2: wrong usage."""
    words = argparse.ArgumentParser(prog="python -m interlace.verify.fuzz")
    words.add_argument("--programs", type=int, default=10_000)
    words.add_argument("--seed", type=int, default=None)
    words.add_argument("--jobs", type=int, default=1)
    words.add_argument("--seconds", type=float, default=None)
    words.add_argument("--json", action="store_true")
    words.add_argument("--keep", type=Path, default=None)
    given = words.parse_args()
    if given.programs < 1 or given.jobs < 1:
        words.error("--programs and --jobs are 1 or more")
    seed = secrets.randbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    told = [time.monotonic()]

    def hear(tally: Tally) -> None:
        if time.monotonic() > told[0] + 10:
            told[0] = time.monotonic()
            said = f"{tally.programs:,} of {given.programs:,}, {tally.rate:,.0f} sets/s"
            counts = f"{tally.misses} misses, {tally.false_alarms} false alarms"
            print(f"{said}, {counts}", file=sys.stderr, flush=True)

    tally = run(Plan(given.programs, seed, given.jobs, given.seconds), hear)
    if given.keep is not None:
        keep(tally, given.keep)
    print(json.dumps(tally.to_json(), indent=2) if given.json else tally)
    if not given.json:
        for found in tally.found:
            print(f"\n{found.text}")
    return 1 if tally.counts.total() else 0


if __name__ == "__main__":
    sys.exit(main())
