"""Edits of a set of Programs that make a finding go away, each tried before it is told.

    report = check(programs)
    report.errors[0].fix        # "after line 2 add `main: record(e1)`, before line 4 add ..."
    report.errors[0].edits      # the same as data
    edited = apply(programs, report.errors[0].edits).programs

A finding carries the fixes that its kind suggests (proposals.py). Nothing is tried until someone
reads the fix of a finding: `Trials` then applies one after another to the Programs, checks these
again, and tells the first after which the finding is gone and nothing new is wrong. What is left
wrong by one may be put right by the fix that the second check suggests: both together are tried as
well. Where nothing holds, the finding says in words what has to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from interlace.errors import InterlaceError
from interlace.ir.ops import Op
from interlace.ir.printer import print_lines, print_op
from interlace.ir.program import Program
from interlace.verify.report import Chosen, Finding, Report

MAX_TRIED = 40
"""Fixes that are tried for one finding at most."""
WEIGHED = ("mismatch", "deadlock")
"""Kinds of finding of which not the first fix that holds is told, but the one that leaves least."""
MAX_STEPS = 3
"""Suggestions that one fix is put together from at most."""
MAX_OPS_CHECKED = 300_000
"""Ops that all tries of one Report check again at most: some seconds."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one Program: an op is added, moved, replaced or removed.

    `index` is the op that leaves its place (None: an op is added), `op` what is written instead of
    it (None: itself). It goes right after or right before the op `anchor`, which stays where it
    is; without one it goes where `index` stood, and without `op` nowhere. The op `len(ops)` is the
    end of the Program. Of several that go to one place, the first told comes first.
    """

    program: int
    """The place of the Program in its set."""
    op: Op | None = None
    index: int | None = None
    anchor: int | None = None
    after: bool = False


Fix = tuple[Edit, ...]


class Edited(NamedTuple):
    """Programs with a fix applied."""

    programs: tuple[Program, ...]
    origins: tuple[tuple[int | None, ...], ...]
    """For each Program, the index that each op (and the return) had before; None: it is new."""


class Unfit(Exception):
    """Edits that cannot be applied together."""


def apply(programs: Sequence[Program], fix: Iterable[Edit]) -> Edited:
    """The Programs with every edit made, to the letter."""
    edits: dict[int, list[Edit]] = {}
    for edit in fix:
        edits.setdefault(edit.program, []).append(edit)
    pairs = [_edited(program, edits.get(k, [])) for k, program in enumerate(programs)]
    return Edited(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def _edited(program: Program, edits: list[Edit]) -> tuple[Program, tuple[int | None, ...]]:
    ops, count = program.ops, len(program.ops)
    if not edits:
        return program, tuple(range(count + 1))
    places: dict[tuple[int, bool], list[tuple[Op, int | None]]] = {}
    stays: list[Op | None] = list(ops)
    for edit in edits:
        if edit.index is not None:
            if stays[edit.index] is not ops[edit.index]:
                raise Unfit("one op cannot leave its place twice")
            stays[edit.index] = edit.op if edit.anchor is None else None
        if edit.anchor is None:
            continue
        op = edit.op if edit.op is not None else ops[edit.index or 0]
        if edit.index is None and ops:
            op = dataclasses.replace(op, loc=ops[min(edit.anchor, count - 1)].loc)
        places.setdefault((edit.anchor, edit.after), []).append((op, edit.index))
    found: list[tuple[Op, int | None]] = []
    for i, op in enumerate(stays):
        around = places.get((i, False), []), places.get((i, True), [])
        if op is None and any(around):
            raise Unfit("an op that leaves its place is no anchor")
        found += around[0]
        found += [] if op is None else [(op, i)]
        found += around[1]
    found += places.get((count, False), [])
    return program.replace(ops=tuple(op for op, _ in found)), (*(i for _, i in found), count)


def describe(programs: Sequence[Program], fix: Fix) -> str:
    """The fix in words that say all of it, line by line."""
    said: list[str] = []
    for k, edit in enumerate(fix):
        program = programs[edit.program]
        lines = line_numbers(program)
        on = _whose(programs, program)
        text = "" if edit.op is None else f"`{print_op(edit.op, program)}`"
        where = ""
        if edit.anchor is not None:
            where = f"{'after' if edit.after else 'before'} line {lines[edit.anchor]}"
            where = "at the end" if edit.anchor == len(program.ops) else where
        if edit.index is None:
            last = fix[k - 1]
            if k and (last.program, last.anchor, last.after, last.index) == (
                edit.program, edit.anchor, edit.after, None
            ):  # fmt: skip
                said[-1] += f" then {text}"
            else:
                said.append(f"{where}{on} add {text}")
        elif edit.anchor is not None:
            where = where.replace("at the end", "to the end")
            as_ = f" as {text}" if text else ""
            said.append(f"move line {lines[edit.index]} {where}{on}{as_}")
        elif edit.op is not None:
            said.append(f"replace line {lines[edit.index]}{on} by {text}")
        else:
            said.append(f"remove line {lines[edit.index]}{on}")
    return ", ".join(said)


def _whose(programs: Sequence[Program], program: Program) -> str:
    """Which Program of a set a line is of; nothing where there is one."""
    if len(programs) == 1:
        return ""
    ranks = program.world if program.rank is None else (program.rank,)
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f" on ranks {ranks[0]} to {ranks[-1]}"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def line_numbers(program: Program) -> list[int]:
    """For every op and the return: its line in the file, or in the printed text."""
    if program.ops and all(op.loc.file and op.loc.line and not op.loc.module for op in program.ops):
        lines = [op.loc.line for op in program.ops]
        return [*lines, lines[-1] + 1]
    found: dict[int, int] = {}
    end = 0
    for number, line in enumerate(print_lines(program), 1):
        end = number
        if line.tag[0] == "op":
            found.setdefault(line.tag[1], number)
    return [*(found[i] for i in range(len(program.ops))), end + (program.results is None)]


Key = tuple[str, frozenset[tuple[int, int | None]]]
"""What a finding is about: its kind, and its ops by Program and index."""


class Outcome(NamedTuple):
    """What a check of edited Programs found, in terms of the Programs before."""

    fix: Fix
    keys: frozenset[Key]
    num_errors: int
    """The errors, those that are not listed too."""
    left: tuple[Finding, ...]
    """Errors that were not there before, or that the fix was for."""
    origins: tuple[tuple[int | None, ...], ...]


class Trials:
    """Chooses the fixes of the findings of one Report, in their order, as far as it is asked."""

    def __init__(self, programs: Sequence[Program], again: Callable[..., Report]) -> None:
        self.programs = tuple(programs)
        self.again = again
        """Checks other Programs as the Report's own were checked."""
        self.findings: tuple[Finding, ...] = ()
        self.count = 0
        self.keys: frozenset[Key] = frozenset()
        self._unchecked = MAX_OPS_CHECKED
        self._num_ops = 1
        self._chosen: list[Chosen] = []
        self._held: list[Outcome] = []

    def of(self, report: Report) -> Report:
        """The Report, with findings that ask for their fixes here."""
        self.findings = report.findings
        self.count = len(report.errors) + report.num_left_out
        self.keys = frozenset(map(_key, report.errors))
        self._num_ops = max(report.num_ops, 1)
        findings = tuple(
            dataclasses.replace(finding, chosen=partial(self.choose, k))
            if finding.candidates
            else finding
            for k, finding in enumerate(report.findings)
        )
        return dataclasses.replace(report, findings=findings)

    def choose(self, number: int) -> Chosen:
        """The fix of a finding; those before it are chosen first, so what is told is the same
        however one asks."""
        while len(self._chosen) <= number:
            self._chosen.append(self._choose(self.findings[len(self._chosen)]))
        return self._chosen[number]

    def _choose(self, finding: Finding) -> Chosen:
        if not finding.candidates:
            return Chosen(finding.words, ())
        held = self._find(finding)
        if held is None:
            return Chosen(finding.words, ())
        if held not in self._held:
            self._held.append(held)
        return Chosen(describe(self.programs, held.fix), held.fix)

    def _find(self, finding: Finding) -> Outcome | None:
        """The first fix that holds and leaves nothing new; else the first that makes it better."""
        key = _key(finding)
        for outcome in self._held:
            if key not in outcome.keys:
                return outcome
        better: Outcome | None = None
        clean: Outcome | None = None
        tried: set[Fix] = set()
        level = list(finding.candidates)
        for _ in range(MAX_STEPS):
            following: list[Fix] = []
            for fix in level:
                if fix in tried or len(tried) >= MAX_TRIED or self._unchecked < self._num_ops:
                    continue
                tried.add(fix)
                outcome = self._try(fix, key)
                if outcome is None:
                    continue
                if key not in outcome.keys and outcome.keys <= self.keys:
                    if finding.kind not in WEIGHED or not outcome.num_errors:
                        return outcome
                    if clean is None or outcome.num_errors < clean.num_errors:
                        clean = outcome
                if better is None and self._is_better(outcome, finding):
                    better = outcome
                following += _extended(outcome)
            if clean is not None:
                return clean
            level = following
        return better

    def _try(self, fix: Fix, key: Key) -> Outcome | None:
        self._unchecked -= self._num_ops
        try:
            edited = apply(self.programs, fix)
            report = self.again(edited.programs)
        except (InterlaceError, Unfit):
            return None
        keys = [_key(finding, edited.origins) for finding in report.errors]
        left = tuple(
            finding
            for finding, found in zip(report.errors, keys, strict=True)
            if found == key or found not in self.keys
        )
        count = len(report.errors) + report.num_left_out
        return Outcome(fix, frozenset(keys), count, left, edited.origins)

    def _is_better(self, outcome: Outcome, finding: Finding) -> bool:
        """Whether the finding is gone, less is wrong, and nothing of a new kind is.

        What waits behind a deadlock is not looked at: once that is gone, other faults may show.
        """
        key = _key(finding)
        kind, ops = key
        kinds = {found[0] for found in self.keys}
        fresh = outcome.keys - self.keys
        if key in outcome.keys:
            return False
        if kind == "deadlock":
            mine = {(edit.program, edit.index) for edit in outcome.fix}
            return all(found[0] != "deadlock" and not found[1] & (ops | mine) for found in fresh)
        return outcome.num_errors < self.count and all(found[0] in kinds for found in fresh)


