"""Which passes the options ask for, and Programs that are no serial ones."""

from __future__ import annotations

import random

import pytest
from tests.fuzzing.draw import Draw

from interlace.ir import Fused, Recv, Send, parse
from interlace.options import Options, Regions
from interlace.passes import lower
from interlace.passes.pipeline import lowering
from interlace.verify import check

MESSAGES = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]], w: f32[8, 4], z: out[f32[16, 4]]):
    main: recv(y, peer=tp.rank + 1)
    comm: send(x, peer=tp.rank + 1)
    main: all_gather(w, z, team=tp)
"""
"""On one stream both ranks would wait for the other's message."""


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("regions", ["auto", "eager", "inductor"])
def test_regions_are_formed_where_they_are_compiled(regions: Regions, overlap: bool) -> None:
    names = [item.name for item in lowering(Options(regions=regions, overlap=overlap))]
    assert ("form_regions" in names) == (regions == "inductor")
    assert names[0] == "find_sites"
    assert names[-1] == ("fuse" if overlap else "insert_sync")
    assert ("schedule" in names) == overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_streams_that_messages_need_stay(overlap: bool) -> None:
    source = parse(MESSAGES)
    made = lower(source, Options(overlap=overlap))
    assert check(source).sound
    assert check(made).sound
    assert [op.stream for op in made.ops if isinstance(op, Send | Recv)] == ["main", "comm"]
    if overlap:
        assert made.ops == source.ops
        assert [remark.text for remark in made.remarks] == ["left as written: it would be unsound"]


@pytest.mark.timeout(200)
def test_what_is_sound_stays_sound(seed: int) -> None:
    """Programs with ops of every kind by hand, on registered and symmetric memory too."""
    rng, seen = random.Random(seed), 0
    while seen < 100:
        part = rng.getrandbits(32)
        drawn = random.Random(part)
        program = Draw(drawn).program(drawn.randint(3, 7))
        if any(isinstance(op, Fused) for op in program.ops) or not check(program).sound:
            continue
        seen += 1
        made = lower(program, Options(overlap=drawn.random() < 0.7))
        assert check(made).sound, f"part {part}:\n{program}\n{made}"
