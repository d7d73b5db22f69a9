"""What is wrong in a recorded run, in the run's own words.

    report = interlace.check_recorded("dumps")
    print(report)                  # for a terminal
    json.dumps(report.to_json())   # for a script; the schema has a version

A finding names the ops by rank, record and source line, the ranks that wait, and those that they
wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from interlace.verify.report import Report
from interlace_check.recorded.programs import Recorded

MAX_FINDINGS = 100
"""More findings than these are counted and not listed."""
SCHEMA = 1
"""Version of the JSON that `RecordedReport.to_json` gives."""
KINDS: dict[str, str] = {
    "mismatch": "members of a collective, or the two ends of a message, that disagree",
    "cycle": "ranks that wait for each other",
    "launch-order": "collectives of two groups that ranks launched in opposite order",
    "stalled": "Interlace's own Programs, under way on some ranks and held up on others",
    "missing": "an op that ranks wait for, and that another rank did not issue",
    "no-dump": "a rank that left no dump",
    "unknown-group": "an op of which it is not known who should have issued it",
    "unfinished": "an op that all ranks issued alike, and that had not ended",
}
"""The kinds of finding, the likeliest causes first, and what each means."""


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """An op in a finding, as its rank recorded it."""

    rank: int
    text: str
    role: str = ""
    record: int | None = None
    """Its record_id; None for an op that its rank did not record."""
    state: str = ""
    loc: str = ""
    """The source line that issued it, where the dump holds stacks."""

    def to_json(self) -> dict[str, Any]:
        """The op as plain data."""
        return {
            "rank": self.rank,
            "text": self.text,
            "role": self.role,
            "record": self.record,
            "state": self.state,
            "loc": self.loc,
        }

    def __str__(self) -> str:
        record = "" if self.record is None else f", record {self.record}"
        state = f" [{self.state}]" if self.state else ""
        origin = f"   from {self.loc}" if self.loc else ""
        return f"  rank {self.rank}{record}: {self.role}{state}{origin}\n      {self.text}"


@dataclass(frozen=True, slots=True)
class RecordedFinding:
    """One thing that is wrong."""

    kind: str
    message: str
    ops: tuple[RecordedOp, ...] = ()
    fix: str = ""
    waiting: tuple[int, ...] = ()
    """Ranks that wait."""
    missing: tuple[int, ...] = ()
    """Ranks that they wait for; of a mismatch, those that differ from most."""
    follows: bool = False
    """Whether another finding explains it: the ranks that it waits for wait themselves."""

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "kind": self.kind,
            "message": self.message,
            "fix": self.fix,
            "waiting": list(self.waiting),
            "missing": list(self.missing),
            "follows": self.follows,
            "ops": [op.to_json() for op in self.ops],
        }

    def __str__(self) -> str:
        head = f"{'follows' if self.follows else 'error'}: {self.kind}: {self.message}"
        fix = [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join([head, *map(str, self.ops), *fix])


@dataclass(frozen=True, slots=True)
class RecordedReport:
    """The outcome of reading a recorded run."""

    findings: tuple[RecordedFinding, ...]
    assumed: tuple[str, ...]
    """What the dumps do not say, and what was taken for granted instead."""
    num_ranks: int
    num_ops: int
    """Records of all ranks."""
    recorded: Recorded = field(repr=False)
    """The Programs of what was open, for `interlace.check` and to be read."""
    num_left_out: int = 0
    """Further findings, which are not listed."""
    verdict: Report | None = field(default=None, repr=False)
    """What the verifier says of the Programs; None where nothing was open."""
    seconds: float = field(default=0.0, compare=False)

    @property
    def complete(self) -> bool:
        """Whether all that was recorded fits together and had ended."""
        return not self.findings

    def kinds(self) -> frozenset[str]:
        """The kinds of the findings that no other explains."""
        return frozenset(one.kind for one in self.findings if not one.follows)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `schema` is its version."""
        return {
            "schema": SCHEMA,
            "complete": self.complete,
            "num_ranks": self.num_ranks,
            "num_ops": self.num_ops,
            "seconds": self.seconds,
            "num_left_out": self.num_left_out,
            "assumed": list(self.assumed),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def __str__(self) -> str:
        size = f"{self.num_ranks} ranks, {self.num_ops} records, {self.seconds * 1e3:.0f} ms"
        roots = sum(not one.follows for one in self.findings)
        verdict = f"{roots} fault{'s' if roots != 1 else ''}"
        if self.complete:
            verdict = "nothing to report: all that was recorded fits together and had ended"
        parts = [f"{verdict} ({size})", *map(str, self.findings)]
        if self.num_left_out:
            parts.append(f"... and {self.num_left_out} more findings")
        if self.assumed:
            parts.append("\n".join(["assumed:", *(f"  {one}" for one in self.assumed)]))
        return "\n\n".join(parts)


def in_order(findings: Iterable[RecordedFinding]) -> list[RecordedFinding]:
    """Those that explain others first."""
    order = list(KINDS)
    return sorted(findings, key=lambda one: (one.follows, order.index(one.kind)))
