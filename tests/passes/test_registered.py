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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", [*TEXTS, "barriers"])
def test_lowered_programs_stay_sound(kind: str, world: int, overlap: bool) -> None:
    source = parse(BARRIERS.strip() if kind == "barriers" else TEXTS[kind](world))
    assert check(source).sound
    lowered = lower(source, Options(overlap=overlap))
    validate(lowered)
    check(lowered).raise_if_unsound()
    assert check(lowered, in_order=True).sound
    kept = (Get, Put, Notify)
    counts = [sum(isinstance(op, kept) for op in p.ops) for p in (source, lowered)]
    assert counts[0] == counts[1] > 0
