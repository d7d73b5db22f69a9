"""Findings of the verifier about a graph's Programs, in the graph's own words, and those that need
no verifier.

explainer = GraphExplainer(trace, program, any_order=False)
[explainer.finding(found) for found in report.errors]
list(plain_findings(trace, joined=True))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from interlace.verify.report import Finding, OpRef
from interlace_check.graphs.programs import GraphProgram, StepOrigin
from interlace_check.graphs.reading.tensors import Storage
from interlace_check.graphs.steps import MAIN, GraphStep, Place, Trace

KINDS: dict[str, str] = {
    "race": "two nodes on different streams touch the same bytes, at least one writes, in no order",
    "unwaited": "a collective's result is read, or its argument written, before its `wait_tensor`",
    "never-waited": "a collective for which nothing waits",
    "not-forked": "a graph input is touched on a stream that does not wait for the caller's",
    "not-joined": "a result is returned, and the caller's stream does not wait for it",
    "written-back": "a graph input is written, and the caller's stream does not wait for that",
    "freed-early": "a tensor's memory may be used again while another stream still touches it",
    "early-wait": "a wait for an event that the graph records only later: it orders nothing",
    "outside-event": "a wait for an event that the graph does not record (a remark)",
    "current-stream": "an index that was taken for the caller's stream (a remark)",
}
"""The kinds of finding in a graph, and what each means."""


class GraphExplainer:
    """Findings of the verifier about a graph's Program, as findings about the graph."""

    def __init__(self, trace: Trace, program: GraphProgram, any_order: bool) -> None:
        self.trace, self.program, self.any_order = trace, program, any_order

    def finding(self, found: Finding) -> Finding:
        """One finding."""
        if len(found.ops) != 2 or found.kind not in ("race", "use-after-free"):
            sides = map(self._side, found.ops)
            shown = tuple(side.shown for side in sides if side.shown is not None)
            return Finding(found.kind, found.message, shown, found.words)
        one, two = sorted(map(self._side, found.ops), key=lambda side: side.place)
        shown = tuple(side.shown for side in (one, two) if side.shown is not None)
        kind, message, fix = _beside_caller(one, two) or _between_steps(one, two)
        if self.any_order:
            message += (
                "; no dependence of the graph keeps the node order, and a scheduler such as "
                "Inductor's may leave it"
            )
            fix = f"{fix}, and thread what it touches through the wait (control_deps)"
        return Finding(kind, message, shown, fix)

    def _side(self, op: OpRef) -> Side:
        index, origins, storage = op.at[1], self.program.origins, None
        origin = origins[index] if 0 <= index < len(origins) else StepOrigin("exit")
        if op.buffer.startswith("b") and op.buffer[1:].isdigit():
            storage = self.trace.storages[int(op.buffer[1:])]
        step = self.trace.steps[origin.number] if origin.role == "step" else None
        return Side(origin.role, op.role.partition(" ")[0], step, storage)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two accesses of a race."""

    role: str
    verb: str
    step: GraphStep | None
    """None for the caller's part, and for memory that is used again."""
    storage: Storage | None

    @property
    def begins(self) -> bool:
        """True for a collective or a message, which continues after its node."""
        return self.step is not None and self.step.issue is not None

    @property
    def place(self) -> int:
        """Sort key: begun communication first, writer before reader; the caller's part last."""
        if self.step is None:
            return 3
        return 2 if not self.begins else 0 if self.verb == "writes" else 1

    @property
    def tensor(self) -> str:
        return "a tensor" if self.storage is None else self.storage.maker

    @property
    def name(self) -> str:
        return self.role if self.step is None else self.step.place.name

    @property
    def stream(self) -> str:
        return stream_words(MAIN if self.step is None else self.step.stream)

    @property
    def shown(self) -> OpRef | None:
        """The access as a finding shows it; None for the caller's part."""
        tensor = "" if self.storage is None else self.storage.maker
        if self.step is None:
            if self.role != "free" or self.storage is None:
                return None
            text = f"(memory of {tensor})"
            return OpRef(0, 0, self.storage.stream, text, "is used again")
        role, issue = f"{self.verb} {tensor}".strip(), self.step.issue
        if issue is None:
            return reference(self.step, role)
        role += f" (asynchronously, {issue.kind})"
        return at_place(self.step.place, role, f"group {issue.group!r}")


def _beside_caller(one: Side, two: Side) -> tuple[str, str, str] | None:
    """Kind, message and fix of a race between a step and what the caller or the allocator does."""
    name, tensor, stream = one.name, one.tensor, one.stream
    join = f"let the caller's stream wait for {stream} after {name}"
    if two.role == "exit" and one.begins:
        message = f"{tensor} is returned, and nothing waited for {name}, which fills it"
        return "unwaited", message, f"return what wait_tensor gives for {name}"
    if two.role == "exit" and one.storage is not None and one.storage.origin == "input":
        message = (
            f"{name} writes the graph input {tensor} on {stream}, and the caller's stream does not "
            f"wait for it before the graph returns"
        )
        return "written-back", message, join
    if two.role == "exit":
        message = (
            f"{tensor} is returned, and the caller's stream does not wait for {name}, which writes "
            f"it on {stream}"
        )
        return "not-joined", message, join
    if two.role in ("entry", "constant"):
        message = (
            f"{name} touches the graph input {tensor} on {stream}, which does not wait for the "
            f"caller's stream, where it may still be in the making"
        )
        fix = (
            f"let {stream} wait for the caller's stream before {name}, or check with "
            f"inputs='ready' if the caller has waited"
        )
        return "not-forked", message, fix
    if two.role == "free":
        on = stream_words(MAIN if two.storage is None else two.storage.stream)
        message = (
            f"the memory of {two.tensor} may be used again on {on} while {name} still {one.verb} "
            f"it on {stream}"
        )
        fix = (
            f"let {on} wait for {name} before {two.tensor} goes (sync_dealloc), or record_stream it"
        )
        return "freed-early", message, fix
    return None


def _between_steps(one: Side, two: Side) -> tuple[str, str, str]:
    if one.begins and (not two.begins or one.verb == "writes"):
        message = (
            f"{two.name} {two.verb} {one.tensor}, and does not wait for {one.name}, which "
            f"{one.verb} it asynchronously"
        )
        fix = f"use what wait_tensor gives for {one.name}, on the stream of {two.name}"
        return "unwaited", message, fix
    message = (
        f"nothing orders {one.name} on {one.stream}, which {one.verb} {one.tensor}, and {two.name} "
        f"on {two.stream}, which {two.verb} it"
    )
    fix = "record an event after the one and wait for it on the stream of the other, before it"
    return "race", message, fix


def reference(step: GraphStep, role: str) -> OpRef:
    """A step in a finding. Its `line` is the node's place in the graph, from 1."""
    return at_place(step.place, role, step.stream)


def at_place(place: Place, role: str, stream: str = "") -> OpRef:
    """A node in a finding."""
    return OpRef(0, place.number, stream, f"{place.name} = {place.text}", role, loc=place.loc)


def stream_words(stream: str) -> str:
    """A stream in a sentence."""
    return "the caller's stream" if stream == MAIN else stream


# Without the verifier: waits for what comes later, results never waited for


def plain_findings(trace: Trace, joined: bool) -> Iterator[Finding]:
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
