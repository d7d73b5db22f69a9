"""Findings without the verifier: waits for what comes later, results never waited for.

findings = list(plain_findings(trace, any_order=False, joined=True))
"""

from __future__ import annotations

from collections.abc import Iterator

from interlace.verify.report import Finding, OpRef
from interlace_check.graphs.findings import at_place, reference
from interlace_check.graphs.steps import Trace


def plain_findings(trace: Trace, any_order: bool, joined: bool) -> Iterator[Finding]:
    """The findings of one graph that need no order of its nodes but the one listed."""
    for wait, record in trace.early:
        message = (
            f"{wait.name} waits for an event that the graph records only later, in {record.name}: "
            f"it waits for nothing, or for what an earlier call recorded"
        )
        ops = (at_place(wait, "waits"), at_place(record, "records the event"))
        yield Finding("early-wait", message, ops, f"put {record.name} before {wait.name}")
    yield from _never_waited(trace, joined)
    for place, event in trace.unowned:
        message = (
            f"{place.name} waits for event {event}, which the graph does not record: what it "
            f"orders lies outside of the graph and is not counted"
        )
        yield _remark("outside-event", message, at_place(place, "waits"))
    if trace.assumed is not None:
        message = (
            f"stream {trace.assumed} is taken for the caller's: syncs name it, and no node is "
            f"annotated with it"
        )
        fix = "say which indices are the caller's stream: current=(0, ...)"
        yield Finding("current-stream", message, (), fix, "remark")
    if trace.bare_syncs and not any_order:
        place = trace.bare_syncs[0]
        more = f" (and {len(trace.bare_syncs) - 1} more)" if len(trace.bare_syncs) > 1 else ""
        message = (
            f"no data goes through {place.name}{more}: it is right where nodes run as listed, "
            f"and a scheduler such as Inductor's may move it; order='any' checks that"
        )
        op = at_place(place, "orders by its place alone")
        yield _remark("unanchored", message, op)


def _never_waited(trace: Trace, joined: bool) -> list[Finding]:
    """Communication that nothing waits for; returned results do not count if joined later."""
    waited = {begun for step in trace.steps for begun in step.finishes}
    return [
        Finding(
            "never-waited",
            f"nothing waits for {step.place.name}",
            (reference(step, f"begins: {step.issue.kind}"),),
            f"wait for its result: wait_tensor({step.place.name})",
        )
        for number, step in enumerate(trace.steps)
        if step.issue is not None
        and number not in waited
        and (joined or not any(storage.kept for storage in step.makes))
    ]


def _remark(kind: str, message: str, op: OpRef) -> Finding:
    return Finding(kind, message, (op,), "", "remark")
