"""What a check of a pipeline schedule finds: findings with the places in the schedule's own words.

report = interlace.check_pipelining("schedule.csv")
print(report)
report.verdicts["pair"]                # whether it is sound with one queue a pair of ranks
json.dumps(report.to_json())
report.raise_if_unsound()              # SoundnessError
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from interlace.errors import SoundnessError
from interlace_check.pipelining.schedule import Placed

SCHEMA = 1
"""Version of the JSON that `PipeliningReport.to_json` gives."""
MAX_FINDINGS = 100
"""More findings than these are counted and not listed."""

MODELS = {
    "rank": "one queue a rank: NCCL whose communicator was made at once (`device_id=`)",
    "pair": "one queue a pair of ranks: NCCL's un-batched isend and irecv, in both directions",
    "direction": "one queue a pair and direction: gloo, and torch's `pipeline_per_edge_p2p`",
}
"""The models of communication, and where they hold. Sends are rendezvous in all of them."""

KINDS = {
    "exchanged": "the n-th send between two ranks goes to a receive that is for another message",
    "unmatched": "a send without its receive, or a receive without its send",
    "deadlock": "actions that wait for each other, or for what never comes",
    "order": "an action before the one whose result it needs",
    "missing": "a computation that the schedule lacks",
    "duplicate": "an action that stands in the schedule twice",
    "placement": "an action on a rank that does not have the stage, or a message to nobody",
    "unused": "a receive that no computation takes",
    "send-wait": "a send that is never awaited, or awaited before it is issued",
    "loss-order": "forwards of the last stage out of order: torch takes losses by position",
    "reduce-grad": "a reduction of gradients that is missing, too early or done twice",
    "unshard": "UNSHARD and RESHARD that an FSDP module refuses",
    "format": "what torch's own loader refuses (a remark)",
}
"""The kinds of finding and what each means."""


@dataclass(frozen=True, slots=True)
class PipeliningFinding:
    """One fault: its kind, what happens and where, and how to fix it."""

    kind: str
    message: str
    places: tuple[Placed, ...] = ()
    fix: str = ""
    level: str = "error"
    """`error`, or `remark` for what does no harm in a run."""
    models: tuple[str, ...] = tuple(MODELS)
    """The models of communication in which it happens."""

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "kind": self.kind,
            "level": self.level,
            "message": self.message,
            "fix": self.fix,
            "models": list(self.models),
            "places": [
                {"rank": place.rank, "action": place.index, "token": str(place.action)}
                for place in self.places
            ],
        }

    def __str__(self) -> str:
        only = "" if len(self.models) == len(MODELS) else f" [{', '.join(self.models)}]"
        head = f"{self.level}: {self.kind}{only}: {self.message}"
        return f"{head}\n  fix: {self.fix}" if self.fix else head


@dataclass(frozen=True, slots=True)
class PipeliningReport:
    """The outcome of a check of a pipeline schedule."""

    findings: tuple[PipeliningFinding, ...]
    form: str
    """`compute_only`, `compute_comms`, or the name of a schedule of one stage a rank."""
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_actions: int
    seconds: float = field(default=0.0, compare=False)
    num_left_out: int = 0
    """Further errors that were found and are not listed."""

    @property
    def errors(self) -> tuple[PipeliningFinding, ...]:
        """The findings that make the schedule unsound."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def sound(self) -> bool:
        """Whether the schedule is right under every model of communication."""
        return not self.errors

    @property
    def verdicts(self) -> dict[str, bool]:
        """Whether the schedule is right, by model."""
        return {name: not any(name in one.models for one in self.errors) for name in MODELS}

    def kinds(self) -> frozenset[str]:
        """The kinds of the errors."""
        return frozenset(finding.kind for finding in self.errors)

    def raise_if_unsound(self) -> None:
        """Raises SoundnessError with the findings, unless the schedule is sound."""
        if not self.sound:
            raise SoundnessError(str(self), self.errors)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; `schema` is its version."""
        return {
            "schema": SCHEMA,
            "sound": self.sound,
            "form": self.form,
            "num_ranks": self.num_ranks,
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "num_actions": self.num_actions,
            "seconds": self.seconds,
            "num_left_out": self.num_left_out,
            "models": [
                {"name": name, "means": MODELS[name], "sound": sound}
                for name, sound in self.verdicts.items()
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }

    def __str__(self) -> str:
        size = (
            f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} "
            f"microbatches, {self.num_actions} actions, {self.seconds * 1e3:.0f} ms"
        )
        count = len(self.errors) + self.num_left_out
        verdict = "sound" if self.sound else f"unsound: {count} fault{'s' if count != 1 else ''}"
        lines = [
            f"  {'sound  ' if sound else 'unsound'}  {MODELS[name]}"
            for name, sound in self.verdicts.items()
        ]
        parts = ["\n".join([f"{verdict} ({self.form}: {size})", *lines])]
        parts += map(str, self.findings)
        if self.num_left_out:
            parts.append(f"... and {self.num_left_out} more")
        return "\n\n".join(parts)
