"""The checker against the exhaustive oracle: no fault missed, no false alarm.

python -m tests.verify.test_oracle 100000        # as many as one has patience for
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter

import pytest
from tests.verify.orders import shuffled
from tests.verify.random_sets import random_set

from interlace.ir import Program, print_set
from interlace.verify import Report, check
from interlace.verify.oracle.machine import OracleVerdict, explore

MAX_STATES = 4_000


def shown(programs: list[Program], runs: int, report: Report) -> str:
    """What an assertion that failed prints; to write a report takes longer than to make one."""
    return f"{runs} runs of\n{print_set(programs)}\n{report}"


def check_in_all_ways(programs: list[Program], runs: int, report: Report) -> None:
    """Unrolled, walked in other orders and one after another, the checker says the same."""
    kinds = report.kinds()
    unrolled = check(programs, runs=runs, unroll=True).kinds()
    # After a deadlock, a later run may read what a stuck rank never wrote: a consequence, no cause.
    later = {"uninitialized"} if "deadlock" in kinds else set[str]()
    assert kinds <= unrolled <= kinds | later, (
        f"unrolled: {set(unrolled)}\n{shown(programs, runs, report)}"
    )
    for seed, unroll, found in ((0, False, kinds), (1, True, unrolled)):
        with shuffled(seed):
            other = check(programs, runs=runs, unroll=unroll)
        assert other.kinds() == found, (
            f"in another order, {seed}: {other}\n{shown(programs, runs, report)}"
        )
    in_order = check(programs, runs=runs, in_order=True)
    if report.sound:  # one after another, ranks may only wait for what a peer lists later
        assert in_order.kinds() <= {"deadlock", "uninitialized"}, (
            f"{in_order}\n{shown(programs, runs, report)}"
        )


def compare(programs: list[Program], runs: int, report: Report) -> OracleVerdict | None:
    """Explores; None where the oracle cannot say (too large, or not well-formed)."""
    if report.kinds() & {"double-free", "bad-free"} or any(
        finding.kind == "use-before-alloc" and "before it is allocated" in finding.message
        for finding in report.findings
    ):
        return None
    verdict = explore(programs, runs=runs, limit=MAX_STATES)
    if not verdict.complete:
        return None
    try:
        agree(verdict, report)
    except AssertionError as error:
        raise AssertionError(f"{verdict}\n{shown(programs, runs, report)}") from error
    return verdict


def agree(verdict: OracleVerdict, report: Report) -> None:
    """Asserts that the oracle and the checker found the same sorts of fault."""
    kinds = report.kinds()
    lifetime = kinds & {"use-after-free", "use-before-alloc"}
    if "signal" in kinds:  # values that do not grow mean nothing that could be compared
        assert verdict.deadlock <= ("deadlock" in kinds)
        return
    assert verdict.deadlock == ("deadlock" in kinds)
    if kinds & {"deadlock", "mismatch"}:
        # The oracle goes on past what only a library that waits for all would get stuck at, and
        # what ranks that disagree do is not defined: more may race there than the checker tells.
        # And what stands beside an Alloc that a deadlock keeps from coming races in no state.
        race = verdict.race or verdict.use_before_alloc
        assert race or "race" not in kinds or lifetime
        return
    if not lifetime:
        assert verdict.race == ("race" in kinds)
    if not verdict.race:
        assert verdict.use_after_free == ("use-after-free" in kinds)
        assert verdict.use_before_alloc == bool(kinds & {"use-before-alloc", "race"})
        if not lifetime:
            assert verdict.uninitialized == ("uninitialized" in kinds)


def explore_many(seed: int, count: int, num_steps: int, every: int = 1) -> Counter[str]:
    """Compares `count` programs, one of `every` in all ways; how many were of which sort."""
    rng = random.Random(seed)
    met: Counter[str] = Counter()
    while met["programs"] < count:
        programs, runs = random_set(rng, rng.randint(2, num_steps)), rng.choice((1, 2, 2, 3))
        report = check(programs, runs=runs)
        if rng.randrange(every) == 0:
            check_in_all_ways(programs, runs, report)
        verdict = compare(programs, runs, report)
        if verdict is None:
            met["passed over"] += 1
            continue
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


if __name__ == "__main__":
    start, total = random.SystemRandom().getrandbits(32), Counter[str]()
    print("seed", start, flush=True)
    parts = random.Random(start)
    while total["programs"] < int(sys.argv[1]):
        total += explore_many(parts.getrandbits(32), 500, parts.choice((3, 4, 5, 6)), every=10)
    print(dict(total))
