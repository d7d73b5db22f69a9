"""Which of the fixes that are proposed for a finding holds: tried when someone reads it.

    report = check(programs)
    report.errors[0].fix        # "after line 2 add `main: record(e1)`, before line 4 add ..."
    report.errors[0].edits      # the same as data, for `edits.apply`

One fix after another is applied to the Programs, and these are checked again; what is told is the
first after which the finding is gone and nothing new is wrong. What is left wrong by one may be put
right by the fix that the second check proposes: both together are tried as well. Where nothing
holds, the finding says in words what has to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from interlace.errors import InterlaceError
from interlace.ir.program import Program
from interlace.verify.fixing.edits import Edit, Fix, Unfit, apply, describe
from interlace.verify.report import Chosen, Finding, Report

MAX_TRIED = 40
"""Fixes that are tried for one finding at most."""
WEIGHED = ("mismatch", "deadlock")
"""Kinds of finding of which not the first fix that holds is told, but the one that leaves least."""
MAX_STEPS = 3
"""Suggestions that one fix is put together from at most."""
MAX_OPS_CHECKED = 200_000
"""Ops that all tries of one Report check again at most: some seconds."""
OPS_A_FINDING = 40
"""A finding takes about as long to tell as so many ops to check."""


Key = tuple[str, frozenset[tuple[int, int | None]]]
"""What a finding is about: its kind, and its ops by Program and index."""


class TriedFix(NamedTuple):
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
        self._cost = 1
        self._all_listed = True
        self._in_order: bool | None = None
        self._chosen: list[Chosen] = []
        self._held: list[TriedFix] = []

    def of(self, report: Report) -> Report:
        """The Report, with findings that ask for their fixes here."""
        self.findings = report.findings
        self.count = len(report.errors) + report.num_left_out
        self.keys = frozenset(map(_key, report.errors))
        self._cost = report.num_ops + OPS_A_FINDING * len(report.findings)
        self._all_listed = report.num_left_out == 0
        findings = tuple(
            dataclasses.replace(finding, chosen=partial(self.choose, k))
            if finding.level == "error"
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
        held, why = self._find(finding)
        if held is None and not finding.candidates:
            return Chosen(finding.words, ())
        if held is None:
            return Chosen(f"{finding.words}; {why}", ())
        if held not in self._held:
            self._held.append(held)
        return Chosen(describe(self.programs, held.fix), held.fix)

    def _find(self, finding: Finding) -> tuple[TriedFix | None, str]:
        """The first fix that holds and leaves nothing new; else the first that makes it better.

        Where there is none, the second says why: what stands behind the fault, where that is known.
        """
        key, shows = _key(finding), ""
        for outcome in self._held:
            if self._is_clean(outcome, key) or self._is_better(outcome, finding):
                return outcome, ""
        better: TriedFix | None = None
        clean: TriedFix | None = None
        tried: set[Fix] = set()
        level = list(finding.candidates)
        for _ in range(MAX_STEPS):
            following: list[Fix] = []
            for fix in level:
                if fix in tried or len(tried) >= MAX_TRIED or self._unchecked < self._cost:
                    continue
                tried.add(fix)
                outcome = self._try(fix, key)
                if outcome is None:
                    continue
                if self._is_clean(outcome, key) and self._keeps_order(outcome):
                    if finding.kind not in WEIGHED or not outcome.num_errors:
                        return outcome, ""
                    if clean is None or outcome.num_errors < clean.num_errors:
                        clean = outcome
                if better is None and self._is_better(outcome, finding):
                    better = outcome
                if not shows and key not in outcome.keys and outcome.left:
                    kinds = {one.kind for one in outcome.left}  # not told of what races
                    if kinds == {"uninitialized"}:
                        shows = f"what then shows: {outcome.left[0].message}"
                following += _extended(outcome)
            if clean is not None:
                return clean, ""
            level = following
        if not tried:
            return None, "the Programs are too large to try edits"
        return better, shows or "no edit that was tried does this alone"

    def _try(self, fix: Fix, key: Key) -> TriedFix | None:
        self._unchecked -= self._cost
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
        return TriedFix(fix, frozenset(keys), count, left, edited.origins)

    def _keeps_order(self, outcome: TriedFix) -> bool:
        """Whether the Programs still run one op after another, as they are listed, if they did."""
        if self._in_order is None:
            self._in_order = self._runs_in_order(self.programs)
        return not self._in_order or self._runs_in_order(apply(self.programs, outcome.fix).programs)

    def _runs_in_order(self, programs: Sequence[Program]) -> bool:
        self._unchecked -= self._cost
        return "deadlock" not in self.again(programs, in_order=True).kinds()

    def _is_clean(self, outcome: TriedFix, key: Key) -> bool:
        """Whether the finding is gone, and nothing is wrong that was not wrong before."""
        if key in outcome.keys or (self._all_listed and not outcome.keys <= self.keys):
            return False
        kinds = {kind for kind, _ in self.keys}  # a fault that is new may be one not listed before
        fewer = outcome.num_errors < self.count
        return fewer and all(kind in kinds for kind, _ in outcome.keys)

    def _is_better(self, outcome: TriedFix, finding: Finding) -> bool:
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


def _extended(outcome: TriedFix) -> list[Fix]:
    """The fix with what the check after it suggests for the first fault that is left."""
    if not outcome.left:
        return []
    found: list[Fix] = []
    for fix in outcome.left[0].candidates:
        mapped = [_mapped(edit, outcome.origins[edit.program]) for edit in fix]
        if None not in mapped:
            new = [edit for edit in mapped if edit is not None]
            again = {(edit.program, edit.index) for edit in new if edit.index is not None}
            kept = [edit for edit in outcome.fix if (edit.program, edit.index) not in again]
            found.append((*kept, *new))
    return found


def _mapped(edit: Edit, origins: Sequence[int | None]) -> Edit | None:
    """An edit of edited Programs as one of those before; None where it is about what was added."""
    index = None if edit.index is None else origins[edit.index]
    anchor = None if edit.anchor is None else origins[edit.anchor]
    if (index is None) != (edit.index is None) or (anchor is None) != (edit.anchor is None):
        return None
    return dataclasses.replace(edit, index=index, anchor=anchor)
