"""Rows and arrows of timelines."""

from __future__ import annotations

from tests.trace.samples import RANKS, run, sample

from interlace.cost.timeline import Span, Timeline
from interlace.ir import parse
from interlace.trace import Arrow, arrows, figures_json, figures_text, tracks
from interlace.trace.figures import percent

PIPELINE = """
def stages(pp: Team[2], x: f32[4], y: out[f32[4]]):
    main: group(send(x, peer=pp.rank + 1), recv(y, peer=pp.rank - 1))
    main: send(x, peer=pp.rank + 1)
    comm: recv(y, peer=pp.rank + 1)
"""


def test_rows_are_ranks_then_streams_in_order_of_use():
    program = sample()
    rows = [(track.rank, track.stream) for track in tracks(run(program))]
    assert rows == [(rank, stream) for rank in range(RANKS) for stream in ("main", "comm")]


def test_overlapping_spans_of_a_stream_go_to_a_second_lane():
    spans = (Span(0, "main", 0, "a", 0.0, 2.0), Span(0, "main", 1, "b", 1.0, 3.0))
    assert [(t.lane, t.title) for t in tracks(Timeline(spans))] == [
        (0, "rank 0 · main"),
        (1, "rank 0 · main (2)"),
    ]


def test_arrows_of_events_and_signals_bind_as_the_semantics_say():
    program = sample()
    found = arrows([program])
    places = {str(op): i for i, op in enumerate(program.ops)}
    assert len(places) == len(program.ops)
    events = [arrow for arrow in found if arrow.kind == "event"]
    assert len(events) == 3 * RANKS
    assert all(arrow.source[0] == arrow.target[0] for arrow in events)
    signals = [arrow for arrow in found if arrow.kind == "signal"]
    # each rank expects from the next ones in turn, and each notifies once, at op 2
    assert sorted((a.source, a.target[0]) for a in signals) == sorted(
        ((writer, 2), reader)
        for reader in range(RANKS)
        for writer in range(RANKS)
        if writer != reader
    )


def test_a_wait_binds_to_the_last_record_before_it():
    program = parse(
        """
def f(x: f32[4], y: out[f32[4]]):
    main: record(e)
    main: copy(x, y)
    main: record(e)
    side: wait(e)
"""
    )
    assert arrows([program]) == (Arrow("event", "e", (0, 2), (0, 3)),)


def test_what_a_fused_op_holds_stands_at_its_place():
    program = parse(
        """
def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    main: fused(
        part(call("aten.neg.out", x, out=y[0]), record(e)),
        part(expect(told, tp.rank + 1), call("aten.neg.out", x, out=y[1])),
    )
    side: wait(e)
    side: notify(told, to=tp.others)
"""
    )
    assert arrows([program]) == (
        Arrow("signal", "told", (1, 2), (0, 0)),
        Arrow("event", "e", (0, 0), (0, 1)),
        Arrow("signal", "told", (0, 2), (1, 0)),
        Arrow("event", "e", (1, 0), (1, 1)),
    )


def test_the_kth_send_meets_the_kth_receive_also_inside_groups():
    found = arrows([parse(PIPELINE)])
    assert [(arrow.source, arrow.target) for arrow in found] == [
        ((1, 0), (0, 0)),
        ((1, 1), (0, 2)),
        ((0, 0), (1, 0)),
        ((0, 1), (1, 2)),
    ]


def test_figures_of_each_rank_and_of_all():
    timeline = run(sample())
    data = figures_json([timeline])
    assert [row["rank"] for row in data] == [0, 1, 2, 3, None]
    own = timeline.figures(rank=2)
    assert data[2]["hidden"] == own.hidden
    assert 0 < own.hidden < 1
    text = figures_text([timeline])
    assert len(text.splitlines()) == 1 + RANKS + 1
    assert percent(own.hidden) in text.splitlines()[3]


def test_only_what_is_whole_is_all_of_it():
    shares = {0.0: "0%", 0.004: "0%", 0.934: "93%", 0.996: "99.6%", 0.99999: "99.9%", 1.0: "100%"}
    assert {share: percent(share) for share in shares} == shares
