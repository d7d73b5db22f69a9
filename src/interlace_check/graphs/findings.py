"""Findings of the verifier about a graph's Programs, in the graph's own words.

words = GraphWords(traces, programs, any_order=False)
[words.finding(found) for found in report.findings]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.verify.report import Finding, OpRef
from interlace_check.graphs.programs import GraphProgram, Origin
from interlace_check.graphs.reading.tensors import Storage
from interlace_check.graphs.steps import MAIN, Place, Step, Trace

KINDS: dict[str, str] = {
    "race": "two nodes on different streams touch the same bytes, at least one writes, in no order",
    "unwaited": "a collective's result is read, or its argument written, before its `wait_tensor`",
    "never-waited": "a collective for which nothing waits",
    "not-forked": "a graph input is touched on a stream that does not wait for the caller's",
    "not-joined": "a result is returned, and the caller's stream does not wait for it",
    "written-back": "a graph input is written, and the caller's stream does not wait for that",
    "freed-early": "a tensor's memory may be used again while another stream still touches it",
    "early-wait": "a wait for an event that the graph records only later: it orders nothing",
    "mismatch": "ranks that do not issue the same collectives in the same order",
    "deadlock": "collectives that wait for each other, or for a rank that never comes",
    "launch-order": "ranks launch collectives of two groups in opposite order (a remark)",
    "idle-wait": "a wait that orders nothing: what it waits for is on its own stream (a remark)",
    "outside-event": "a wait for an event that the graph does not record (a remark)",
    "unanchored": "a stream op that no data goes through: a scheduler may move it (a remark)",
    "current-stream": "an index that was taken for the caller's stream (a remark)",
}
"""The kinds of finding in a graph, and what each means."""
_PASSED_ON = {"deadlock": "error", "launch-order": "remark"}


class GraphWords:
    """Findings of the verifier about Programs, as findings about graphs."""

    def __init__(
        self, traces: Sequence[Trace], programs: Sequence[GraphProgram], any_order: bool
    ) -> None:
        self.traces, self.programs, self.any_order = traces, programs, any_order

    def finding(self, found: Finding) -> Finding | None:
        """One finding; None for a remark that says nothing about a graph."""
        if found.level == "remark" and found.kind not in _PASSED_ON:
            return None
        ranks = found.ranks or tuple(dict.fromkeys(op.rank for op in found.ops))
        if len(self.traces) == 1:  # the two ranks that run one graph do the same
            ranks = ()
        if len(found.ops) == 2 and found.kind in ("race", "use-after-free"):
            return self._race(found, ranks)
        ops = tuple(op for op in map(self._any, found.ops) if op is not None)
        message = "collectives wait for each other, or for a rank that never begins them"
        fix = "let every rank issue its collectives, and wait for them, in one order"
        if found.kind == "launch-order":
            message = "ranks launch collectives of two groups in opposite order"
            fix = "launch the collectives of different groups in one order on all ranks"
        elif found.kind == "mismatch":  # of collectives, ranks.py tells it
            message = f"messages do not pair up: {self._groups_named(found.message)}"
            fix = "let each rank send what its peer receives, in the same order"
        elif found.kind != "deadlock":
            message, fix = found.message, found.words
        return Finding(found.kind, message, ops, fix, found.level, ranks)

    def _groups_named(self, message: str) -> str:
        """A message of the verifier with the groups' own names."""
        for group, team in self.programs[0].team_of_group.items():
            message = message.replace(f"team {team.name}", f"group {group!r}")
        return message

    def _origin(self, op: OpRef) -> tuple[Trace, Origin]:
        program, index = op.at
        trace, origins = self.traces[program], self.programs[program].origins
        return trace, origins[index] if 0 <= index < len(origins) else Origin("exit")

    def _any(self, op: OpRef) -> OpRef | None:
        trace, origin = self._origin(op)
        if origin.role != "step":
            return None
        step = trace.steps[origin.number]
        role = op.role.partition(" ")[0]
        issue = step.issue
        if issue is not None:
            role = f"{role}: {issue.kind} of group {issue.group!r}"
        return reference(step, op.rank, role)

    def _race(self, found: Finding, ranks: tuple[int, ...]) -> Finding:
        one, two = sorted(map(self._side, found.ops), key=lambda side: side.place)
        shown = tuple(side.shown for side in (one, two) if side.shown is not None)
        kind, message, fix = _beside_caller(one, two) or _between_steps(one, two)
        if self.any_order:
            message += (
                "; no dependence of the graph keeps the node order, and a scheduler such as "
                "Inductor's may leave it"
            )
            fix = f"{fix}, and thread what it touches through the wait (control_deps)"
        return Finding(kind, message, shown, fix, "error", ranks)

    def _side(self, op: OpRef) -> Side:
        trace, origin = self._origin(op)
        storage = None
        if op.buffer.startswith("b") and op.buffer[1:].isdigit():
            storage = trace.storages[int(op.buffer[1:])]
        step = trace.steps[origin.number] if origin.role == "step" else None
        return Side(origin.role, op.role.partition(" ")[0], op.rank, step, storage)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two accesses of a race."""

    role: str
    verb: str
    rank: int
    step: Step | None
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
            return OpRef(self.rank, 0, self.storage.stream, text, "is used again")
        role, issue = f"{self.verb} {tensor}".strip(), self.step.issue
        if issue is None:
            return reference(self.step, self.rank, role)
        role += f" (asynchronously, {issue.kind})"
        return at_place(self.step.place, self.rank, role, f"group {issue.group!r}")


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


def reference(step: Step, rank: int, role: str) -> OpRef:
    """A step in a finding. Its `line` is the node's place in the graph, from 1."""
    return at_place(step.place, rank, role, step.stream)


def at_place(place: Place, rank: int, role: str, stream: str = "") -> OpRef:
    """A node in a finding."""
    return OpRef(rank, place.number, stream, f"{place.name} = {place.text}", role, loc=place.loc)


def stream_words(stream: str) -> str:
    """A stream in a sentence."""
    return "the caller's stream" if stream == MAIN else stream
