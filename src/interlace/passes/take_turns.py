"""take_turns: puts into a peer begin when those of the rank before it are done.

Before a reduction all ranks put to rank + 1, then to rank + 2, and so on. Where ranks meet at a
receiver, 16 MiB to each of three peers take four H200 at 217 GB/s instead of 355. So a rank that is
done with a peer says so to the one that comes to it next:

    comm: put(y[tp.rank + 1], slots[tp.rank], peer=tp.rank + 1)
    comm: notify(slots_turn, to=tp.rank - 1)
    comm: expect(slots_turn, tp.rank + 1)
    comm: put(y[tp.rank + 2], slots[tp.rank], peer=tp.rank + 2)

There are no turns below TURN_BYTES, in slabs, nor before a matmul,
whose kernel would have to wait for all turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar

from interlace.ir import Expect, Notify, Op, Program, Put, RankIndex
from interlace.ir.overlap import representatives
from interlace.passes.rewrite import Rewrite
from interlace.passes.strategies.emitter import Names
from interlace.passes.uses import Placed, puts_of

TURN_BYTES = 4 << 20
"""Copies into each peer for which turns pay: three of this size take 75 us with turns and 80
without, three of half of that 56 and 48 (four H200)."""
Visit = list[Placed]
"""The puts of a site into one peer."""


@dataclass(frozen=True)
class TakeTurns:
    """Has ranks put into a peer one after another, where what each puts there is large."""

    name: ClassVar[str] = "take_turns"
    least: int = 0
    """Bytes that a rank puts into each peer, at least; 0: TURN_BYTES."""

    def run(self, program: Program) -> Program:
        """The same Program with the signals of turns."""
        wanted = {site.id for site in program.sites if site.kind.startswith("matmul_")}
        puts = puts_of(program, wanted)
        if not puts:
            return program
        names, buffers, rewrite = Names(program), program.buffers(), Rewrite(program.ops)
        wheres = [program.where(rank) for rank in representatives(program)]
        for placed in puts.values():
            visits = _visits(placed, program.ops)
            boxes = ([p.src.box(buffers[p.src.buffer], w) for _, p in placed] for w in wheres)
            most = max(sum(box.nbytes for box in listed) for listed in boxes)
            if visits and most >= (self.least or TURN_BYTES) * len(visits):
                _add(visits, program.ops, names, rewrite)
        return program.replace(ops=rewrite.ops())


def _add(visits: Sequence[Visit], ops: Sequence[Op], names: Names, rewrite: Rewrite) -> None:
    """Adds the signals of turns."""
    (_, one), (_, two) = visits[0][0], visits[1][0]
    step, rank = _offset(two) - _offset(one), RankIndex(one.team)
    turn = names.new(f"{one.dst.buffer}_turn")
    for number, (visit, following) in enumerate(pairwise(visits), 1):
        done = Notify(signal=turn, peer=rank - step, team=one.team, value=number)
        due = Expect(signal=turn, peer=rank + step, team=one.team, value=number)
        place = {"stream": one.stream, "site": one.site, "loc": one.loc}
        rewrite.after(_told(ops, visit[-1][0]), replace(done, **place))
        rewrite.before(following[0][0], replace(due, **place))


def _visits(puts: Visit, ops: Sequence[Op]) -> list[Visit]:
    """The puts of a site peer after peer; none where peers are not each a step further than the one
    before. All ranks decide alike."""
    streams = {put.stream for _, put in puts}
    if len(streams) != 1 or not all(isinstance(put.peer, RankIndex) for _, put in puts):
        return []
    between = ops[puts[0][0] : puts[-1][0]]
    if any(op.ordering().expects and op.stream in streams for op in between):
        return []  # it waits for peers already
    visits = [list(group) for _, group in groupby(puts, lambda placed: placed[1].peer)]
    offsets = [_offset(visit[0][1]) for visit in visits]
    steps = {after - before for before, after in pairwise(offsets)}
    return visits if len(steps) == 1 else []


def _told(ops: Sequence[Op], last: int) -> int:
    """The notify after the last put into a peer."""
    told = last
    for index in range(last + 1, len(ops)):
        if ops[index].stream == ops[last].stream:
            ordering = ops[index].ordering()
            if not (ordering.raises or ordering.records):
                break
            told = index
    return told


def _offset(put: Put) -> int:
    assert isinstance(put.peer, RankIndex)
    return put.peer.offset
