"""The checker against the exhaustive oracle: no fault missed, no false alarm."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from tests.verify.orders import shuffled
from tests.verify.random_sets import random_set

from interlace.ir import Fused, Program, print_set
from interlace.verify import Report, check
from interlace.verify.oracle import Verdict, explore

MAX_STATES = 4_000


def compare(programs: list[Program], runs: int) -> tuple[Report, Verdict] | None:
    """Checks and explores; None where the oracle cannot say (too large, or not well-formed)."""
    report = check(programs, runs=runs)
    kinds = report.kinds()
    shown = f"{runs} runs of\n{print_set(programs)}\n{report}"
    unrolled = check(programs, runs=runs, unroll=True).kinds()
    # After a deadlock, a later run may read what a stuck rank never wrote: a consequence, no cause.
    later = {"uninitialized"} if "deadlock" in kinds else set[str]()
    assert kinds <= unrolled <= kinds | later, f"unrolled: {set(unrolled)}\n{shown}"
    for seed, unroll, found in ((0, False, kinds), (1, True, unrolled)):
        with shuffled(seed):
            other = check(programs, runs=runs, unroll=unroll)
        assert other.kinds() == found, f"in another order, {seed}: {other}\n{shown}"
    in_order = check(programs, runs=runs, in_order=True)
    if report.sound:  # one after another, ranks may only wait for what a peer lists later
        assert in_order.kinds() <= {"deadlock", "uninitialized"}, f"{in_order}\n{shown}"
    if kinds & {"double-free", "bad-free"} or any(
        finding.kind == "use-before-alloc" and "before it is allocated" in finding.message
        for finding in report.findings
    ):
        return None
    verdict = explore(programs, runs=runs, limit=MAX_STATES)
    if not verdict.complete:
        return None
    shown = f"{verdict}\n{shown}"
    assert verdict.deadlock == ("deadlock" in kinds), shown
    lifetime = kinds & {"use-after-free", "use-before-alloc"}
    # What stands beside an Alloc that a deadlock keeps from coming is no race in any state.
    race = verdict.race or (verdict.deadlock and verdict.use_before_alloc and not lifetime)
    if "signal" in kinds:
        return report, verdict  # values that do not grow mean nothing that could be compared
    if "deadlock" in kinds and any(isinstance(op, Fused) for p in programs for op in p.ops):
        # What stands behind a part that is never begun may race, and is passed over.
        assert race or "race" not in kinds or lifetime, shown
        return report, verdict
    if not lifetime:
        assert race == ("race" in kinds), shown
    if not verdict.race:
        assert verdict.use_after_free == ("use-after-free" in kinds), shown
        assert verdict.use_before_alloc == bool(kinds & {"use-before-alloc", "race"}), shown
        if not lifetime:
            assert verdict.uninitialized == ("uninitialized" in kinds), shown
    return report, verdict


def explore_many(seed: int, count: int, num_steps: int) -> Counter[str]:
    """Compares `count` programs, and says how many of them were of which sort."""
    rng = random.Random(seed)
    met: Counter[str] = Counter()
    while met["programs"] < count:
        programs = random_set(rng, rng.randint(2, num_steps))
        compared = compare(programs, rng.choice((1, 2, 2, 3)))
        if compared is None:
            met["passed over"] += 1
            continue
        report, verdict = compared
        met["programs"] += 1
        met["states"] += verdict.num_states
        met.update(report.kinds() or {"sound"})
        met.update({type(op).__name__ for program in programs for op in program.ops})
    return met


@pytest.mark.timeout(400)
def test_300_random_programs(seed: int) -> None:
    met = explore_many(seed, 300, 4)
    print(dict(met))
    for sort in ("sound", "race", "deadlock", "uninitialized"):
        assert met[sort] >= 10, f"seed {seed} made only {met[sort]} of {sort}"
    for op in (
        *("Call", "Copy", "Fused", "Collective", "Send", "Recv", "Group", "Put", "Get"),
        *("Notify", "Expect", "Alloc", "Free", "Record", "Wait", "HostSync"),
    ):
        assert met[op] >= 3, f"seed {seed} made only {met[op]} of {op}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_programs_for_half_an_hour(seed: int) -> None:
    rng, stop = random.Random(seed), time.monotonic() + 1800
    while time.monotonic() < stop:
        part = rng.getrandbits(32)
        print("part", part)
        explore_many(part, 200, rng.choice((3, 4, 5, 6)))
