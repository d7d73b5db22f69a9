"""Report of a check of a pipeline schedule, in the schedule's own words.

report = interlace.check_pipelining("schedule.csv")
print(report)
report.verdicts["pair"]                # whether it is sound with one queue a pair of ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from interlace.verify.report import Finding, OpRef, Report
from interlace_check.pipelining.schedule import Placed

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
    "loss-order": "forwards of the last stage out of order: torch takes losses by position",
}
"""The kinds of finding and what each means."""


@dataclass(frozen=True, slots=True)
class PipeliningFinding(Finding):
    """Fault of a pipeline schedule. Its ops are actions: `line` is the cell in the rank's row,
    counted from 0; `text` is the token."""

    models: tuple[str, ...] = tuple(MODELS)
    """The models of communication in which it happens."""

    def to_json(self) -> dict[str, Any]:
        return {**Finding.to_json(self), "models": list(self.models)}

    def __str__(self) -> str:
        only = "" if len(self.models) == len(MODELS) else f" [{', '.join(self.models)}]"
        head = f"{self.level}: {self.kind}{only}: {self.message}"
        return f"{head}\n  fix: {self.fix}" if self.fix else head


def fault(
    kind: str,
    message: str,
    fix: str,
    *places: Placed,
    models: tuple[str, ...] = tuple(MODELS),
) -> PipeliningFinding:
    """Finding about actions at their places."""
    ops = tuple([OpRef(place.rank, place.index, "", str(place.action)) for place in places])
    return PipeliningFinding(kind, message, ops, fix, models=models)


@dataclass(frozen=True, slots=True)
class PipeliningReport(Report):
    """Report of a check of a pipeline schedule; its ops are actions."""

    findings: tuple[PipeliningFinding, ...]
    """Faults, each with the models under which it is one."""
    num_stages: int = 0
    """Stages of the pipeline, over all ranks."""
    num_microbatches: int = 0
    """Microbatches of a step."""

    @property
    def verdicts(self) -> dict[str, bool]:
        """True for each model under which the schedule is right; it is sound if all are True."""
        unsound = {name for one in self.findings for name in one.models}
        return {name: name not in unsound for name in MODELS}

    def to_json(self) -> dict[str, Any]:
        return {
            **Report.to_json(self),
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "models": [
                {"name": name, "means": MODELS[name], "sound": sound}
                for name, sound in self.verdicts.items()
            ],
        }

    def head(self) -> str:
        size = (
            f"{self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches, {self.num_ops} actions, "
            f"{self.seconds * 1e3:.0f} ms"
        )
        lines = [
            f"  {'sound  ' if sound else 'unsound'}  {MODELS[name]}"
            for name, sound in self.verdicts.items()
        ]
        return "\n".join([f"{self.verdict()} ({size})", *lines])
