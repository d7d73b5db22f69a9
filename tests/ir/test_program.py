"""Programs: who runs them, what they hold, and the concrete Program of one rank."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random

import pytest
from tests.fuzzing.draw import well_formed

from interlace.errors import ProgramError, TeamError
from interlace.ir import (
    KINDS,
    Copy,
    DType,
    Op,
    Program,
    RankIndex,
    Team,
    View,
    map_views,
    parse,
    parse_set,
)
from interlace.ir.text.printer import print_op, print_view

MESH = parse(
    """
def f(
    dp: Team[2], tp: Team[3], pipe: Team[[0, 3], [1, 4], [2, 5]],
    x: f32[rows[tp.rank], 4], y: out[f32[6, 4]],
):
    rows = table(tp, 1, 2, 3)
    site(4, "all_gather")
    t = alloc(f32[6, 4])
    main: copy(x, t.chunk(tp.rank, rows))
    main: broadcast(t, t, root=dp.rank, team=tp)
    comm: group(send(t, peer=pipe.rank + 1), recv(t, peer=pipe.rank - 1))
    comm: notify(ready, to=tp.others)
    comm: expect(ready, tp.rank - 1)
    main: call("aten.neg.default", t[0:rows[tp.rank]], out=(u := f32[rows[tp.rank], 4]))
    return y, (u, x)
