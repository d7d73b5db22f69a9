"""Timelines as a Perfetto trace, to be opened in https://ui.perfetto.dev.

Each timeline is a process (predicted, measured), each stream of each rank a track below it, each
op a slice with its text, site and module as arguments. Where the Program is given, arrows lead from
`record` to `wait`, from `notify` to `expect` and from a send to its receive.

    write_perfetto([simulated, executor.timeline()], "step.pftrace", program=executor.program)

The ending chooses the format: `.json` is the older Chrome format, which needs no package; anything
else is Perfetto's own, written with the `perfetto` package.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from interlace.cost.timeline import Span, Timeline
from interlace.errors import BackendError
from interlace.ir import Program
from interlace.ir.text.spelling import visible
from interlace.trace.runs import Run, as_set, title, write_whole
from interlace.trace.tracks import Arrow, OpKey, arrows, texts, tracks

SEQUENCE = 1
"""All packets are written by one sequence."""


def write_perfetto(
    timelines: Timeline | Sequence[Timeline] | Sequence[Run],
    path: str | Path,
    *,
    program: Program | Sequence[Program] | None = None,
) -> Path:
    """Writes the timelines as one trace, whole or not at all; returns the path.

    `program` is what they ran (a sequence for a set of Programs); it adds arrows and the ops' text.
    Runs have their Programs with them.
    """
    given = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    programs = as_set(program)
    runs = [item if isinstance(item, Run) else Run(programs, item) for item in given]
    path = Path(path)
    if path.suffix == ".json":
        data = json.dumps(chrome_trace(runs)).encode()
    else:
        data = perfetto_trace(runs)
    write_whole(path, data)
    return path


def perfetto_trace(runs: Sequence[Run]) -> bytes:
    """The runs in Perfetto's own format. Raises BackendError without the `perfetto` package."""
    try:
        builder_module = importlib.import_module("perfetto.trace_builder.proto_builder")
        proto = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except Exception as error:  # protobuf's own version error is no ImportError
        raise BackendError(
            f"a Perfetto trace needs the package `perfetto`, which does not import ({error}): "
            "`pip install -U perfetto protobuf`, or write to a path that ends in .json"
        ) from error
    builder = builder_module.TraceProtoBuilder()
    track_ids, flow_ids = count(1), count(1)
    for pid, (timeline, name, details) in enumerate(_drawn(runs), start=1):
        parent = _process(builder, proto, next(track_ids), pid, visible(name))
        incoming, outgoing = _flows(timeline, details.arrows, flow_ids)
        origin = min((span.start_s for span in timeline.spans), default=0.0)
        for order, track in enumerate(tracks(timeline)):
            uuid = next(track_ids)
            descriptor = builder.add_packet().track_descriptor
            descriptor.uuid, descriptor.parent_uuid = uuid, parent
            descriptor.name, descriptor.sibling_order_rank = visible(track.title), order
            for span in track.spans:
                first, last = _ns(span.start_s - origin), _ns(span.end_s - origin)
                event = _event(builder, proto.TrackEvent.TYPE_SLICE_BEGIN, uuid, first)
                event.name = visible(span.name)
                event.categories.append(span.kind)
                for key, value in details.of(span).items():
                    _annotate(event.debug_annotations.add(), key, value)
                place = (span.rank, span.op_index)
                event.flow_ids.extend(outgoing.get(place, ()))
                event.terminating_flow_ids.extend(incoming.get(place, ()))
                _event(builder, proto.TrackEvent.TYPE_SLICE_END, uuid, last)
    return builder.serialize()


def _process(builder: Any, proto: Any, uuid: int, pid: int, name: str) -> int:
    packet = builder.add_packet()
    packet.track_descriptor.uuid = uuid
    packet.track_descriptor.process.pid = pid
    packet.track_descriptor.process.process_name = name
    packet.track_descriptor.child_ordering = proto.TrackDescriptor.EXPLICIT
    return uuid


def _event(builder: Any, kind: int, track: int, timestamp: int) -> Any:
    packet = builder.add_packet()
    packet.timestamp = timestamp
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.track_event.type = kind
    packet.track_event.track_uuid = track
    return packet.track_event


def _annotate(annotation: Any, key: str, value: int | str) -> None:
    annotation.name = key
    if isinstance(value, int):
        annotation.int_value = value
    else:
        annotation.string_value = visible(value)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _Details:
    """What the Programs say of a span."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.arrows = arrows(programs)
        self.texts = texts(programs)
        self.modules: dict[OpKey, str] = {}
        self.strategies: dict[tuple[int, int], str] = {}
        for program in programs:
            for rank in (program.rank,) if program.rank is not None else program.world:
                for index, op in enumerate(program.ops):
                    self.modules[rank, index] = str(op.loc)
                for site in program.sites:
                    self.strategies[rank, site.id] = f"{site.kind} {site.module}: {site.strategy}"

    def of(self, span: Span) -> dict[str, int | str]:
        """The arguments of a span's slice."""
        found: dict[str, int | str] = {"rank": span.rank, "op": span.op_index}
        lines = self.texts.get(span.rank, ())
        if 0 <= span.op_index < len(lines):
            found["text"] = lines[span.op_index]
        if module := self.modules.get((span.rank, span.op_index)):
            found["module"] = module
        if span.site is not None:
            found["site"] = span.site
            if strategy := self.strategies.get((span.rank, span.site)):
                found["strategy"] = strategy
        return found


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[Timeline, str, _Details]]:
    """Every timeline, what it is called, and what its Programs say."""
    for run in runs:
        details = _Details(run.programs)
        for timeline in run.timelines:
            yield timeline, title(timeline, run.name), details


def _flows(
    timeline: Timeline, found: Sequence[Arrow], ids: count[int]
) -> tuple[dict[OpKey, list[int]], dict[OpKey, list[int]]]:
    """The ids of arrows into each op and out of each op, where both ends have a span."""
    places = {(span.rank, span.op_index) for span in timeline.spans}
    incoming: dict[OpKey, list[int]] = {}
    outgoing: dict[OpKey, list[int]] = {}
    for arrow in found:
        if arrow.source in places and arrow.target in places:
            flow = next(ids)
            outgoing.setdefault(arrow.source, []).append(flow)
            incoming.setdefault(arrow.target, []).append(flow)
    return incoming, outgoing


def chrome_trace(runs: Sequence[Run]) -> dict[str, object]:
    """The runs in Chrome's JSON format: times in microseconds."""
    events: list[dict[str, object]] = []
    flow_ids = count(1)
    for pid, (timeline, name, details) in enumerate(_drawn(runs), start=1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        incoming, outgoing = _flows(timeline, details.arrows, flow_ids)
        origin = min((span.start_s for span in timeline.spans), default=0.0)
        for tid, track in enumerate(tracks(timeline), start=1):
            at: dict[str, object] = {"pid": pid, "tid": tid}
            events.append({**at, "ph": "M", "name": "thread_name", "args": {"name": track.title}})
            for span in track.spans:
                start = (span.start_s - origin) * 1e6
                where = {**at, "ts": start}
                row = {"name": span.name, "cat": span.kind, "dur": span.seconds * 1e6}
                events.append({**where, **row, "ph": "X", "args": details.of(span)})
                place = (span.rank, span.op_index)
                arrow = {"name": "order", "cat": "order"}
                for flow in outgoing.get(place, ()):
                    end = start + span.seconds * 1e6
                    events.append({**at, **arrow, "ts": end, "ph": "s", "id": flow})
                for flow in incoming.get(place, ()):
                    events.append({**where, **arrow, "ph": "f", "bp": "e", "id": flow})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
