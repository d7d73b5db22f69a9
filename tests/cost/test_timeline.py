"""Timelines: figures by hand, and files that survive or are refused."""

from __future__ import annotations

import json
import random

import pytest

from interlace.cost import Span, Timeline
from interlace.cost.timeline import intersection, length, union
from interlace.errors import ParseError


def span(start: float, end: float, kind: str = "compute", rank: int = 0, **more: int) -> Span:
    """A span of some op."""
    return Span(
        rank, "main" if kind == "compute" else "comm", 0, kind, start, end, kind=kind, **more
    )


def test_figures_of_a_rank() -> None:
    timeline = Timeline((span(0, 3), span(1, 5, "comm"), span(4, 6), span(5, 9, "sync")))
    figures = timeline.figures(0)
    assert (figures.makespan_s, figures.compute_s, figures.comm_s) == (9, 5, 4)
    assert (figures.overlap_s, figures.exposed_s, figures.hidden) == (3, 1, 0.75)
    assert repr(timeline) == "<Timeline '', predicted: 1 ranks, 4 spans, 9000.000 ms>"


def test_time_that_two_streams_share_counts_once() -> None:
    timeline = Timeline((span(0, 4), span(1, 2), span(0, 3, "comm"), span(2, 4, "comm")))
    figures = timeline.figures(0)
    assert (figures.compute_s, figures.comm_s, figures.overlap_s) == (4, 4, 4)


def test_ranks_are_averaged_and_never_mixed() -> None:
    timeline = Timeline((span(0, 2), span(0, 2, "comm", rank=1), span(3, 5, rank=1)))
    assert timeline.figures(0).overlap_s == timeline.figures(1).overlap_s == 0
    mean = timeline.figures()
    assert (mean.makespan_s, mean.compute_s, mean.comm_s, mean.hidden) == (5, 2, 1, 0)
    assert Timeline((span(0, 2),)).figures().hidden == 0
    assert Timeline(()).figures().makespan_s == 0


def test_parts() -> None:
    timeline = Timeline((span(0, 1, site=1), span(1, 2, site=2), span(0, 3, rank=1, site=1)))
    assert [s.end_s for s in timeline.of(site=1).spans] == [1, 3]
    assert [s.end_s for s in timeline.of(rank=0, site=1).spans] == [1]
    assert timeline.ranks == (0, 1)
    assert timeline.streams(0) == ("main",)


def test_unions_and_intersections_equal_counting_moments(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        draws = [
            [(min(pair), max(pair)) for pair in _pairs(rng, rng.randrange(6))] for _ in range(2)
        ]
        moments = [{m for start, end in draw for m in range(start, end)} for draw in draws]
        one, other = union(draws[0]), union(draws[1])
        assert length(one) == len(moments[0])
        assert length(intersection(one, other)) == len(moments[0] & moments[1])


def test_json_round_trip() -> None:
    spans = (span(0.125, 0.5, "comm", site=3), Span(1, "main", 7, "aten.mm.out", 0.1, 0.2))
    timeline = Timeline(spans, "backward", "measured")
    assert Timeline.from_json(timeline.to_json()) == timeline


GOOD = json.loads(Timeline((span(0, 1),)).to_json())
BAD = [
    ("{", "no timeline"),
    ("[]", "no timeline"),
    (json.dumps({**GOOD, "schema": 99}), "schema 99"),
    (json.dumps({"schema": 1}), r"no timeline \(KeyError: 'spans'\): give the JSON"),
    (json.dumps({**GOOD, "spans": [[0, "main"]]}), "not enough values"),
    (json.dumps({**GOOD, "spans": [[0, "main", 0, "x", 0, 1, None, "magic"]]}), "magic"),
    (
        json.dumps({**GOOD, "spans": [[0, "main", 0, "x", "soon", 1, None, "comm"]]}),
        "float: 'soon'",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_files(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        Timeline.from_json(text)


def _pairs(rng: random.Random, count: int) -> list[tuple[int, int]]:
    return [(rng.randrange(20), rng.randrange(20)) for _ in range(count)]
