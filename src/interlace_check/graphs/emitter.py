"""Ops of a Program, each with the step that it stands for.

emitter = GraphEmitter(trace, teams)
emitter.touch("main", step.reads, step.writes, Origin("step", 3))
emitter.program()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from interlace.ir.ops import Alloc, Call, Collective, Op, Record, Recv, Send, Wait
from interlace.ir.program import Program
from interlace.ir.types import Buffer, DType, Team
from interlace.ir.view import View
from interlace_check.graphs.steps import MAIN, Issue, Step, Trace

Role = Literal["step", "entry", "exit", "free", "constant"]


@dataclass(frozen=True, slots=True)
class Origin:
    """What an op stands for: a step, the caller's part before or after, or the end of a storage."""

    role: Role
    number: int = -1


class GraphEmitter:
    """The ops of one rank's Program while it grows."""

    def __init__(self, trace: Trace, teams: Mapping[str, Team], rank: int | None) -> None:
        self.trace = trace
        self.teams = teams
        self.rank = rank
        self.ops: list[Op] = []
        self.origins: list[Origin] = []
        self._streams: dict[str, str] = {MAIN: MAIN}
        self._messages = 0

    def stream(self, name: str) -> str:
        """The Program's name for a stream."""
        return self._streams.setdefault(name, f"s{len(self._streams)}")

    def emit(self, op: Op, origin: Origin) -> None:
        """Adds an op."""
        self.ops.append(op)
        self.origins.append(origin)

    def touch(
        self, stream: str, reads: Sequence[View], writes: Sequence[View], origin: Origin
    ) -> None:
        """Something on a stream that reads and writes.

        What shares a storage with what is written is read by an op of its own before: in-place
        operators are right by themselves, and other streams must not write it either.
        """
        on, written = self.stream(stream), {view.buffer for view in writes}
        shared = tuple(view for view in reads if view.buffer in written and view not in writes)
        own = tuple(view for view in reads if view.buffer not in written)
        if shared:
            self.emit(Call(fn="fx.read", args=shared, stream=on), origin)
        if own or writes:
            self.emit(Call(fn="fx.call", args=own, outs=tuple(writes), stream=on), origin)

    def make(self, step: Step, origin: Origin) -> tuple[View, ...]:
        """Allocates what a step makes; gives it as views."""
        on = self.stream(step.stream)
        for storage in step.makes:
            self.emit(Alloc(buffer=storage.buffer(), stream=on), origin)
        return tuple(View(storage.name) for storage in step.makes)

    def record(self, event: str, stream: str, origin: Origin) -> None:
        """An event now stands at this point of a stream."""
        self.emit(Record(event=event, stream=self.stream(stream)), origin)

    def wait(self, event: str, stream: str, origin: Origin) -> None:
        """A stream waits for an event."""
        self.emit(Wait(event=event, stream=self.stream(stream)), origin)

    def communicate(
        self,
        issue: Issue,
        queue: str,
        reads: Sequence[View],
        writes: Sequence[View],
        origin: Origin,
    ) -> None:
        """What a collective or a message does on its queue, a stream.

        A barrier stands for a collective: ranks of a graph share no memory, so that nothing but
        the waiting for each other goes from rank to rank, and no collective waits for more.
        """
        on = self.stream(queue)
        if issue.peer is not None and issue.group is not None:
            self._message(issue, on, origin)
        elif issue.group is not None:
            team = self.teams[issue.group].name
            self.emit(Collective(kind="barrier", team=team, stream=on), origin)
        self.touch(queue, reads, writes, origin)

    def _message(self, issue: Issue, on: str, origin: Origin) -> None:
        assert issue.group is not None
        assert issue.peer is not None
        team, name = self.teams[issue.group].name, f"m{self._messages}"
        self._messages += 1
        size = 1 if issue.num_bytes is None else max(issue.num_bytes, 1)
        self.emit(Alloc(buffer=Buffer(name, DType.u8, (size,)), stream=on), origin)
        view = View(name)
        if issue.sends:
            self.emit(Call(fn="fx.fill", outs=(view,), stream=on), origin)
            self.emit(Send(src=view, peer=issue.peer, team=team, stream=on), origin)
        else:
            self.emit(Recv(dst=view, peer=issue.peer, team=team, stream=on), origin)

    def enter(self) -> None:
        """What the caller did before: constants are there for long, inputs come on its stream."""
        for origin in ("constant", "input"):
            held = [each for each in self.trace.storages if each.origin == origin]
            at = Origin("constant" if origin == "constant" else "entry")
            for storage in held:
                self.emit(Alloc(buffer=storage.buffer()), at)
            if held:
                self.touch(MAIN, (), [View(each.name) for each in held], at)
            self.record("constants" if origin == "constant" else "inputs", MAIN, at)

    def exit(self, stream: str = MAIN) -> None:
        """The caller reads, on its own stream, what is returned and what was written in place."""
        views = {tensor.view: None for tensor in self.trace.outputs}
        for storage in self.trace.storages:
            if storage.origin == "input" and storage.written:
                views[View(storage.name)] = None
        if views:
            self.touch(stream, tuple(views), (), Origin("exit"))

    def program(self) -> Program:
        """The Program."""
        teams = tuple(dict.fromkeys(self.teams.values()))
        ranks = (0,) if self.rank is None else (self.rank,)
        if self.rank is None and teams:
            ranks = None
        return Program(name="graph", teams=teams, ops=tuple(self.ops), results=(), ranks=ranks)
