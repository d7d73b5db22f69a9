"""Passes keep what orders registered parameters with peers, and with their callers."""

from __future__ import annotations

import pytest
from tests.support.registered import TEXTS

from interlace.ir import Get, Notify, Put, parse, validate
from interlace.options import Options
from interlace.passes import lower
from interlace.verify import check

BARRIERS = """
def f(tp: Team[3], w: f32[4, 2].registered(tp), y: out[f32[4, 2].registered(tp)]):
    comm: barrier(team=tp)
    comm: get(w, y, peer=tp.rank + 1)
    comm: record(read)
    main: wait(read)
    main: barrier(team=tp)
"""

OTHER_TEAM = """
def f(a: Team[2], w: Team[[0, 1]], x: f32[4].registered(a), y: out[f32[4]]):
    main: notify(begun, to=w.others)
    comm: expect(begun, w.rank + 1)
    comm: get(x, y, peer=a.rank + 1)
    comm: notify(done, to=w.others)
    comm: record(got)
    main: wait(got)
    main: expect(done, w.rank + 1)
"""
OTHER_BARRIERS = """
def f(a: Team[3], w: Team[[0, 1, 2]], x: f32[4].registered(a), y: out[f32[4]]):
    main: barrier(team=w)
    main: get(x, y, peer=a.rank + 1)
    main: barrier(team=w)
"""
RELAY = """
def f(tp: Team[3], x: f32[4].registered(tp), y: out[f32[4]]):
    main: notify(begun, to=tp.rank + 1)
    main: expect(begun, tp.rank - 1)
    main: notify(told, to=tp.rank + 1)
    main: expect(told, tp.rank - 1)
    main: get(x, y, peer=tp.rank - 2)
    main: notify(done, to=tp.others)
    main: expect(done, tp.rank + 1)
    main: expect(done, tp.rank + 2)
"""
"""What the next rank but one has begun is passed on by the rank between."""
MORE = {
    "relay": RELAY,
    "barriers": BARRIERS,
    "other team": OTHER_TEAM,
    "other team's barriers": OTHER_BARRIERS,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", [*TEXTS, *MORE])
def test_lowered_programs_stay_sound(kind: str, world: int, overlap: bool) -> None:
    source = parse(MORE[kind].strip() if kind in MORE else TEXTS[kind](world))
    assert check(source).sound
    lowered = lower(source, Options(overlap=overlap))
    validate(lowered)
    check(lowered).raise_if_unsound()
    assert check(lowered, in_order=True).sound
    kept = (Get, Put, Notify)
    counts = [sum(isinstance(op, kept) for op in p.ops) for p in (source, lowered)]
    assert counts[0] == counts[1] > 0