"""
)


def test_the_first_axis_varies_slowest() -> None:
    assert MESH.world == (0, 1, 2, 3, 4, 5)
    places = [
        {name: m.index for name, m in MESH.where(rank).members.items()} for rank in MESH.world
    ]
    assert [place["dp"] for place in places] == [0, 0, 0, 1, 1, 1]
    assert [place["tp"] for place in places] == [0, 1, 2, 0, 1, 2]
    assert [place["pipe"] for place in places] == [0, 0, 0, 1, 1, 1]
    assert MESH.where(4).members["tp"].ranks == (3, 4, 5)
    assert MESH.where(4).members["dp"].ranks == (1, 4)
    assert MESH.where(4).members["pipe"].ranks == (1, 4)


def test_ranks_may_be_named() -> None:
    program = Program(teams=(Team("tp", 2),), ranks=(7, 3))
    assert program.world == (7, 3)
    assert program.where(3).members["tp"].index == 1
    assert program.where(3).members["tp"].ranks == (7, 3)
    assert Program(teams=(Team("pp", 2, ((4, 1),)),)).world == (1, 4)
    assert Program().world == (0,)
    with pytest.raises(TeamError, match="rank 5 is not among"):
        program.where(5)
    with pytest.raises(TeamError, match="span 2 ranks, but the Program runs on 3"):
        program.replace(ranks=(0, 1, 2)).where(0)


def test_one_rank() -> None:
    concrete = MESH.instantiate(5)
    assert (concrete.rank, concrete.ranks) == (5, MESH.world)
    text = str(concrete)
    for line in (
        "x: f32[3, 4]",
        "main: copy(x, t.chunk(2, rows))",
        "main: broadcast(t, t, root=1, team=tp)",
        "comm: group(send(t, peer=0, team=pipe), recv(t, peer=0, team=pipe))",
        "comm: notify(ready, to=tp.others)",
        "comm: expect(ready, 1, team=tp)",
        'main: call("aten.neg.default", t[0:3], out=(u := f32[3, 4]))',
    ):
        assert line in text
    assert concrete.instantiate(5) is concrete
    with pytest.raises(ProgramError, match="already instantiated for rank 5"):
        concrete.instantiate(4)


def test_boxes_agree_before_and_after(seed: int) -> None:
    """`instantiate` changes what is written, not which bytes an op touches."""
    rng = random.Random(seed)
    compared = 0
    for _ in range(40):
        program = well_formed(rng, 12)
        rank = rng.choice(program.world)
        concrete = program.instantiate(rank)
        mine, its = program.boxes(rank), concrete.boxes(rank)
        assert len(program.ops) == len(concrete.ops)
        for op, other in zip(program.ops, concrete.ops, strict=True):
            for before, after in (
                *zip(op.reads(), other.reads(), strict=True),
                *zip(op.writes(), other.writes(), strict=True),
            ):
                if before.view.buffer != "rng":
                    assert mine(before.view) == its(after.view)
                    compared += 1
    assert compared > 200


def test_what_a_program_holds() -> None:
    assert list(MESH.buffers()) == ["x", "y", "t", "u"]
    assert MESH.streams() == ("main", "comm")
    assert MESH.team("tp").size == 3
    assert MESH.site(4).kind == "all_gather"
    assert MESH.returned() == (View("y"), (View("u"), View("x")))
    assert MESH.replace(results=None).returned() == (View("y"),)
    with pytest.raises(ProgramError, match="no team named 'pp'"):
        MESH.team("pp")
    with pytest.raises(ProgramError, match="no site 1; known are"):
        MESH.site(1)
    with pytest.raises(ProgramError, match="no buffer named 'z'"):
        MESH.boxes(0)(View("z"))


def test_every_op_tells_what_it_touches(seed: int) -> None:
    """`map_views` reaches each view that `reads` and `writes` name, except what a call makes."""
    rng = random.Random(seed)
    kinds: set[type[Op]] = set()
    for _ in range(60):
        for op in well_formed(rng, 12).ops:
            renamed = map_views(op, lambda view: View(f"new_{view.buffer}", view.steps))
            fresh = {buffer.name for buffer in getattr(op, "fresh", ())}
            for access in (*renamed.reads(), *renamed.writes()):
                name = access.view.buffer
                assert name.startswith("new_") or name in fresh | {"rng"}
            kinds.add(type(op))
    assert len(kinds) > 10


def test_single_ops_and_views_print() -> None:
    assert print_op(MESH.ops[1], MESH) == "main: copy(x, t.chunk(tp.rank, rows))"
    assert print_op(MESH.ops[0], MESH) == "t = alloc(f32[6, 4])"
    view = View("x").chunk(RankIndex("tp", 1), 3)
    assert print_view(view, MESH) == "x[tp.rank + 1]"
    assert print_view(view) == "x.chunk(tp.rank + 1, 3)"


def test_the_hosts_of_a_team() -> None:
    groups = "tp: Team[[4, 5, 6, 7]].on([0, 2], [1, 3])"
    program = parse(f"def f({groups}, x: f32[4]):\n    main: barrier(team=tp)\n")
    (team,) = program.teams
    assert team == Team("tp", 4, ((4, 5, 6, 7),), ((0, 2), (1, 3)))
    assert groups in str(program)
    assert parse(str(program)) == program
    assert [team.apart(0, other) for other in range(4)] == [False, True, False, True]


def test_rows_of_kinds_and_types() -> None:
    for kind, row in KINDS.items():
        assert row.reads in ("all", "root", "none"), kind
        assert row.writes in ("all", "root", "none"), kind
        assert row.scales in ("", "gather", "scatter"), kind
        assert row.rooted == ("root" in (row.reads, row.writes)), kind
    assert {dtype.itemsize for dtype in DType} == {1, 2, 4, 8, 16}


def test_comments_and_docstrings_are_for_readers() -> None:
    text = '"""A file."""\n# a comment\ndef f(x: f32[4]):\n    """Why."""\n    main: host_sync()\n'
    (program,) = parse_set(text)
    assert len(program.ops) == 1


def test_an_op_answers_once_and_a_changed_one_anew() -> None:
    op, unasked = (Copy(src=View("x"), dst=View("y")) for _ in range(2))
    assert op.reads() is op.reads()
    assert op.writes() is op.writes()
    assert (op, hash(op), repr(op)) == (unasked, hash(unasked), repr(unasked))
    other = dataclasses.replace(op, src=View("z"))
    assert [access.view.buffer for access in other.reads()] == ["z"]
    for twin in (copy.copy(op), pickle.loads(pickle.dumps(op))):
        assert twin == op
        assert twin.reads() == op.reads()
