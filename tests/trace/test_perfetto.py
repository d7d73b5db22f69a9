"""A trace file parses back to the spans and arrows that were written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.trace.samples import RANKS, run, sample

from interlace.cost.timeline import Timeline
from interlace.trace import Run, arrows, write_perfetto


def read(path: Path, phase: str) -> list[dict[str, Any]]:
    """The events of one phase: M(etadata), X (slices), s and f (the ends of arrows)."""
    return [event for event in json.loads(path.read_bytes())["traceEvents"] if event["ph"] == phase]


def test_tracks_slices_and_arguments_parse_back(tmp_path: Path):
    program = sample()
    predicted, measured = run(program), run(program, "measured", 1.2)
    path = write_perfetto([Run((program,), predicted, measured)], tmp_path / "t.pftrace")
    facts = {
        (event["name"], event["pid"], event.get("tid")): event["args"] for event in read(path, "M")
    }
    names = {pid: args["name"] for (what, pid, _), args in facts.items() if what == "process_name"}
    assert sorted(names.values()) == [
        "measured · all_gather_linear",
        "predicted · all_gather_linear",
    ]
    rows = {
        (pid, tid): (names[pid].split()[0], args["name"])
        for (what, pid, tid), args in facts.items()
        if what == "thread_name"
    }
    assert len(rows) == 2 * RANKS * 2
    assert all(facts["thread_sort_index", *row] == {"sort_index": row[1]} for row in rows)
    slices = read(path, "X")
    assert len(slices) == len(predicted.spans) + len(measured.spans)
    wanted = Counter(
        (
            *(timeline.source, f"rank {s.rank} · {s.stream}", s.name, s.kind),
            *(round(s.start_s * 1e9), round(s.seconds * 1e9)),
        )
        for timeline in (predicted, measured)
        for s in timeline.spans
    )
    assert wanted == Counter(
        (
            *(*rows[e["pid"], e["tid"]], e["name"], e["cat"]),
            *(round(e["ts"] * 1e3), round(e["dur"] * 1e3)),
        )
        for e in slices
    )
    assert Counter((e["args"]["rank"], e["args"]["op"], e["name"]) for e in slices) == Counter(
        (s.rank, s.op_index, s.name) for t in (predicted, measured) for s in t.spans
    )
    arguments = next(event["args"] for event in slices if event["name"] == "aten.mm.out")
    assert arguments["module"] == "layers.0.mlp.up"
    assert arguments["text"].startswith('main: call("aten.mm.out", full[tp.rank')
    assert arguments["strategy"] == "all_gather_matmul layers.0.mlp.up: peer"


def test_every_arrow_becomes_one_flow_with_two_ends(tmp_path: Path):
    program = sample()
    path = write_perfetto([Run((program,), run(program))], tmp_path / "deep" / "t.json")
    out, into = ([event["id"] for event in read(path, phase)] for phase in ("s", "f"))
    assert len(out) == len(arrows([program])) > 0
    assert len(set(out)) == len(out)
    assert sorted(out) == sorted(into)


def test_an_empty_timeline_is_a_trace(tmp_path: Path):
    path = write_perfetto([Run((), Timeline((), "nothing"))], tmp_path / "t.json")
    (event,) = json.loads(path.read_bytes())["traceEvents"]
    assert event["args"] == {"name": "predicted · nothing"}


def test_names_are_shown_as_they_are_spelled(tmp_path: Path):
    timeline = Timeline((), "a\u202eb\ud800")
    (event,) = read(write_perfetto([Run((), timeline)], tmp_path / "t.json"), "M")
    assert event["args"] == {"name": "predicted · a\\u202eb\\ud800"}
