"""The fix of a race, proved before it is printed: an event on one rank, a signal between ranks.

    draft = fixes.race(pairs)          # the Programs with a change; None where only words help
    draft.programs(), draft.words()    # "after line 2 add `main: record(e1)`, before line 4 ..."

A fix need not be right, only likely. It is proved when someone reads it: the changed Programs are
checked, and only where the finding is gone is it printed. Else the finding says in words what has
to change.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from interlace.errors import InterlaceError
from interlace.ir.ops import Expect, Notify, Op, Record, Wait
from interlace.ir.program import Program
from interlace.ir.text.printer import print_lines, print_op
from interlace.ir.types import Index, Others, RankIndex
from interlace.verify.report import Finding, Report
from interlace.verify.source import LoweredProgram
from interlace.verify.sweep import ByteAccess

MAX_PROOFS, MAX_OPS = 20, 20_000
"""Findings whose fixes are proved, at most, from the first on; ops of all ranks up to which any is.
The others are told in words."""

RankPair = tuple[int, int]


class Draft:
    """Programs of a set with ops added, and words for each.

    Places are those of the ops before any change; the place behind the last op is the end.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = tuple(programs)
        self._said: list[str] = []
        self._added: dict[int, list[tuple[int, Op]]] = {}
        """The ops added to each Program, each with the place that it stands before."""

    def add(self, k: int, op: Op, at: int, after: bool = False) -> None:
        """Adds an op to Program `k`, before or after the op at a place."""
        program = self._programs[k]
        if program.ops:
            op = replace(op, loc=program.ops[min(at, len(program.ops) - 1)].loc)
        self._added.setdefault(k, []).append((at + after, op))
        where = "at the end"
        if at < len(program.ops):
            where = f"{'after' if after else 'before'} line {line_numbers(program)[at]}"
        on = _on_ranks(self._programs, program)
        self._said.append(f"{where}{on} add `{print_op(op, program)}`")

    def programs(self) -> tuple[Program, ...]:
        """The Programs with every change."""
        changed = [*self._programs]
        for k, added in self._added.items():
            ops = [*enumerate(changed[k].ops)]
            both = sorted([*added, *ops], key=lambda pair: pair[0])  # what is added goes first
            changed[k] = changed[k].replace(ops=tuple(op for _, op in both))
        return tuple(changed)

    def words(self) -> str:
        """The changes in words, complete."""
        return ", ".join(self._said)


Check = Callable[..., Report]
"""Checks Programs as those of a Report were checked."""


