"""Timelines as a trace for https://ui.perfetto.dev, in Chrome's JSON format.

Each timeline is a process (predicted, measured), each stream of each rank a track below it, each
op a slice with its text, site and module as arguments. Where a run has its Programs, arrows lead
from `record` to `wait`, from `notify` to `expect` and from a send to its receive.

    write_perfetto([Run((executor.program,), simulated, executor.timeline())], "step.json")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from interlace.cost.timeline import Span, Timeline
from interlace.ir import Program
from interlace.ir.text.printer import print_op
from interlace.ir.text.spelling import visible
from interlace.trace.tracks import Arrow, OpKey, Run, arrows, ranks_of, title, tracks, write_whole


def write_perfetto(runs: Sequence[Run], path: str | Path) -> Path:
    """Writes the timelines of the runs as one trace, whole or not at all; returns the path."""
    return write_whole(path, json.dumps(trace_events(runs)))


class _Details:
    """Facts of a span that the Programs have."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.arrows = arrows(programs)
        self.ops: dict[OpKey, dict[str, str]] = {}
        self.strategies: dict[tuple[int, int], str] = {}
        for program in programs:
            ops = [
                {"text": print_op(op, program), **({"module": str(op.loc)} if str(op.loc) else {})}
                for op in program.ops
            ]
            for rank in ranks_of(program):
                self.ops |= {(rank, index): said for index, said in enumerate(ops)}
                for site in program.sites:
                    self.strategies[rank, site.id] = f"{site.kind} {site.module}: {site.strategy}"

    def of(self, span: Span) -> dict[str, int | str]:
        """The arguments of a span's slice."""
        found: dict[str, int | str] = {"rank": span.rank, "op": span.op_index}
        found |= self.ops.get((span.rank, span.op_index), {})
        if span.site is not None:
            found["site"] = span.site
            if strategy := self.strategies.get((span.rank, span.site)):
                found["strategy"] = strategy
        return {key: visible(it) if isinstance(it, str) else it for key, it in found.items()}


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[Timeline, str, _Details]]:
    """Every timeline, what it is called, and what its Programs say."""
    for run in runs:
        for part in run.parts:
            details = _Details(part.programs)
            name = run.name if part is run else f"{part.label} {run.name}".strip()
            for timeline in part.timelines:
                yield timeline, title(timeline, name), details


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


def trace_events(runs: Sequence[Run]) -> dict[str, object]:
    """The runs as trace events: times in microseconds."""
    events: list[dict[str, object]] = []
    flow_ids = count(1)
    for pid, (timeline, name, details) in enumerate(_drawn(runs), start=1):
        named = {"name": visible(name)}
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": named})
        incoming, outgoing = _flows(timeline, details.arrows, flow_ids)
        origin = min((span.start_s for span in timeline.spans), default=0.0)
        for tid, track in enumerate(tracks(timeline), start=1):
            at: dict[str, object] = {"pid": pid, "tid": tid}
            for what, value in (("name", visible(track.title)), ("sort_index", tid)):
                events.append({**at, "ph": "M", "name": f"thread_{what}", "args": {what: value}})
            for span in track.spans:
                start = (span.start_s - origin) * 1e6
                where = {**at, "ts": start}
                row = {"name": visible(span.name), "cat": span.kind, "dur": span.seconds * 1e6}
                events.append({**where, **row, "ph": "X", "args": details.of(span)})
                place = (span.rank, span.op_index)
                arrow = {"name": "order", "cat": "order"}
                for flow in outgoing.get(place, ()):
                    end = start + span.seconds * 1e6
                    events.append({**at, **arrow, "ts": end, "ph": "s", "id": flow})
                for flow in incoming.get(place, ()):
                    events.append({**where, **arrow, "ph": "f", "bp": "e", "id": flow})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
