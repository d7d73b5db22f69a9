"""Mirror: a Program whose remote views are those of the peers, on a rank that is its own peers.

    mirrored(program)          # put(x, full[tp.rank], peer=tp.rank + 1) -> full[tp.rank - 1]

Note [A rank that is its own peers]
    In a mirror team all memory of peers is the rank's own. Where a rank puts to its neighbour, its
    other neighbour puts to it, by the same op: so the op keeps its local side, and has the remote
    view of the rank whose peer in that op is this one. Signals and messages to a peer come back as
    those from the rank at the same distance on the other side (`seen_by` in comm/teams.py). What
    comes before what is then as on each of N ranks, if all do the same: if turning a team changes
    nothing (symmetry.py). Values differ: a peer's part of a sum is one's own part of another chunk.
    So results compare with those of the same mirrored Program in order, and with nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from interlace.errors import UnsupportedError
from interlace.ir.ops import Collective, Get, Op, Put
from interlace.ir.program import Program, map_values, spots
from interlace.ir.types import Index, Others, RankIndex


def mirrored(program: Program) -> Program:
    """The Program for a rank whose peers are itself: Note [A rank that is its own peers].

    Args:
        program: one text for all ranks, in which no rank of a team differs from another.

    Returns:
        The same ops in the same order; the remote view of a Put or a Get is that of the rank whose
        peer in this op is the one that runs it.

    Raises:
        UnsupportedError: it tells ranks apart, so that no rank can stand for its peers.

    Examples:
        >>> print(mirrored(program).ops[3].dst)
        full[tp.rank - 1]
    """
    if program.rank is not None:
        _refuse(program, "is one rank's own", "give the Program that all ranks share")
    for table in program.tables:
        if len({*table.values}) > 1:
            _refuse(program, f"has uneven parts ({table.name})", "give all ranks as many rows")
    for team in program.teams:
        if team.hosts is not None:
            _refuse(program, f"has team {team.name} on several hosts", "mirror one host's team")
    for (index, _), op in spots(program.ops):
        for item in op.transfers:
            _check(program, index, item)
    return program.replace(ops=tuple(map(_reflected, program.ops)))


def _check(program: Program, index: int, op: Op) -> None:
    ordering = op.ordering()
    signals = [level for level in (ordering.raises, ordering.expects) if level is not None]
    accesses = [*op.reads(), *op.writes()]
    for end in (*ordering.messages, *signals, *accesses):
        peer: Index | Others | None = end.peer
        if peer is not None and (isinstance(peer, int) or peer.team != end.team):
            fix = "count peers from the rank (tp.rank + 1)"
            _refuse(program, f"names rank {peer} as a peer in op {index}", fix)
    named = any(team.groups is not None for team in program.teams)
    if named and isinstance(op, Put | Get) and _rank_of_another_team(op):
        fix = "use the rank of the team that it is sent in, or teams that are axes of a mesh"
        _refuse(program, f"has the rank of another team in op {index}", fix)
    if isinstance(op, Collective) and op.root is not None:
        _refuse(program, f"has a root in op {index} ({op.kind})", "use a collective without one")
    if isinstance(op, Collective) and op.sent is not None:
        fix = "declare even parts (no sent= and received=)"
        _refuse(program, f"exchanges counts that are data in op {index}", fix)


def _rank_of_another_team(op: Put | Get) -> bool:
    """True if a view depends on one: along an axis of a mesh peers have it alike, else not."""
    found = list[RankIndex]()

    def look(value: object) -> object:
        if isinstance(value, RankIndex) and value.team != op.team:
            found.append(value)
        return value

    map_values(op, look)
    return bool(found)


def _refuse(program: Program, what: str, fix: str) -> NoReturn:
    raise UnsupportedError(
        f"{program.name} {what}, and in a mirror team each rank does what all do. fix: {fix}, or "
        "run it on real ranks"
    )


def _reflected(op: Op) -> Op:
    """A Put or a Get with the remote view of the rank whose peer this rank is; others as is."""
    if not isinstance(op, Put | Get) or isinstance(op.peer, int):
        return op
    team, away = op.team, op.peer.offset

    def seen(value: object) -> object:
        return value - away if isinstance(value, RankIndex) and value.team == team else value

    other = map_values(op, seen)
    if isinstance(op, Put) and isinstance(other, Put):
        return replace(op, dst=other.dst)
    if isinstance(op, Get) and isinstance(other, Get):
        return replace(op, src=other.src, dst=op.target)
    return op
