"""Report of a recorded run, in the run's own words.

    report = interlace.check_recorded("dumps")
    print(report)                  # for a terminal
    json.dumps(report.to_json())   # for a script

A finding names the ops by rank, record and source line, the ranks that wait, and those that they
wait for. Where another finding explains it, its level is `follows`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from interlace.ir.program import Program
from interlace.verify.report import Finding, OpRef, Report

KINDS: dict[str, str] = {
    "mismatch": "members of a collective, or the two ends of a message, that disagree",
    "cycle": "ranks that wait for each other",
    "launch-order": "collectives of two groups that ranks launched in opposite order",
    "missing": "an op that ranks wait for, and that another rank did not issue",
    "no-dump": "a rank that left no dump",
    "unfinished": "an op that all ranks issued alike, and that had not ended",
}
"""The kinds of finding, the likeliest causes first, and what each means."""


@dataclass(frozen=True, slots=True)
class RecordedOp(OpRef):
    """An op in a finding, as its rank recorded it."""

    record: int | None = None
    """Its record_id; None for an op that its rank did not record."""
    state: str = ""

    def __str__(self) -> str:
        record = "" if self.record is None else f", record {self.record}"
        state = f" [{self.state}]" if self.state else ""
        origin = f"   from {self.loc}" if self.loc else ""
        return f"  rank {self.rank}{record}: {self.role}{state}{origin}\n      {self.text}"


@dataclass(frozen=True, slots=True)
class RecordedFinding(Finding):
    """Cause of a hang, or (level `follows`) a consequence of one."""

    ops: tuple[RecordedOp, ...] = ()
    waiting: tuple[int, ...] = ()
    """Ranks that wait."""
    missing: tuple[int, ...] = ()
    """Ranks that they wait for; of a mismatch, those that differ from most."""

    def to_json(self) -> dict[str, Any]:
        both = {"waiting": list(self.waiting), "missing": list(self.missing)}
        return {**Finding.to_json(self), **both}


def unrecorded(rank: int, text: str, role: str, loc: str = "") -> RecordedOp:
    """An op that its rank did not record."""
    return RecordedOp(rank, 0, "", text, role, loc=loc)


def fault(
    kind: str,
    message: str,
    ops: Iterable[RecordedOp],
    fix: str,
    waiting: Iterable[int] = (),
    missing: Iterable[int] = (),
    follows: bool = False,
) -> RecordedFinding:
    """Finding about recorded ops."""
    return RecordedFinding(
        kind,
        message,
        tuple(ops),
        fix,
        "follows" if follows else "error",
        waiting=tuple(waiting),
        missing=tuple(missing),
    )


@dataclass(frozen=True, slots=True)
class RecordedReport(Report):
    """Report of a recorded run: sound if all that was recorded fits together and had ended."""

    findings: tuple[RecordedFinding, ...]
    assumed: tuple[str, ...] = ()
    """Facts that the dumps do not say, and what was assumed instead."""
    programs: tuple[Program, ...] = field(default=(), repr=False)
    """The order of what was open, for `interlace.check` and to be read."""

    def to_json(self) -> dict[str, Any]:
        return {**Report.to_json(self), "assumed": list(self.assumed)}

    def head(self) -> str:
        size = f"{self.num_ranks} ranks, {self.num_ops} records, {self.seconds * 1e3:.0f} ms"
        count = len(self.errors)
        verdict = f"{count} fault{'s' if count != 1 else ''}"
        if self.sound:
            verdict = "nothing to report: all that was recorded fits together and had ended"
        return f"{verdict} ({size})"

    def __str__(self) -> str:
        assumed = "\n".join(["assumed:", *(f"  {one}" for one in self.assumed)])
        return Report.__str__(self) + (f"\n\n{assumed}" if self.assumed else "")


def in_order(findings: Sequence[RecordedFinding]) -> list[RecordedFinding]:
    """Findings that explain others first; where each follows from another, none is explained."""
    if all(one.level == "follows" for one in findings):
        findings = [dataclasses.replace(one, level="error") for one in findings]
    order = list(KINDS)
    return sorted(findings, key=lambda one: (one.level == "follows", order.index(one.kind)))
