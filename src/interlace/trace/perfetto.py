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
from interlace.trace.tracks import OpKey, Run, arrows, ranks_of, title, tracks, write_whole


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


def trace_events(runs: Sequence[Run]) -> dict[str, object]:
    """The runs as trace events: times in microseconds."""
    events: list[dict[str, object]] = []
    flow_ids = count(1)
    for pid, (timeline, name, details) in enumerate(_drawn(runs), start=1):
        named = {"name": visible(name)}
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": named})
        placed: dict[OpKey, tuple[dict[str, object], float, float]] = {}
        origin = min((span.start_s for span in timeline.spans), default=0.0)
        for tid, track in enumerate(tracks(timeline), start=1):
            at: dict[str, object] = {"pid": pid, "tid": tid}
            for what, value in (("name", visible(track.title)), ("sort_index", tid)):
                events.append({**at, "ph": "M", "name": f"thread_{what}", "args": {what: value}})
            for span in track.spans:
                start = (span.start_s - origin) * 1e6
                duration = span.seconds * 1e6
                row = {"name": visible(span.name), "cat": span.kind, "ts": start, "dur": duration}
                events.append({**at, **row, "ph": "X", "args": details.of(span)})
                placed[span.rank, span.op_index] = at, start, start + duration
        for arrow in details.arrows:
            if arrow.source in placed and arrow.target in placed:
                flow = {"name": "order", "cat": "order", "id": next(flow_ids)}
                at, _, end = placed[arrow.source]
                events.append({**at, **flow, "ts": end, "ph": "s"})
                at, start, _ = placed[arrow.target]
                events.append({**at, **flow, "ts": start, "ph": "f", "bp": "e"})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