def _key(finding: Finding, origins: Sequence[Sequence[int | None]] | None = None) -> Key:
    """What a finding is about; of edited Programs, in terms of those before."""
    ops: set[tuple[int, int | None]] = set()
    for op in finding.ops:
        program, index = op.at
        begin = index < 0  # of the run, before the first op
        ops.add((program, index if origins is None or begin else origins[program][index]))
    return finding.kind, frozenset(ops)


def _extended(outcome: Outcome) -> list[Fix]:
    """The fix with what the check after it suggests for the first fault that is left."""
    if not outcome.left:
        return []
    found: list[Fix] = []
    for fix in outcome.left[0].candidates:
        mapped = [_mapped(edit, outcome.origins[edit.program]) for edit in fix]
        if None not in mapped:
            found.append((*outcome.fix, *(edit for edit in mapped if edit is not None)))
    return found


def _mapped(edit: Edit, origins: Sequence[int | None]) -> Edit | None:
    """An edit of edited Programs as one of those before; None where it is about what was added."""
    index = None if edit.index is None else origins[edit.index]
    anchor = None if edit.anchor is None else origins[edit.anchor]
    if (index is None) != (edit.index is None) or (anchor is None) != (edit.anchor is None):
        return None
    return dataclasses.replace(edit, index=index, anchor=anchor)
