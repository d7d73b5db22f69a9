"""Chooses the fix of a finding: its candidates are applied and checked when someone reads it.

The first candidate after which the finding is gone and nothing new is wrong is the fix. What one
leaves wrong may be put right by what the second check proposes: both together are tried as well.
Where nothing holds, the finding says in words what has to change.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from interlace.errors import InterlaceError
from interlace.ir.program import Program
from interlace.verify.fixing.edits import Edit, Fix, Unfit, apply, describe
from interlace.verify.report import Finding, Report

MAX_TRIED = 40
"""Fixes that are tried for one finding at most."""
WEIGHED = ("mismatch", "deadlock")
"""Kinds for which the fix that leaves the fewest errors is chosen, and not the first that holds."""
MAX_STEPS = 3
"""Proposals that one fix is put together from at most."""
MAX_OPS_CHECKED = 200_000
"""Ops that all tries of one Report check again at most: some seconds."""
OPS_A_FINDING = 40
"""Reporting a finding takes about as long as checking so many ops; finding a fault, as one op."""
MAX_SECONDS = 10.0
"""And how long they take at most, where ops are compared that touch very many pieces."""


Key = tuple[str, frozenset[tuple[int, int | None]]]
"""What a finding is about: its kind, and its ops by Program and index."""


class TriedFix(NamedTuple):
    """What a check of edited Programs found, in terms of the Programs before."""

    fix: Fix
    keys: frozenset[Key]
    num_errors: int
    """All errors, also those not listed."""
    left: tuple[Finding, ...]
    """Errors that were not there before, or that the fix was for."""
    origins: tuple[tuple[int | None, ...], ...]


class Trials:
    """Chooses the fixes of the findings of one Report, in their order, as they are asked for."""

    def __init__(
        self, programs: Sequence[Program], report: Report, again: Callable[..., Report]
    ) -> None:
        self.programs = tuple(programs)
        self.again = again
        """Checks other Programs as the Report's own were checked."""
        self.findings = report.findings
        self.num_errors = len(report.errors) + report.num_left_out
        self.keys = frozenset(map(_key, report.errors))
        self._unchecked = MAX_OPS_CHECKED
        listed, others = len(report.findings), report.num_left_out
        self._cost = report.num_ops + OPS_A_FINDING * listed + others
        self._left_s = MAX_SECONDS
        self._longest_s = report.seconds
        self._all_listed = report.num_left_out == 0
        self._in_order: bool | None = None
        self._chosen: list[tuple[str, Fix]] = []
        self._held: list[TriedFix] = []

    def choose(self, number: int) -> tuple[str, Fix]:
        """The fix of a finding, in words and as edits (none: advice in words); those before it are
        chosen first, so the result does not depend on the order of asking.
        """
        while len(self._chosen) <= number:
            self._chosen.append(self._choose(self.findings[len(self._chosen)]))
        return self._chosen[number]

    def _choose(self, finding: Finding) -> tuple[str, Fix]:
        held, why = self._find(finding)
        if held is None:
            return f"{finding.words}; {why}" if finding.candidates else finding.words, ()
        if held not in self._held:
            self._held.append(held)
        kinds = ", ".join(dict.fromkeys(one.kind for one in held.left))
        more = f", then check again: other faults show then ({kinds})" if kinds else ""
        return describe(self.programs, held.fix) + more, held.fix

    def _find(self, finding: Finding) -> tuple[TriedFix | None, str]:
        """The first fix that holds and leaves nothing new, else the first that improves; or why
        there is none."""
        key, shows = _key(finding), ""
        for outcome in self._held:
            if self._is_clean(outcome, key) or self._is_better(outcome, key):
                return outcome, ""
        better: TriedFix | None = None
        clean: TriedFix | None = None
        tried: set[Fix] = set()
        level = list(finding.candidates)
        for _ in range(MAX_STEPS):
            following: list[Fix] = []
            for fix in level:
                if fix in tried or len(tried) >= MAX_TRIED or not self._may_try():
                    continue
                tried.add(fix)
                outcome = self._try(fix, key)
                if outcome is None:
                    continue
                if self._is_clean(outcome, key) and self._keeps_order(fix):
                    if finding.kind not in WEIGHED or not outcome.num_errors:
                        return outcome, ""
                    if clean is None or outcome.num_errors < clean.num_errors:
                        clean = outcome
                if better is None and self._is_better(outcome, key):
                    better = outcome
                # Where accesses race, reads are not reported as uninitialized: now they are.
                if not shows and key not in outcome.keys:
                    if {one.kind for one in outcome.left} == {"uninitialized"}:
                        shows = f"what then shows: {outcome.left[0].message}"
                following += _extended(outcome)
            if clean is not None:
                return clean, ""
            level = following
        if not tried:
            return None, "the Programs are too large to try edits"
        return better, shows or "no edit that was tried does this alone"

    def _try(self, fix: Fix, key: Key) -> TriedFix | None:
        try:
            edited = apply(self.programs, fix)
            report = self._checked(edited.programs)
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

    def _keeps_order(self, fix: Fix) -> bool:
        """Whether the Programs still run one op after another, as they are listed, if they did."""
        if self._in_order is None:
            self._in_order = self._runs_in_order(())
        return not self._in_order or self._runs_in_order(fix)

    def _runs_in_order(self, fix: Fix) -> bool:
        programs = apply(self.programs, fix).programs
        try:
            return "deadlock" not in self._checked(programs, in_order=True).kinds()
        except InterlaceError:
            return False

    def _checked(self, programs: Sequence[Program], **given: bool) -> Report:
        """A check, which counts as one of the tries."""
        self._unchecked -= self._cost
        began = time.thread_time()
        try:
            return self.again(programs, **given)
        finally:
            spent = time.thread_time() - began
            self._left_s, self._longest_s = self._left_s - spent, max(self._longest_s, spent)

    def _may_try(self) -> bool:
        return self._unchecked >= self._cost and self._left_s >= self._longest_s

    def _is_clean(self, outcome: TriedFix, key: Key) -> bool:
        """Whether the finding is gone, and nothing is wrong that was not wrong before."""
        if key in outcome.keys or (self._all_listed and not outcome.keys <= self.keys):
            return False
        return self._has_fewer(outcome, outcome.keys)

    def _is_better(self, outcome: TriedFix, key: Key) -> bool:
        """Whether the finding is gone, less is wrong, and nothing of a new kind is; once a deadlock
        is gone, other faults may show behind it.
        """
        if key in outcome.keys:
            return False
        fresh = outcome.keys - self.keys
        if key[0] == "deadlock":
            own = key[1] | {(edit.program, edit.index) for edit in outcome.fix}
            return all(kind != "deadlock" and not ops & own for kind, ops in fresh)
        return self._has_fewer(outcome, fresh)

    def _has_fewer(self, outcome: TriedFix, keys: frozenset[Key]) -> bool:
        """Whether there are fewer errors, and these are of kinds that there were before."""
        kinds = {kind for kind, _ in self.keys}
        return outcome.num_errors < self.num_errors and all(kind in kinds for kind, _ in keys)


