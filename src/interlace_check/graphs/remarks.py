"""What a graph shows without the verifier: waits that order nothing, results never waited for.

told = plain_findings(trace, rank=0, order="listed", joined=True)
"""

from __future__ import annotations

from interlace.verify.report import Finding, OpRef
from interlace_check.graphs.findings import at_place, reference, stream_words
from interlace_check.graphs.steps import MAIN, Step, Trace

_WORK = ("compute", "start", "finish", "wait", "wait_stream")


def plain_findings(trace: Trace, rank: int, any_order: bool, joined: bool) -> list[Finding]:
    """The findings of one graph that need no order of its nodes but the one listed."""
    found = [
        Finding(
            "early-wait",
            f"{wait.name} waits for an event that the graph records only later, in {record.name}: "
            f"it waits for nothing, or for what an earlier call recorded",
            (at_place(wait, rank, "waits"), at_place(record, rank, "records the event")),
            f"put {record.name} before {wait.name}",
        )
        for wait, record in trace.early
    ]
    found += _never_waited(trace, rank, joined)
    for place, event in trace.unowned:
        found.append(
            _remark(
                "outside-event",
                f"{place.name} waits for event {event}, which the graph does not record: what it "
                f"orders lies outside of the graph and is not counted",
                at_place(place, rank, "waits"),
            )
        )
    found += _idle(trace, rank)
    if trace.assumed is not None:
        found.append(
            Finding(
                "current-stream",
                f"stream {trace.assumed} is taken for the caller's: syncs name it, and no node is "
                f"annotated with it",
                (),
                "say which indices are the caller's stream: current=(0, ...)",
                "remark",
            )
        )
    if trace.bare_syncs and not any_order:
        place = trace.bare_syncs[0]
        more = f" (and {len(trace.bare_syncs) - 1} more)" if len(trace.bare_syncs) > 1 else ""
        found.append(
            _remark(
                "unanchored",
                f"no data goes through {place.name}{more}: it is right where nodes run as listed, "
                f"and a scheduler such as Inductor's may move it; order='any' checks that",
                at_place(place, rank, "orders by its place alone"),
            )
        )
    return found


def _never_waited(trace: Trace, rank: int, joined: bool) -> list[Finding]:
    """What nothing waits for; where results are joined later, but for what is returned."""
    waited = {begun for step in trace.steps for begun in step.finishes}
    return [
        Finding(
            "never-waited",
            f"nothing waits for {step.place.name}",
            (reference(step, rank, f"begins: {step.issue.kind}"),),
            f"wait for its result: wait_tensor({step.place.name})",
        )
        for number, step in enumerate(trace.steps)
        if step.issue is not None
        and number not in waited
        and (joined or not any(storage.kept for storage in step.makes))
    ]


def _idle(trace: Trace, rank: int) -> list[Finding]:
    """Waits for a stream that has done nothing, or for the own stream."""
    busy = {MAIN}
    recorded: dict[int, tuple[str, bool]] = {}
    found: list[Finding] = []
    for step in trace.steps:
        on, worked = _awaited(step, recorded, busy)
        if on is not None and (on == step.stream or not worked):
            why = "its own stream" if on == step.stream else f"{on}, which has done nothing yet"
            found.append(
                _remark(
                    "idle-wait",
                    f"{step.place.name} makes {stream_words(step.stream)} wait for {why}: it "
                    f"orders nothing",
                    reference(step, rank, "waits"),
                )
            )
        if step.kind == "record" and step.event is not None:
            recorded[step.event] = (step.stream, step.stream in busy)
        if step.kind in _WORK:
            busy.add(step.stream)
    return found


def _awaited(
    step: Step, recorded: dict[int, tuple[str, bool]], busy: set[str]
) -> tuple[str | None, bool]:
    """The stream that a step waits for, and whether it has done anything."""
    if step.kind == "wait_stream":
        return step.other, step.other in busy
    if step.kind == "wait" and step.event in recorded:
        return recorded[step.event]
    return None, True


def _remark(kind: str, message: str, op: OpRef) -> Finding:
    return Finding(kind, message, (op,), "", "remark")
