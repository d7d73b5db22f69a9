"""Findings without the verifier: waits that order nothing, results never waited for.

findings = list(plain_findings(trace, rank=0, any_order=False, joined=True))
"""

from __future__ import annotations

from collections.abc import Iterator

from interlace.verify.report import Finding, OpRef
from interlace_check.graphs.findings import at_place, reference, stream_words
from interlace_check.graphs.steps import MAIN, Trace

_WORK = ("compute", "start", "finish", "wait", "wait_stream")


def plain_findings(trace: Trace, rank: int, any_order: bool, joined: bool) -> Iterator[Finding]:
    """The findings of one graph that need no order of its nodes but the one listed."""
    for wait, record in trace.early:
        message = (
            f"{wait.name} waits for an event that the graph records only later, in {record.name}: "
            f"it waits for nothing, or for what an earlier call recorded"
        )
        ops = (at_place(wait, rank, "waits"), at_place(record, rank, "records the event"))
        yield Finding("early-wait", message, ops, f"put {record.name} before {wait.name}")
    yield from _never_waited(trace, rank, joined)
    for place, event in trace.unowned:
        message = (
            f"{place.name} waits for event {event}, which the graph does not record: what it "
            f"orders lies outside of the graph and is not counted"
        )
        yield _remark("outside-event", message, at_place(place, rank, "waits"))
    yield from _idle(trace, rank)
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
        op = at_place(place, rank, "orders by its place alone")
        yield _remark("unanchored", message, op)


def _never_waited(trace: Trace, rank: int, joined: bool) -> list[Finding]:
    """Communication that nothing waits for; returned results do not count if joined later."""
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


def _idle(trace: Trace, rank: int) -> Iterator[Finding]:
    """Waits for a stream that has done nothing, or for the own stream."""
    busy = {MAIN}
    recorded: dict[int, tuple[str, bool]] = {}
    for step in trace.steps:
        on, worked = None, True
        if step.kind == "wait_stream":
            on, worked = step.other, step.other in busy
        elif step.kind == "wait" and step.event is not None:
            on, worked = recorded.get(step.event, (None, True))
        if on is not None and (on == step.stream or not worked):
            why = "its own stream" if on == step.stream else f"{on}, which has done nothing yet"
            message = (
                f"{step.place.name} makes {stream_words(step.stream)} wait for {why}: it orders "
                f"nothing"
            )
            yield _remark("idle-wait", message, reference(step, rank, "waits"))
        if step.kind == "record" and step.event is not None:
            recorded[step.event] = (step.stream, step.stream in busy)
        if step.kind in _WORK:
            busy.add(step.stream)


def _remark(kind: str, message: str, op: OpRef) -> Finding:
    return Finding(kind, message, (op,), "", "remark")
