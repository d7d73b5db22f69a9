"""Findings of the verifier about a graph's Programs, in the graph's own words.

words = GraphWords(traces, programs, any_order=False)
[words.finding(found) for found in report.findings]
"""

from __future__ import annotations

from collections.abc import Sequence

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
        for group, team in self.programs[0].teams.items():
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
        sides = [self._side(op) for op in found.ops]
        sides.sort(key=lambda side: side.rank_of_role)
        one, two = sides
        shown = tuple(side.shown for side in sides if side.shown is not None)
        kind, message, fix = _words(one, two)
        if self.any_order and kind not in ("never-waited",):
            message += (
                "; no dependence of the graph keeps the node order, and a scheduler such as "
                "Inductor's may leave it"
            )
            fix = f"{fix}, and thread what it touches through the wait (control_deps)"
        return Finding(kind, message, shown, fix, "error", ranks)

    def _side(self, op: OpRef) -> Side:
        trace, origin = self._origin(op)
        verb = op.role.partition(" ")[0]
        storage = None
        if op.buffer.startswith("b") and op.buffer[1:].isdigit():
            storage = trace.storages[int(op.buffer[1:])]
        return Side(trace, origin, verb, storage, op)


class Side:
    """One of the two accesses of a race."""

    def __init__(
        self, trace: Trace, origin: Origin, verb: str, storage: Storage | None, op: OpRef
    ) -> None:
        self.origin, self.verb, self.storage, self.op = origin, verb, storage, op
        self.step: Step | None = None
        self.shown: OpRef | None = None
        tensor = "" if storage is None else storage.maker
        if origin.role == "step":
            self.step = trace.steps[origin.number]
            role = f"{verb} {tensor}".strip()
            shown = reference(self.step, op.rank, role)
            if self.step.issue is not None and self.step.issue.group is not None:
                role += f" (asynchronously, {self.step.issue.kind})"
                group = f"group {self.step.issue.group!r}"
                shown = at_place(self.step.place, op.rank, role, group)
            self.shown = shown
        elif origin.role == "free" and storage is not None:
            self.shown = OpRef(op.rank, 0, storage.stream, f"(memory of {tensor})", "is used again")

    @property
    def rank_of_role(self) -> int:
        """What is begun comes first, its writer before its reader; the caller's part is last."""
        if self.step is None:
            return 3
        if self.step.issue is None:
            return 2
        return 0 if self.verb == "writes" else 1

    @property
    def name(self) -> str:
        """The node."""
        return self.step.place.name if self.step is not None else self.origin.role

    @property
    def stream(self) -> str:
        """The stream, in words."""
        return stream_words(MAIN if self.step is None else self.step.stream)


def _words(one: Side, two: Side) -> tuple[str, str, str]:
    """Kind, message and fix of a race between a step and something else."""
    tensor = one.storage.maker if one.storage is not None else "a tensor"
    begun = one.step is not None and one.step.issue is not None
    match two.origin.role:
        case "exit" if begun:
            return (
                "unwaited",
                f"{tensor} is returned, and nothing waited for {one.name}, which fills it",
                f"return what wait_tensor gives for {one.name}",
            )
        case "exit" if one.storage is not None and one.storage.origin == "input":
            return (
                "written-back",
                f"{one.name} writes the graph input {tensor} on {one.stream}, and the caller's "
                f"stream does not wait for it before the graph returns",
                f"let the caller's stream wait for {one.stream} after {one.name}",
            )
        case "exit":
            return (
                "not-joined",
                f"{tensor} is returned, and the caller's stream does not wait for {one.name}, "
                f"which writes it on {one.stream}",
                f"let the caller's stream wait for {one.stream} after {one.name}",
            )
        case "entry" | "constant":
            return (
                "not-forked",
                f"{one.name} touches the graph input {tensor} on {one.stream}, which does not "
                f"wait for the caller's stream, where it may still be in the making",
                f"let {one.stream} wait for the caller's stream before {one.name}, or check with "
                f"inputs='ready' if the caller has waited",
            )
        case "free":
            held = two.storage.stream if two.storage is not None else MAIN
            name = two.storage.maker if two.storage is not None else tensor
            return (
                "freed-early",
                f"the memory of {name} may be used again on {stream_words(held)} while {one.name} "
                f"still {one.verb} it on {one.stream}",
                f"let {stream_words(held)} wait for {one.name} before {name} goes (sync_dealloc), "
                f"or record_stream it",
            )
        case _:
            pass
    if begun and two.step is not None and (two.step.issue is None or one.verb == "writes"):
        return (
            "unwaited",
            f"{two.name} {two.verb} {tensor}, and does not wait for {one.name}, which "
            f"{one.verb} it asynchronously",
            f"use what wait_tensor gives for {one.name}, on the stream of {two.name}",
        )
    return (
        "race",
        f"nothing orders {one.name} on {one.stream}, which {one.verb} {tensor}, and {two.name} "
        f"on {two.stream}, which {two.verb} it",
        "record an event after the one and wait for it on the stream of the other, before it",
    )


def reference(step: Step, rank: int, role: str) -> OpRef:
    """A step in a finding. Its `line` is the node's place in the graph, from 1."""
    return at_place(step.place, rank, role, step.stream)


def at_place(place: Place, rank: int, role: str, stream: str = "") -> OpRef:
    """A node in a finding."""
    return OpRef(rank, place.number, stream, f"{place.name} = {place.text}", role, loc=place.loc)


def stream_words(stream: str) -> str:
    """A stream in a sentence."""
    return "the caller's stream" if stream == MAIN else stream
