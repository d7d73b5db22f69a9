"""Many random sets of Programs, in several processes: counts by sort, and the disagreements.

    tally = run(Plan(programs=10_000, seed=7, jobs=2), hear=print)
    tally.misses, tally.false_alarms, tally.found

Set `n` of a seed is the same in any number of processes (`sets.drawn`). A disagreement is
shrunk by the process that finds it.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tests.fuzzing.compare import CRASH, FALSE_ALARM, MISS, Disagreement, compare
from tests.fuzzing.sets import drawn
from tests.fuzzing.shrink import Case, shrink

from interlace.ir.ops import Collective, Fused, Group
from interlace.ir.program import Program
from interlace.ir.text.printer import print_set

PART = 500
"""Sets that a process takes at once."""
UNFOLDED = 16
"""In one of so many sets the checker visits all ranks, where it could take some for all."""
SLOWEST = 5
"""Disagreements of one sort that are shrunk in one part: a fault may occur in every other set."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a campaign."""

    programs: int
    seed: int
    jobs: int = 1
    seconds: float | None = None
    """Time after which no new part is begun."""


@dataclass(frozen=True, slots=True)
class Found:
    """A set on which checker and oracle disagree, and what is left of it."""

    seed: int
    number: int
    sort: str
    fault: str
    runs: int
    num_ops: int
    text: str
    """The content of a file: the smallest set found, with its facts as comments."""


@dataclass(slots=True)
class Tally:
    """Results of a campaign."""

    plan: Plan
    programs: int = 0
    ops: int = 0
    """Ops of all ranks, in one run."""
    kinds: Counter[str] = field(default_factory=Counter[str])
    """Sets by kind of fault that the checker found in them; `sound` for none."""
    met: Counter[str] = field(default_factory=Counter[str])
    """Sets by what they have: sorts of ops, numbers of ranks, runs, teams and streams, tables."""
    passed_over: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    """Sets by sort of disagreement."""
    found: list[Found] = field(default_factory=list[Found])
    seconds: float = 0.0

    @property
    def misses(self) -> int:
        """Sets with a fault that the oracle finds and the checker does not; crashes as well."""
        return self.counts[MISS] + self.counts[CRASH]

    @property
    def false_alarms(self) -> int:
        """Sets with a fault that the checker reports and the oracle does not find."""
        return self.counts[FALSE_ALARM]

    def add(self, part: dict[str, Any]) -> None:
        """Adds what a process has done."""
        self.programs += part["programs"]
        self.ops += part["ops"]
        self.passed_over += part["passed_over"]
        self.kinds.update(part["kinds"])
        self.met.update(part["met"])
        self.counts.update(part["counts"])
        self.found += [Found(**found) for found in part["found"]]

    @property
    def rate(self) -> float:
        """Sets a second."""
        return self.programs / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        return (
            f"seed {self.plan.seed}: {self.programs:,} sets of Programs, {self.ops:,} ops, in "
            f"{self.seconds:,.1f} s ({self.rate:,.0f} sets/s in {self.plan.jobs} processes)\n"
            f"found: {kinds}\n"
            f"misses: {self.counts[MISS]}, crashes: {self.counts[CRASH]}, false alarms: "
            f"{self.false_alarms}, passed over (compared in part): {self.passed_over}"
        )


def run(plan: Plan, hear: Callable[[Tally], None] = lambda tally: None) -> Tally:
    """Runs a campaign; `hear` gets the tally after every part."""
    tally, began = Tally(plan), time.monotonic()
    for part in _parts(plan, began):
        tally.add(part)
        tally.seconds = time.monotonic() - began
        hear(tally)
    tally.seconds = time.monotonic() - began
    return tally


def _parts(plan: Plan, began: float) -> Iterator[dict[str, Any]]:
    starts = iter(range(0, plan.programs, PART))
    todo = ((plan.seed, start, min(PART, plan.programs - start)) for start in starts)
    end = math.inf if plan.seconds is None else began + plan.seconds
    due = takewhile(lambda _: time.monotonic() < end, todo)
    if plan.jobs == 1:
        yield from (part(*one) for one in due)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(plan.jobs, mp_context=context) as pool:
        under_way: set[Future[dict[str, Any]]] = set()
        try:
            for one in due:
                under_way.add(pool.submit(part, *one))
                if len(under_way) > plan.jobs:
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    yield from (each.result() for each in done)
            while under_way:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def part(seed: int, start: int, count: int) -> dict[str, Any]:
    """The sets from `start` on, as plain data: what a process does at once."""
    kinds, met, counts, over, ops = Counter[str](), Counter[str](), Counter[str](), 0, 0
    found: list[dict[str, Any]] = []
    gc.disable()  # nothing of a set is kept, and a collection every few sets costs a tenth
    try:
        for number in range(start, start + count):
            programs, runs = drawn(seed, number)
            fold = number % UNFOLDED != 0
            result = compare(programs, runs, fold=fold)
            kinds.update(result.kinds)
            over += result.passed_over
            facts, size = _facts(programs, runs)
            met.update(facts)
            ops += size
            counts.update({each.sort for each in result.disagreements})
            for each in result.disagreements:
                if sum(one["sort"] == each.sort for one in found) < SLOWEST:
                    case = Case(tuple(programs), runs)
                    found.append(_kept(seed, number, each, case, fold))
    finally:
        gc.enable()
        gc.collect()
    return {
        "programs": count, "ops": ops, "kinds": kinds, "met": met, "counts": counts,
        "passed_over": over, "found": found,
    }  # fmt: skip


def _facts(programs: list[Program], runs: int) -> tuple[set[str], int]:
    """Facts about a set's contents, and the number of ops of all of its ranks."""
    first, size = programs[0], 0
    facts = {f"{len(first.world)} ranks", f"{runs} runs", f"{len(first.teams)} teams"}
    facts.add(f"{max(len(program.streams()) for program in programs)} streams")
    facts.add("SPMD" if len(programs) == 1 and first.rank is None else "set")
    facts |= {"table" for _ in first.tables}
    for program in programs:
        size += len(program.ops) * (len(program.world) if program.rank is None else 1)
        for op in program.ops:
            facts.add(type(op).__name__)
            if isinstance(op, Collective):
                facts.add(op.kind)
            elif isinstance(op, Fused | Group):
                members = op.ops if isinstance(op, Group) else op.members
                facts |= {f"{type(one).__name__} in {type(op).__name__}" for one in members}
    return facts, size


def _kept(seed: int, number: int, wanted: Disagreement, case: Case, fold: bool) -> dict[str, Any]:
    """A disagreement with its set made small."""

    def persists(one: Case) -> bool:
        return wanted in compare(one.programs, one.runs, fold=fold).disagreements

    small = shrink(case, persists)
    text = (
        f"# {wanted.sort}: {wanted.fault}\n"
        f"# found by: python -m tests.fuzzing --seed {seed}, set {number}\n"
        f"# runs: {small.runs}\n\n{print_set(small.programs)}"
    )
    return {
        "seed": seed, "number": number, "sort": wanted.sort, "fault": wanted.fault,
        "runs": small.runs, "num_ops": small.num_ops, "text": text,
    }  # fmt: skip