class Fixes:
    """Drafts that fix races of one set of Programs, each proved when it is read."""

    def __init__(self, sources: Sequence[LoweredProgram], again: Check) -> None:
        self._programs = [source.program for source in sources]
        self._again = again
        self._provable: set[tuple[object, ...]] = set()
        self._kinds = frozenset[str]()
        self._num_errors = 0

    def complete(self, report: Report) -> None:
        """Notes what a fix has to make better, once everything is reported."""
        self._num_errors, self._kinds = _num_errors(report), report.kinds()
        most = 1 if report.num_left_out else MAX_PROOFS  # of a storm of faults each check is long
        if report.num_ops <= MAX_OPS:
            self._provable = {*map(_subject, report.findings[:most])}

    def prove(
        self, pairs: Sequence[tuple[ByteAccess, ByteAccess]], finding: Finding
    ) -> tuple[str, tuple[Program, ...]]:
        """The fix of a race in words and the Programs with it; else the finding's words."""
        advice = finding.words, ()
        draft = self.race(pairs) if _subject(finding) in self._provable else None
        if draft is None:
            return advice
        changed = draft.programs()
        try:
            after = self._again(changed)
            keeps_order = not self._ends_in_order or self._ends(changed)
        except InterlaceError:
            return advice
        fewer = _num_errors(after) < self._num_errors
        better = fewer and after.kinds() <= self._kinds and keeps_order
        if not better or _subject(finding) in map(_subject, after.errors):
            return advice
        return draft.words(), changed

    @cached_property
    def _ends_in_order(self) -> bool:
        """True if no deadlock occurs where each rank runs one op after another, as listed."""
        return self._ends(self._programs)

    def _ends(self, programs: Sequence[Program]) -> bool:
        return "deadlock" not in self._again(programs, in_order=True).kinds()

    def name(self, letter: str) -> str:
        """A name that no event, signal or buffer of the set has."""
        names = (f"{letter}{n}" for n in itertools.count(1))
        return next(name for name in names if name not in self._words)

    @cached_property
    def _words(self) -> set[str]:
        return {word for program in self._programs for word in re.findall(r"\w+", str(program))}

    def race(self, pairs: Sequence[tuple[ByteAccess, ByteAccess]]) -> Draft | None:
        """Orders two accesses, of which the first had better come first; None: only words help."""
        first, second = pairs[0]
        frees = first.free and first.item.ordering.frees is not None
        if frees or (second.free and second.item.ordering.takes is not None):
            pairs = [(other, one) for one, other in pairs]
            first, second = pairs[0]
        ranks = {(a.place.rank, b.place.rank) for a, b in pairs}
        cross, draft = {(a, b) for a, b in ranks if a != b}, Draft(self._programs)
        if len(cross) < len(ranks) and not self._event(draft, first, second):
            return None
        if cross and not self._signal(draft, first, second, cross):
            return None
        return draft

    def _event(self, draft: Draft, first: ByteAccess, second: ByteAccess) -> bool:
        """One op before another that is listed later, by a recorded or a new event."""
        source, one, two = first.place.source, first.item.index, second.item.index
        stream, other = _stream(first), _stream(second)
        if source is not second.place.source or one >= two or stream == other:
            return False
        last: dict[str, str] = {}
        for op in source.program.ops[max(one, 0) : two]:
            for member in op.steps:
                if (event := member.ordering().records) is not None:
                    last[event] = op.stream
        recorded = next((name for name, of in last.items() if of == stream), None)
        event = recorded or self.name("e")
        if recorded is None:
            record = Record(event=event, stream=stream)
            draft.add(source.number, record, max(one, 0), after=one >= 0)
        draft.add(source.number, Wait(event=event, stream=other), two)
        return True

    def _signal(
        self, draft: Draft, first: ByteAccess, second: ByteAccess, ranks: set[RankPair]
    ) -> bool:
        """A signal from the ranks of one op to those of the other, in a team that holds all."""
        one, two = first.place.source, second.place.source
        if (one.program.rank is None) != (two.program.rank is None):
            return False
        for team in [each.name for each in one.program.teams if each in two.program.teams]:
            members = [(one.program.where(a).members.get(team), b) for a, b in sorted(ranks)]
            pairs = [(m, m.ranks.index(b)) for m, b in members if m is not None and b in m.ranks]
            if len(pairs) == len(ranks):
                break
        else:
            return False
        to: Index | Others = Others(team)
        of: Index | Others = Others(team)
        distances = {(index - member.index) % len(member.ranks) for member, index in pairs}
        if one.program.rank is not None:
            to, of = pairs[0][1], pairs[0][0].index
        elif len(distances) == 1:
            (distance,) = distances
            to, of = RankIndex(team, distance), RankIndex(team, -distance)
        name, at = self.name("s"), first.item.index
        notify = Notify(signal=name, peer=to, team=team, stream=_stream(first))
        expect = Expect(signal=name, peer=of, team=team, stream=_stream(second))
        draft.add(one.number, notify, max(at, 0), after=at >= 0)
        draft.add(two.number, expect, max(second.item.index, 0))
        return True


def _stream(access: ByteAccess) -> str:
    """The stream of an access; the first one for the begin and the return."""
    source, index = access.place.source, access.item.index
    ops = source.program.ops
    return ops[index].stream if 0 <= index < len(ops) else source.streams[0].partition(", part")[0]


def _on_ranks(programs: Sequence[Program], program: Program) -> str:
    """The ranks that run a Program of a set; nothing where there is one Program."""
    if len(programs) == 1:
        return ""
    ranks = program.world if program.rank is None else (program.rank,)
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f" on ranks {ranks[0]} to {ranks[-1]}"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def line_numbers(program: Program) -> list[int]:
    """The line of every op and of the return: in the file, or in the printed text of a Program
    that is no file's as it stands (passes that move and divide ops leave each its line)."""
    known = [
        op.loc.text or (op.loc.file, 0 if op.loc.module else op.loc.line) for op in program.ops
    ]
    lines = [line for _, line in known]
    if known and len({file for file, _ in known}) == 1 and lines[0]:
        if all(one < two for one, two in itertools.pairwise(lines)):
            return [*lines, lines[-1] + 1]
    firsts: dict[int, int] = {}
    end = 0
    for end, line in enumerate(print_lines(program), 1):
        family, index = line.tag
        if family == "op":
            firsts.setdefault(index, end)
    return [*(firsts[i] for i in range(len(program.ops))), end + (program.results is None)]


def _num_errors(report: Report) -> int:
    return len(report.errors) + report.num_left_out


def _subject(finding: Finding) -> tuple[object, ...]:
    """The kind of a finding, and what its ops are."""
    return finding.kind, *((op.rank, op.text, op.role) for op in finding.ops)
