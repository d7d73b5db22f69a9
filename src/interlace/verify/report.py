"""The outcome of a check: findings, each with its ops and its fix, and the Report of them.

    report = check(program)
    print(report)                  # for a terminal
    json.dumps(report.to_json())   # for a script; the schema has a version
    report.raise_if_unsound()      # for a pipeline: SoundnessError, with the counterexample

A finding names its ops by rank, line and text. A line is the op's place in the Program, counted
from 1; the place after the last op is the return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from interlace.errors import SoundnessError
from interlace.ir.program import Program
from interlace.ir.sizes import FIXED, SizeClass

SCHEMA = 1
"""Version of the JSON that `Report.to_json` gives; it grows when a field changes its meaning."""

MAX_FINDINGS = 100
"""More faults than these are counted and not listed."""
MAX_FAULTS = 10_000
"""After so many different faults, accesses are compared no more."""
KINDS: dict[str, str] = {
    "race": "two accesses of the same bytes, at least one of them a write, in no order",
    "deadlock": "ops that wait for each other, or for something that never comes",
    "mismatch": "members of a collective, or the two ends of a message, that disagree",
    "use-after-free": "an access that comes after the buffer was freed",
    "use-before-alloc": "an access that comes before the buffer has its storage",
    "double-free": "a buffer freed twice",
    "bad-free": "a Free of what the Program neither allocated nor was given",
    "leak": "a symmetric buffer that a run does not free",
    "uninitialized": "a read of bytes that nothing wrote before",
    "in-place": "an op whose operands share bytes, in a form that it does not allow",
    "scale": "rows of FP8 that are multiplied by the scale of other rows",
    "event": "a wait for an event that was not recorded before",
    "signal": "a signal whose values do not grow in one order",
    "result": "a result that lives in memory which the next run uses again",
    "unexpected-notify": "a signal that is raised and that nobody awaits (a remark)",
    "launch-order": "collectives of two queues that ranks launch in opposite order (a remark)",
    "unknown-operator": "a call of what Interlace or PyTorch does not know (a remark)",
}
"""The kinds of finding and what each means."""


@dataclass(frozen=True, slots=True)
class OpRef:
    """An op in a finding: where it stands, what it says, and what it does to which bytes."""

    rank: int
    line: int
    stream: str
    text: str
    role: str = ""
    """Role of the op in the finding: `writes full`, `waits for rank 1`, ..."""
    buffer: str = ""
    bytes: tuple[int, int] | None = None
    """The byte range of the buffer that it touches: first byte, and the byte after the last."""
    loc: str = ""
    """The module and source line that the op comes from."""
    context: tuple[tuple[int, str], ...] = ()
    """The op's line and its neighbours, as (line, text)."""
    at: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)
    """The index of the Program in the set, and of the op in the Program."""

    def to_json(self) -> dict[str, Any]:
        """The op as plain data."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        plain["bytes"] = None if self.bytes is None else list(self.bytes)
        plain["context"] = [{"line": line, "text": text} for line, text in self.context]
        return plain

    def __str__(self) -> str:
        extent = f" [bytes {self.bytes[0]}:{self.bytes[1]}]" if self.bytes is not None else ""
        stream = f" ({self.stream})" if self.stream else ""
        origin = f"   from {self.loc}" if self.loc else ""
        head = f"  rank {self.rank}, line {self.line}{stream}: {self.role}{extent}{origin}"
        if not self.context:
            return f"{head}\n      {self.text}"
        width = len(str(self.context[-1][0]))
        lines = [
            f"    {'>' if line == self.line else ' '} {line:>{width}} | {text}"
            for line, text in self.context
        ]
        return "\n".join([head, *lines])


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its kind, what happens, the ops that make it, and how to fix it."""

    kind: str
    """`race`, `deadlock`, `lifetime`, ... (docs/explanation/semantics.md)."""
    message: str
    """The fault in a sentence."""
    ops: tuple[OpRef, ...] = ()
    """The ops that make it, each with its rank, line and text."""
    words: str = ""
    """The fix where no change of the Programs is known to be one."""
    level: str = "error"
    """`error`, or `remark` for what is odd and harmless."""
    ranks: tuple[int, ...] = ()
    """The ranks on which the same ops make the same fault."""
    proved: Callable[[Finding], tuple[str, tuple[Program, ...]]] | None = field(
        default=None, compare=False, repr=False
    )
    """Proves a change that may fix it, the first time that it is called: the fix in words, and its
    Programs."""

    @property
    def fix(self) -> str:
        """The fix in words: changes after which a check found the fault gone, or else advice."""
        return self.words if self.proved is None else self.proved(self)[0]

    @property
    def fixed(self) -> tuple[Program, ...]:
        """The Programs with the changes that `fix` describes; none where it is advice."""
        return () if self.proved is None else self.proved(self)[1]

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "kind": self.kind,
            "level": self.level,
            "message": self.message,
            "fix": self.fix,
            "fix_tried": bool(self.fixed),
            "ranks": list(self.ranks),
            "ops": [op.to_json() for op in self.ops],
        }

    def __str__(self) -> str:
        head = f"{self.level}: {self.kind}: {self.message}"
        if set(self.ranks) - {op.rank for op in self.ops}:
            head += f" (the same on ranks {', '.join(map(str, self.ranks))})"
        fix = [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join([head, *map(str, self.ops), *fix])


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Which ranks a check looked at for all: those of the folded teams do the same at their places.

    That they do is proved before it is used; semantics.md says how.
    """

    visited: tuple[int, ...]
    """The ranks that stand for all."""
    folded: tuple[str, ...]
    """The teams of which one rank stands for all."""

    def to_json(self) -> dict[str, Any]:
        """The symmetry as plain data."""
        return {each.name: list(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a check."""

    findings: tuple[Finding, ...]
    """Faults and remarks, the gravest first."""
    num_ops: int
    """Ops of all ranks, in one run."""
    num_ranks: int
    """The ranks that the Programs run on."""
    seconds: float = field(default=0.0, compare=False)
    """The time that the check took."""
    num_left_out: int = 0
    """Further faults that were found and are not listed; the search for races ends at 10,000."""
    sizes: SizeClass = FIXED
    """The sizes that it holds for, where Programs have named ones."""
    single: str = field(default="", compare=False)
    """Why it is for one size alone, where it is and Programs have named ones."""
    symmetry: Symmetry | None = field(default=None, compare=False)
    """Which ranks were looked at for all; None: every rank was."""
    in_order: bool = False
    """The check was of the twin that runs the ops of a rank one after another, as listed."""

    @property
    def num_visited(self) -> int:
        """The ranks that were looked at."""
        return self.num_ranks if self.symmetry is None else len(self.symmetry.visited)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the programs unsound."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def sound(self) -> bool:
        """True if no interleaving of the ranks can go wrong."""
        return not self.errors

    def kinds(self) -> frozenset[str]:
        """The kinds of the errors."""
        return frozenset(finding.kind for finding in self.errors)

    def raise_if_unsound(self) -> None:
        """Returns if the Programs are sound.

        Raises:
            SoundnessError: they are not; the message has the counterexamples.
        """
        if not self.sound:
            raise SoundnessError(str(self), self.errors)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `schema` is its version."""
        return {
            "schema": SCHEMA,
            "sound": self.sound,
            "num_ranks": self.num_ranks,
            "num_ops": self.num_ops,
            "num_visited": self.num_visited,
            "symmetry": None if self.symmetry is None else self.symmetry.to_json(),
            "seconds": self.seconds,
            "num_left_out": self.num_left_out,
            "sizes": list(self.sizes.assumptions()),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def head(self) -> str:
        """The verdict, and what was checked."""
        ranks = f"{self.num_ranks:,} ranks"
        if self.symmetry is not None:
            folded = " and ".join(filter(None, self.symmetry.folded))
            ranks += f" by symmetry of {folded}: {self.num_visited:,} visited"
        size = f"{ranks}, {self.num_ops} ops, {self.seconds * 1e3:.0f} ms"
        verdict = self.verdict()
        if self.in_order:
            verdict = verdict.replace("sound", "sound in order, one op after another", 1)
        if self.sizes.sizes:
            verdict += f" where {self.sizes or 'sizes are what they may be'}"
        return f"{verdict} ({size})"

    def verdict(self) -> str:
        """`sound`, or the number of faults."""
        count = len(self.errors) + self.num_left_out
        most = " or more" if count >= MAX_FAULTS else ""
        return f"unsound: {count} fault{'s' if count != 1 else ''}{most}" if count else "sound"

    def __str__(self) -> str:
        more = [f"... and {self.num_left_out} more of the same kinds"] if self.num_left_out else []
        return "\n\n".join([self.head(), *map(str, self.findings), *more])
