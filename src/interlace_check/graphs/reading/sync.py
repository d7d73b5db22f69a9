"""The `streams::` ops of a graph, as steps.

syncs.lower(call, "streams::record_event", {"event_index": 3, "stream_index": 0})
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from interlace_check.graphs.reading.naming import stream_index, stream_name
from interlace_check.graphs.reading.values import NodeValue, tensors_in
from interlace_check.graphs.steps import GraphStep, Place

if TYPE_CHECKING:
    from interlace_check.graphs.reading.walk import GraphCall, Walker

HOST = "host"
EVERY = "*"
"""In place of a stream that the host waits for: all of the device."""


class Syncs:
    """Effects of the `streams::` ops so far."""

    def __init__(self, walker: Walker) -> None:
        self.walker = walker
        self.records: defaultdict[int, list[Place]] = defaultdict(list)
        self.unrecorded: list[tuple[Place, int]] = []

    def lower(self, call: GraphCall, name: str, bound: dict[str, Any]) -> NodeValue:
        """One stream op. Its value is None."""
        walker, place, node = self.walker, call.place, call.node
        op = name.removeprefix("streams::")

        def stream(argument: str) -> str:
            return stream_name(stream_index(bound[argument], node), walker.current)

        def event(argument: str) -> int:
            return stream_index(bound[argument], node)

        match op:
            case "record_stream":
                for tensor in tensors_in(bound["tensor"]):
                    tensor.storage.recorded.add(stream("stream_index"))
                return NodeValue(None, call.after)
            case "record_event":
                self.records[event("event_index")].append(place)
                on = stream("stream_index")
                step = GraphStep("record", place, on, event=event("event_index"), after=call.after)
            case "wait_event":
                step = self._wait(call, event("event_index"), stream("stream_index"))
            case "sync_dealloc":
                tensors_in(bound["to_dealloc"])
                step = self._wait(call, event("wait_event_index"), stream("src_stream_index"))
            case "wait_stream":
                on, other = stream("waiting_stream_index"), stream("waited_on_stream_index")
                step = GraphStep("wait_stream", place, on, other=other, after=call.after)
            case "synchronize_event":
                number = event("event_index")
                self._note(place, number)
                step = GraphStep("host", place, HOST, event=number, after=call.after)
            case "synchronize_stream":
                on = stream("stream_index")
                step = GraphStep("host", place, HOST, other=on, after=call.after)
            case _:
                step = GraphStep("host", place, HOST, other=EVERY, after=call.after)
        number = walker.add(step)
        return NodeValue(None, frozenset((number,)))

    def _wait(self, call: GraphCall, event: int, stream: str) -> GraphStep:
        self._note(call.place, event)
        return GraphStep("wait", call.place, stream, event=event, after=call.after)

    def _note(self, place: Place, event: int) -> None:
        if event not in self.records:
            self.unrecorded.append((place, event))

    def note_waits(self) -> None:
        """Tells waits for events from outside from waits that come before their record."""
        for place, event in self.unrecorded:
            if event in self.records:
                self.walker.trace.early.append((place, self.records[event][0]))
            else:
                self.walker.trace.unowned.append((place, event))
