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
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from interlace.cost.timeline import Span, Timeline
from interlace.errors import BackendError
from interlace.ir import Program
from interlace.trace.tracks import Arrow, OpKey, arrows, texts, tracks

SEQUENCE = 1
"""All packets are written by one sequence."""


def write_perfetto(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    *,
    program: Program | Sequence[Program] | None = None,
) -> Path:
    """Writes the timelines as one trace, whole or not at all; returns the path.

    `program` is what they ran (a sequence for a set of Programs); it adds arrows and the ops' text.
    """
    lines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    programs = as_set(program)
    path = Path(path)
    if path.suffix == ".json":
        data = json.dumps(chrome_trace(lines, programs)).encode()
    else:
        data = perfetto_trace(lines, programs)
    write_whole(path, data)
    return path


def as_set(program: Program | Sequence[Program] | None) -> list[Program]:
    """A Program, a set of them, or none, as a list."""
    if program is None:
        return []
    return [program] if isinstance(program, Program) else list(program)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place and moves it there, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def perfetto_trace(timelines: Sequence[Timeline], programs: Sequence[Program] = ()) -> bytes:
    """The timelines in Perfetto's own format. BackendError without the `perfetto` package."""
    try:
        builder_module = importlib.import_module("perfetto.trace_builder.proto_builder")
        proto = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except Exception as error:  # protobuf's own version error is no ImportError
        raise BackendError(
            f"a Perfetto trace needs the package `perfetto`, which does not import ({error}): "
            "`pip install -U perfetto protobuf`, or write to a path that ends in .json"
        ) from error
    builder = builder_module.TraceProtoBuilder()
    details = _Details(programs)
    track_ids, flow_ids = count(1), count(1)
    for pid, timeline in enumerate(timelines, start=1):
        parent = _process(builder, proto, next(track_ids), pid, timeline)
        incoming, outgoing = _flows(timeline, details.arrows, flow_ids)
        origin = min((span.start_s for span in timeline.spans), default=0.0)
        for order, track in enumerate(tracks(timeline)):
            uuid = next(track_ids)
            descriptor = builder.add_packet().track_descriptor
            descriptor.uuid, descriptor.parent_uuid = uuid, parent
            descriptor.name, descriptor.sibling_order_rank = track.title, order
            for span in track.spans:
                first, last = _ns(span.start_s - origin), _ns(span.end_s - origin)
                event = _event(builder, proto.TrackEvent.TYPE_SLICE_BEGIN, uuid, first)
                event.name = span.name
                event.categories.append(span.kind)
                for key, value in details.of(span).items():
                    _annotate(event.debug_annotations.add(), key, value)
                place = (span.rank, span.op_index)
                event.flow_ids.extend(outgoing.get(place, ()))
                event.terminating_flow_ids.extend(incoming.get(place, ()))
                _event(builder, proto.TrackEvent.TYPE_SLICE_END, uuid, last)
    return builder.serialize()


def _process(builder: Any, proto: Any, uuid: int, pid: int, timeline: Timeline) -> int:
    packet = builder.add_packet()
    packet.track_descriptor.uuid = uuid
    packet.track_descriptor.process.pid = pid
    packet.track_descriptor.process.process_name = title(timeline)
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
        annotation.string_value = value


def title(timeline: Timeline) -> str:
    """What a timeline is called: its source, and its name if it has one."""
    return f"{timeline.source} · {timeline.name}" if timeline.name else timeline.source


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


def chrome_trace(
    timelines: Sequence[Timeline], programs: Sequence[Program] = ()
) -> dict[str, object]:
    """The timelines in Chrome's JSON format: times in microseconds."""
    details = _Details(programs)
    events: list[dict[str, object]] = []
    flow_ids = count(1)
    for pid, timeline in enumerate(timelines, start=1):
        name = {"name": title(timeline)}
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": name})
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
