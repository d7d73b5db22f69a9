"""Hold the verifier against an oracle that tries every order, on random schedules.

$ python -m tests.fuzzing --programs 2000000 --seconds 560

Sets of 2 or 3 ranks with up to three streams and three teams, checked over one to three runs. They
hold every op (`call`, `copy`, `alloc`, `free`, `record`, `wait`, `host_sync`, all kinds of
collective, `send`, `recv`, `group`, `put`, `get`, `notify`, `expect`, `fused`), events recorded
again, slots taken several times in a run, chunks and buffers by per-rank tables, and all-to-alls
whose counts are data (`--counts`: nearly every set has one). They do not
hold compiled regions, kernels of a `fused` op, named sizes or FP8.

Ends with code 0 if both agree on all, and with 1 if the verifier misses a fault, reports one that
the oracle does not find, or fails. The same seed gives the same sets; several processes take
several seeds.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from tests.fuzzing.campaign import Plan, Tally, run
from tests.fuzzing.sets import COUNTED


def main(arguments: list[str] | None = None) -> int:
    """0: no disagreement; 1: there is one; 2: wrong usage."""
    words = argparse.ArgumentParser(prog="python -m tests.fuzzing")
    words.add_argument("--programs", type=int, default=10_000, help="random sets of Programs")
    words.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    words.add_argument("--seconds", type=float, default=None, help="when no more are begun")
    words.add_argument("--counts", action="store_true", help="exchanges whose counts are data")
    given = words.parse_args(arguments)
    if given.programs < 1 or (given.seed or 0) < 0:
        words.error("--programs is 1 or more, --seed is 0 or more")
    seed = secrets.randbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    told = [time.monotonic()]

    def hear(tally: Tally) -> None:
        if time.monotonic() > told[0] + 10:
            told[0] = time.monotonic()
            said = f"{tally.programs:,} of {given.programs:,}, {tally.rate:,.0f} sets/s"
            counts = f"{tally.misses} misses, {tally.false_alarms} false alarms"
            print(f"{said}, {counts}", file=sys.stderr, flush=True)

    counts = 1.0 if given.counts else COUNTED
    tally = run(Plan(given.programs, seed, given.seconds, counts), hear)
    print(tally)
    for found in tally.found:
        print(f"\n{found.text}")
    return 1 if tally.counts.total() else 0


if __name__ == "__main__":
    sys.exit(main())
