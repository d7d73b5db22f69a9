"""A trace file parses back to the spans and arrows that were written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.trace.samples import RANKS, run, sample

from interlace import errors
from interlace.cost.timeline import Timeline
from interlace.trace import arrows, perfetto, write_perfetto


def read(path: Path) -> Any:
    proto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    return proto, proto.Trace.FromString(path.read_bytes())


def test_tracks_slices_and_arguments_parse_back(tmp_path: Path):
    program = sample()
    predicted, measured = run(program), run(program, "measured", 1.2)
    path = write_perfetto([predicted, measured], tmp_path / "t.pftrace", program=program)
    proto, trace = read(path)
    described = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    processes = {d.uuid: d.process.process_name for d in described if d.HasField("process")}
    assert sorted(processes.values()) == [
        "measured · all_gather_linear",
        "predicted · all_gather_linear",
    ]
    rows = {d.uuid: (processes[d.parent_uuid].split()[0], d.name) for d in described if d.name}
    assert len(rows) == 2 * RANKS * 2
    events = [p for p in trace.packet if p.HasField("track_event")]
    begins = [p for p in events if p.track_event.type == proto.TrackEvent.TYPE_SLICE_BEGIN]
    ends = [p for p in events if p.track_event.type == proto.TrackEvent.TYPE_SLICE_END]
    assert len(begins) == len(ends) == len(predicted.spans) + len(measured.spans)
    wanted = Counter(
        (timeline.source, f"rank {s.rank} · {s.stream}", s.name, s.kind, round(s.start_s * 1e9))
        for timeline in (predicted, measured)
        for s in timeline.spans
    )
    assert wanted == Counter(
        (
            *rows[p.track_event.track_uuid],
            p.track_event.name,
            p.track_event.categories[0],
            p.timestamp,
        )
        for p in begins
    )
    arguments = {
        note.name: note.string_value or note.int_value
        for packet in begins
        if packet.track_event.name == "aten.mm.out"
        for note in packet.track_event.debug_annotations
    }
    assert arguments["module"] == "layers.0.mlp.up"
    assert arguments["text"].startswith('main: call("aten.mm.out", full[tp.rank')
    assert arguments["strategy"] == "all_gather_matmul layers.0.mlp.up: peer"


def test_every_arrow_becomes_one_flow_with_two_ends(tmp_path: Path):
    program = sample()
    _, trace = read(write_perfetto(run(program), tmp_path / "t.pftrace", program=program))
    events = [p.track_event for p in trace.packet if p.HasField("track_event")]
    out = [flow for event in events for flow in event.flow_ids]
    into = [flow for event in events for flow in event.terminating_flow_ids]
    assert len(out) == len(arrows([program])) > 0
    assert len(set(out)) == len(out)
    assert sorted(out) == sorted(into)


def test_chrome_json_holds_the_same_spans(tmp_path: Path):
    program = sample()
    timeline = run(program)
    path = write_perfetto(timeline, tmp_path / "deep" / "t.json", program=program)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sorted((e["args"]["rank"], e["args"]["op"], e["name"]) for e in spans) == sorted(
        (s.rank, s.op_index, s.name) for s in timeline.spans
    )
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) > 0


def test_an_empty_timeline_is_a_trace(tmp_path: Path):
    _, trace = read(write_perfetto(Timeline((), "nothing"), tmp_path / "t.pftrace"))
    assert [p.track_descriptor.process.process_name for p in trace.packet] == [
        "predicted · nothing"
    ]


def test_without_the_package_the_error_says_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(perfetto.importlib, "import_module", absent)
    with pytest.raises(errors.BackendError, match=r"pip install -U perfetto.*\.json"):
        write_perfetto(run(sample()), tmp_path / "t.pftrace")
    assert list(tmp_path.iterdir()) == []
