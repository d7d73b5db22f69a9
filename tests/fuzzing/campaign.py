"""Many random sets of Programs: counts by sort, and the disagreements, made small.

tally = run(Plan(programs=10_000, seed=7), hear=print)
tally.misses, tally.false_alarms, tally.found
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzzing.compare import CRASH, FALSE_ALARM, MISS, Disagreement, compare
from tests.fuzzing.sets import COUNTED, drawn
from tests.fuzzing.shrink import Case, shrink

from interlace.ir.ops import Collective, Fused, Group
from interlace.ir.program import Program, no_collections
from interlace.ir.text.printer import print_set

PART = 500
"""Sets after which the tally is told."""
UNFOLDED = 16
"""In one of so many sets the checker visits all ranks, where it could take some for all."""
SLOWEST = 5
"""Disagreements of one sort that are shrunk: a fault may occur in every other set."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a campaign."""

    programs: int
    seed: int
    seconds: float | None = None
    """Time after which no further `PART` sets are begun."""
    counts: float = COUNTED
    """The share of all-to-alls whose counts are data; with 1 nearly all sets have one."""


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

    @property
    def rate(self) -> float:
        """Sets a second."""
        return self.programs / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        return (
            f"seed {self.plan.seed}: {self.programs:,} sets of Programs, {self.ops:,} ops, in "
            f"{self.seconds:,.1f} s ({self.rate:,.0f} sets/s)\n"
            f"found: {kinds}\n"
            f"with counts that are data: {self.met['counts']:,} sets\n"
            f"misses: {self.counts[MISS]}, crashes: {self.counts[CRASH]}, false alarms: "
            f"{self.false_alarms}, passed over (compared in part): {self.passed_over}"
        )


def run(plan: Plan, hear: Callable[[Tally], None] = lambda tally: None) -> Tally:
    """Runs a campaign; `hear` gets the tally after every `PART` sets."""
    tally, began = Tally(plan), time.monotonic()
    for start in range(0, plan.programs, PART):
        if plan.seconds is not None and time.monotonic() >= began + plan.seconds:
            break
        with no_collections():  # nothing of a set is kept, and a collection costs a tenth
            for number in range(start, min(start + PART, plan.programs)):
                _try(number, tally)
        gc.collect()
        tally.seconds = time.monotonic() - began
        hear(tally)
    return tally


def _try(number: int, tally: Tally) -> None:
    """Compares what checker and oracle say of one set."""
    programs, runs = drawn(tally.plan.seed, number, tally.plan.counts)
    fold = number % UNFOLDED != 0
    result = compare(programs, runs, fold=fold)
    facts, size = _facts(programs, runs)
    tally.programs += 1
    tally.ops += size
    tally.passed_over += result.passed_over
    tally.kinds.update(result.kinds)
    tally.met.update(facts)
    tally.counts.update({each.sort for each in result.disagreements})
    for each in result.disagreements:
        if sum(one.sort == each.sort for one in tally.found) < SLOWEST:
            case = Case(tuple(programs), runs)
            tally.found.append(_kept(tally.plan, number, each, case, fold))


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
                facts |= {"counts"} if op.sent is not None else set()
            elif isinstance(op, Fused | Group):
                members = op.ops if isinstance(op, Group) else op.members
                facts |= {f"{type(one).__name__} in {type(op).__name__}" for one in members}
    return facts, size


def _kept(plan: Plan, number: int, wanted: Disagreement, case: Case, fold: bool) -> Found:
    """A disagreement with its set made small."""

    def persists(one: Case) -> bool:
        return wanted in compare(one.programs, one.runs, fold=fold).disagreements

    small, seed = shrink(case, persists), plan.seed
    way = " --counts" if plan.counts == 1 else ""
    text = (
        f"# {wanted.sort}: {wanted.fault}\n"
        f"# found by: python -m tests.fuzzing --seed {seed}{way}, set {number}\n"
        f"# runs: {small.runs}\n\n{print_set(small.programs)}"
    )
    return Found(seed, number, wanted.sort, wanted.fault, small.runs, small.num_ops, text)
