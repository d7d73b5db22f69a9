"""The Program of a graph whose nodes are issued in the order listed.

That is what an interpreter of the graph does, and what a scheduler's result is read by. The memory
of a tensor is used again as torch's caching allocator does: once the host has let go of it, which
is after the last node that holds it, by what is allocated next on the stream that it is from.

    listed(trace, teams, rank=0, ready=False, joined=True).program()
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from interlace.ir.ops import Free, HostSync
from interlace.ir.types import Team
from interlace_check.graphs.emitter import GraphEmitter, Origin
from interlace_check.graphs.reading.sync import EVERY, HOST
from interlace_check.graphs.reading.tensors import Storage
from interlace_check.graphs.steps import MAIN, Step, Trace

REUSE = "reuse"


def listed(
    trace: Trace, teams: Mapping[str, Team], rank: int | None, ready: bool, joined: bool
) -> GraphEmitter:
    """The ops of a rank, in the order listed."""
    return _Listed(trace, teams, rank).run(ready, joined)


class _Listed(GraphEmitter):
    def run(self, ready: bool, joined: bool) -> GraphEmitter:
        self._recorded: set[int] = set()
        self._held: defaultdict[str, list[Storage]] = defaultdict(list)
        streams = self.trace.streams()
        self.enter()
        for name in streams[1:]:
            first = Origin("entry")
            self.wait("inputs" if ready else "constants", name, first)
        for number, step in enumerate(self.trace.steps):
            self._step(number, step)
        if joined:
            self.exit()
        self._free(MAIN, None)
        return self

    def _step(self, number: int, step: Step) -> None:
        origin = Origin("step", number)
        if step.makes:
            self._free(step.stream, step)
        match step.kind:
            case "compute":
                self.touch(
                    step.stream, step.reads, (*step.writes, *self.make(step, origin)), origin
                )
            case "start":
                self._start(number, step, origin)
            case "finish":
                for begun in step.finishes:
                    self.wait(f"done{begun}", step.stream, origin)
            case "record":
                assert step.event is not None
                self._recorded.add(step.event)
                self.record(f"e{step.event}", step.stream, origin)
            case "wait":
                if step.event in self._recorded:
                    self.wait(f"e{step.event}", step.stream, origin)
            case "wait_stream":
                self.record(f"at{number}", step.other, origin)
                self.wait(f"at{number}", step.stream, origin)
            case "host":
                self._host(step, origin)
        for storage in step.makes:
            if not storage.kept and not storage.is_host:
                self._held[storage.stream].append(storage)

    def _start(self, number: int, step: Step, origin: Origin) -> None:
        assert step.issue is not None
        made = self.make(step, origin)
        self.record(f"begin{number}", step.stream, origin)
        self.wait(f"begin{number}", step.issue.queue, origin)
        queue = step.issue.queue
        self.communicate(step.issue, queue, step.reads, (*step.writes, *made), origin)
        self.record(f"done{number}", queue, origin)

    def _host(self, step: Step, origin: Origin) -> None:
        if step.event is not None:
            if step.event in self._recorded:
                self.wait(f"e{step.event}", HOST, origin)
                self.emit(HostSync(stream=self.stream(HOST)), origin)
            return
        for name in self.trace.streams() if step.other == EVERY else [step.other]:
            self.emit(HostSync(stream=self.stream(name)), origin)

    def _free(self, stream: str, step: Step | None) -> None:
        """Gives back what the host let go of before a step that allocates (None: at the end)."""
        held = self._held[stream]
        now = None if step is None else step.place.number
        gone = [each for each in held if now is None or each.last_use < now]
        if not gone:
            return
        self._held[stream] = [each for each in held if each not in gone]
        for storage in gone:
            if storage.last_use > self.trace.num_nodes:
                continue  # torch keeps it
            origin, on = Origin("free", storage.number), stream
            if storage.recorded:
                on = REUSE
                for name in (stream, *sorted(storage.recorded)):
                    event = f"free{storage.number}_{self.stream(name)}"
                    self.record(event, name, origin)
                    self.wait(event, REUSE, origin)
            self.emit(Free(buffer=storage.name, stream=self.stream(on)), origin)
