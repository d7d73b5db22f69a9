"""A Program for a rank that is its own peers: its text, that it is sound, its predicted time, and
what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.gpu.cases import HOW, KINDS, STRATEGIES, Case

from interlace.cost.simulate import simulate
from interlace.errors import UnsupportedError
from interlace.ir import Expect, Fused, Get, Group, Notify, Op, Program, Put, Recv, Send, parse
from interlace.ir.mirror import mirrored
from interlace.ir.types import Others, Team
from interlace.verify import check

ONE_SIDED = """
def f(tp: Team[4], x: bf16[8, 16], y: out[bf16[32, 16]]):
    slot = alloc(bf16[32, 16], symmetric=tp, stream="comm")
    comm: put(x, slot[tp.rank], peer=tp.rank + 1)
    comm: notify(came, to=tp.rank + 1)
    comm: get(slot[tp.rank - 2], peer=tp.rank + 2)
"""


def test_the_remote_view_is_that_of_the_rank_whose_peer_this_one_is() -> None:
    """The left neighbour puts to this rank what this rank puts to the right one."""
    assert str(mirrored(parse(ONE_SIDED))).splitlines()[2:6] == [
        "    comm: put(x, slot[tp.rank - 1], peer=tp.rank + 1)",
        "    comm: notify(came, to=tp.rank + 1)",
        "    comm: get(slot[tp.rank - 4], slot[tp.rank - 2], peer=tp.rank + 2)",
    ]


def as_its_own_peer(program: Program, rank: int) -> Program:
    """One rank of a mirrored Program, each of whose signals is the rank's own, by who raises it."""
    own = program.instantiate(rank)
    size = program.teams[0].size

    def members(peer: Any) -> list[int]:
        all_others = [other for other in range(size) if other != rank]
        return all_others if isinstance(peer, Others) else [peer]

    def turned(op: Op) -> Iterator[Any]:
        match op:
            case Put() | Get() | Send() | Recv():
                yield replace(op, peer=rank)
            case Notify():
                for peer in members(op.peer):
                    yield replace(op, signal=f"{op.signal}_{(2 * rank - peer) % size}", peer=rank)
            case Expect():
                for peer in members(op.peer):
                    yield replace(op, signal=f"{op.signal}_{peer}", peer=rank)
            case Group():
                yield replace(op, ops=tuple(each for member in op.ops for each in turned(member)))
            case Fused():
                parts = [[each for member in part for each in turned(member)] for part in op.parts]
                yield replace(op, kernel=None, parts=tuple(map(tuple, parts)))
            case _:
                yield op

    return own.replace(ops=tuple(each for op in own.ops for each in turned(op)))


def reports(program: Program) -> Any:
    return check([as_its_own_peer(program, rank) for rank in program.world])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_sound_as_its_own_peer(kind: str, strategy: str, size: int) -> None:
    program = Case(kind, size).program(strategy)
    report = reports(mirrored(program))
    assert report.sound, report


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["peer-put", "fused"])
def test_peers_addresses_as_ones_own_would_not_do(kind: str, strategy: str) -> None:
    """Without the views of others it reads what nobody wrote, or writes what it has."""
    assert not reports(Case(kind, 4).program(strategy)).sound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", HOW)
def test_it_takes_the_same_time(kind: str, strategy: str) -> None:
    program = Case(kind, 4).program(strategy)
    ends = [simulate(each, "cuda").makespan_s for each in (program, mirrored(program))]
    assert ends[0] == ends[1] > 0


REFUSED = {
    "one rank's own": (parse(ONE_SIDED).instantiate(1), "is one rank's own"),
    "uneven": (
        """
def f(tp: Team[2], x: f32[rows[tp.rank], 8], y: out[f32[24, 8]]):
    rows = table(tp, 16, 8)
    main: all_gather(x, y, team=tp, splits=rows)
""",
        r"has uneven parts \(rows\)",
    ),
    "a rank by number": (
        """
def f(tp: Team[2], x: f32[8, 8]):
    slot = alloc(f32[8, 8], symmetric=tp)
    main: put(x, slot, peer=1)
""",
        "names rank 1 as a peer in op 1",
    ),
    "a root": (
        """
def f(tp: Team[2], x: f32[8, 8], y: out[f32[8, 8]]):
    main: broadcast(x, y, root=0, team=tp)
""",
        r"has a root in op 0 \(broadcast\)",
    ),
    "counts that are data": (
        """
def f(tp: Team[2], x: f32[8, 8], s: i64[2], r: i64[2], y: out[f32[8, 8]]):
    main: all_to_all(x, y, sent=s, received=r, team=tp)
""",
        "exchanges counts that are data in op 0",
    ),
    "several hosts": (
        Program(name="f", teams=(Team("tp", 4, hosts=((0, 1), (2, 3))),)),
        "has team tp on several hosts",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_tells_ranks_apart_is_refused(what: str) -> None:
    program, why = REFUSED[what]
    with pytest.raises(UnsupportedError, match=f"f {why}.* fix: .*or run it on real ranks"):
        mirrored(parse(program) if isinstance(program, str) else program)
