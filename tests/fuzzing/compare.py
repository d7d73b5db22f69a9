"""Holds the checker's report against the oracle's verdict: what was missed, what is a false alarm.

    for found in compare(programs, runs=2).disagreements:
        print(found)                       # miss: race

The two are compared op by op. Two ops that the checker says race must race in some order; and for
all memory that the oracle sees two ops race for, the checker must name such two (it need not name
all: memory.py). Reads of what nothing wrote, and uses of what is not there, are compared where
nothing races for that memory: elsewhere they differ from order to order. What the checker says
waits forever must wait forever.

Where counts are data, the oracle explores a set once more for each of some draws of them. The
checker's verdict is for all counts, so it must name what goes wrong by any of them; only where each
rank keeps all of its rows must the oracle find all that the checker names.

The oracle explores several runs in a row, of which the checker builds one. Where what one rank does
has no other end, or a slot does not come back, that is the fault, and one run is explored too.

Not everything can be compared. In a set that can get stuck, or whose ranks disagree, the oracle
goes on past what only a library that waits for all would get stuck at, and what ranks that disagree
do is not defined: more may race there than the checker tells. After a fault of the list alone (a
buffer freed twice, or one that is not the Program's) nothing else is compared.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tests.fuzzing.oracle.machine import OracleVerdict, Use, explore
from tests.fuzzing.oracle.script import Place, Storage

from interlace.ir.ops import Alloc
from interlace.ir.program import Program
from interlace.verify.check import check
from interlace.verify.report import Finding, OpRef, Report

MISS, FALSE_ALARM, CRASH = "miss", "false alarm", "crash"
LIFETIME = {"use-after-free", "use-before-alloc"}
LISTED = ("event", "leak", "double-free", "bad-free")
"""Faults that the lists alone show."""
DRAWS = 2
"""Draws of the counts of a set that are explored, beside the worst."""
UNBALANCED = {"leak", "mismatch"}
"""Faults of a set whose runs are not alike."""


class Disagreement(NamedTuple):
    """One fault that the checker and the oracle do not agree on."""

    sort: str
    """`miss`, `false alarm` or `crash`."""
    fault: str
    """Its kind; of a crash, the exception and where it was raised."""

    def __str__(self) -> str:
        return f"{self.sort}: {self.fault}"


class Comparison(NamedTuple):
    """The result of checking and exploring one set of Programs."""

    kinds: frozenset[str]
    """Kinds of faults that the checker found; `sound` for none."""
    disagreements: tuple[Disagreement, ...] = ()
    passed_over: bool = False
    """The lists are at fault, so that only this was compared."""


def compare(programs: Sequence[Program], runs: int, *, fold: bool = True) -> Comparison:
    """Checks and explores a set of Programs; without `fold` the checker visits every rank."""
    try:
        report = check(programs, fold=fold)
        runs = 1 if report.kinds() & UNBALANCED else runs
        verdict = explore(programs, runs=runs)
        drawn = [explore(programs, runs=runs, counts=rng) for rng in _draws(programs)]
    except Exception as error:  # the campaign goes on, and keeps what made it
        where = traceback.extract_tb(error.__traceback__)[-1]
        name = f"{type(error).__name__} in {where.filename.rpartition('/')[2]}, {where.name}"
        return Comparison(frozenset(("crash",)), (Disagreement(CRASH, name),))
    kinds = report.kinds()
    found = [*_of_lists(verdict, kinds)]
    over = _passed_over(report)
    if not over:
        found += _Orders(programs, report, verdict).run()
        for one in drawn:
            shown = _without_races(one, verdict)
            found += [each for each in _Orders(programs, report, shown).run() if each.sort == MISS]
    return Comparison(kinds or frozenset(("sound",)), tuple(dict.fromkeys(found)), over)


def _draws(programs: Sequence[Program]) -> list[random.Random]:
    """What draws the counts of the exchanges of a set: the same for the same set."""
    counted = any(op.sent for program in programs for op in program.collectives().values())
    return [random.Random(seed) for seed in range(DRAWS if counted else 0)]


def _without_races(one: OracleVerdict, worst: OracleVerdict) -> OracleVerdict:
    """A verdict without what is told of memory for which two ops race by other counts: of that the
    checker names two, which need not race by these."""
    raced = {storage for _, _, storage in worst.races}

    def kept(uses: frozenset[Use]) -> frozenset[Use]:
        return frozenset(use for use in uses if use[1] not in raced)

    uses = kept(one.unwritten), kept(one.freed), kept(one.untaken)
    races = frozenset(race for race in one.races if race[2] not in raced)
    return replace(one, races=races, unwritten=uses[0], freed=uses[1], untaken=uses[2])


def _passed_over(report: Report) -> bool:
    return bool(report.kinds() & {"double-free", "bad-free"})


def _differ(fault: str, missed: object, wrong: object) -> Iterator[Disagreement]:
    if missed:
        yield Disagreement(MISS, fault)
    if wrong:
        yield Disagreement(FALSE_ALARM, fault)


def _of_lists(verdict: OracleVerdict, kinds: frozenset[str]) -> Iterator[Disagreement]:
    for fault in LISTED:
        yield from _differ(fault, fault in verdict.listed - kinds, fault in kinds - verdict.listed)


class _Orders:
    """Compares what depends on the order of events."""

    def __init__(self, programs: Sequence[Program], report: Report, verdict: OracleVerdict) -> None:
        self.programs, self.report, self.verdict = programs, report, verdict
        self.kinds = report.kinds()
        self.by_rank = any(program.rank is not None for program in programs)
        """The checker reports each rank by itself; else one rank stands for all."""
        self.storages = [
            {name: buffer.storage or name for name, buffer in program.buffers().items()}
            for program in programs
        ]
        self.slots = {
            buffer.storage or buffer.name
            for program in programs
            for buffer in program.buffers().values()
            if buffer.kind == "symmetric"
        }
        self.raced = {self.key(storage) for _, _, storage in verdict.races}

    def key(self, storage: Storage) -> Storage:
        """The memory, as far as the checker tells it apart. Where a rank frees a slot that it may
        yet use, the checker tells of this, and not that a peer who takes the slot again then races
        with the use: so a slot is one for all ranks."""
        _, name = storage
        return storage if self.by_rank and name not in self.slots else (0, name)

    def line(self, place: Place) -> Place:
        return place if self.by_rank else (0, place[1])

    def run(self) -> Iterator[Disagreement]:
        kinds, verdict = self.kinds, self.verdict
        yield from self.deadlocks()
        if "signal" in kinds or verdict.signal:
            # Which notify an expect means is told of values that grow alone.
            if not verdict.deadlock:
                yield from _differ("signal", "signal" not in kinds, not verdict.signal)
            return
        pairs = list(self.races())
        known = {(one, other) for one, other, _ in verdict.races}
        # What stands beside an Alloc that a deadlock keeps from coming races in no state.
        wrong = any(pair not in known and verdict.stuck.isdisjoint(pair) for pair in pairs)
        if kinds & {"deadlock", "mismatch"}:
            if wrong and not (verdict.untaken or kinds & LIFETIME):
                yield Disagreement(FALSE_ALARM, "race")
            return
        named = {(self.line(one), self.line(other)) for one, other in pairs}
        shown = {
            self.key(at)
            for one, other, at in verdict.races
            if (self.line(one), self.line(other)) in named
        }
        missed = self.raced - shown
        if kinds & LIFETIME:  # who uses what it has freed, races with the next take of the slot
            missed = {(rank, name) for rank, name in missed if name not in self.slots}
        yield from _differ("race", missed, wrong)
        yield from self.uses("use-after-free", verdict.freed)
        yield from self.uses("use-before-alloc", verdict.untaken)
        if not kinds & LIFETIME:
            yield from self.uses("uninitialized", verdict.unwritten)

    def deadlocks(self) -> Iterator[Disagreement]:
        """Compares the ops that wait forever. Of unordered notifies the checker takes an `expect`
        to mean the first listed, where the oracle may go on with a later one (semantics.md)."""
        stuck, told = self.verdict.stuck, "deadlock" in self.kinds
        named = [self.place(op) for found in self.of("deadlock") for op in self.on_streams(found)]
        unordered = self.verdict.signal and "signal" in self.kinds
        wrong = any(at not in stuck for at in named) and not unordered
        yield from _differ("deadlock", stuck and not told, wrong)

    def of(self, kind: str) -> list[Finding]:
        return [finding for finding in self.report.errors if finding.kind == kind]

    def on_streams(self, finding: Finding) -> Iterator[OpRef]:
        """Its ops, but for an Alloc that takes no slot: no stream has to get to it."""
        for op in finding.ops:
            number, index = op.at
            ops = self.programs[number].ops
            one = ops[index] if 0 <= index < len(ops) else None
            if not isinstance(one, Alloc) or one.buffer.kind == "symmetric":
                yield op

    def place(self, op: OpRef) -> Place:
        return op.rank, op.at[1]

    def races(self) -> Iterator[tuple[Place, Place]]:
        """Yields each two ops of which the checker reports a race, both ways round."""
        for finding in self.of("race"):
            one, other = map(self.place, finding.ops)
            yield one, other
            yield other, one

    def uses(self, kind: str, truly: Iterable[Use]) -> Iterator[Disagreement]:
        """Compares the ops that the checker reports for a fault with those that have it."""
        places = {place for place, _ in truly}
        told, wrong = set[Place](), False
        for finding in self.of(kind):
            op = finding.ops[-1]
            mine = {(rank, op.at[1]) for rank in finding.ranks}
            told |= mine
            storage = self.storages[op.at[0]].get(op.buffer, op.buffer)
            raced = any(name == storage for _, name in self.raced)
            wrong = wrong or (not raced and not mine <= places)
        yield from _differ(kind, places - told, wrong)


def header(text: str) -> dict[str, str]:
    """The facts in the comments at the head of a file that the campaign kept."""
    return dict(re.findall(r"(?m)^# (\w[\w ]*): (.*)$", text))