def with_fixes(report: Report, programs: Sequence[Program], again: Callable[..., Report]) -> Report:
    """The Report with errors that choose their fixes when asked; `again` checks Programs alike."""
    trials = Trials(programs, report, again)
    findings = tuple(
        dataclasses.replace(finding, chosen=partial(trials.choose, k))
        if finding.level == "error"
        else finding
        for k, finding in enumerate(report.findings)
    )
    return dataclasses.replace(report, findings=findings)


def _key(finding: Finding, origins: Sequence[Sequence[int | None]] | None = None) -> Key:
    """What a finding is about; of edited Programs, in terms of those before."""
    ops: set[tuple[int, int | None]] = set()
    for program, index in [op.at for op in finding.ops]:
        begin = index < 0  # of the run, before the first op
        ops.add((program, index if origins is None or begin else origins[program][index]))
    return finding.kind, frozenset(ops)


def _extended(outcome: TriedFix) -> list[Fix]:
    """The fix with what the check after it proposes for the first fault that is left."""
    found: list[Fix] = []
    for fix in outcome.left[0].candidates if outcome.left else ():
        mapped = [_mapped(edit, outcome.origins[edit.program]) for edit in fix]
        new = [edit for edit in mapped if edit is not None]
        if len(new) == len(fix):
            again = {(edit.program, edit.index) for edit in new if edit.index is not None}
            kept = [edit for edit in outcome.fix if (edit.program, edit.index) not in again]
            found.append((*kept, *new))
    return found


def _mapped(edit: Edit, origins: Sequence[int | None]) -> Edit | None:
    """An edit of edited Programs as one of those before; None where it is about an added op."""
    index = None if edit.index is None else origins[edit.index]
    anchor = None if edit.anchor is None else origins[edit.anchor]
    if (index is None) != (edit.index is None) or (anchor is None) != (edit.anchor is None):
        return None
    return dataclasses.replace(edit, index=index, anchor=anchor)
