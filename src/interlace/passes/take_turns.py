"""take_turns: puts into a peer begin when those of the rank before it are done.

Before a reduction all ranks put to rank + 1, then to rank + 2, and so on. Where ranks meet at a
receiver, 16 MiB to each of three peers take four H200 at 217 GB/s instead of 355. So a rank that is
done with a peer says so to the one that comes to it next:

    comm: put(y[tp.rank + 1], slots[tp.rank], peer=tp.rank + 1)
    comm: notify(slots_turn, to=tp.rank - 1)
    comm: expect(slots_turn, tp.rank + 1)
    comm: put(y[tp.rank + 2], slots[tp.rank], peer=tp.rank + 2)

There are no turns below TURN_BYTES, in slabs, in the Program of one rank, nor before a matmul,
whose kernel would have to wait for all turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar

from interlace.ir import Expect, Notify, Op, Program, Put, RankIndex, Record
from interlace.passes.overlaps import representatives
from interlace.passes.strategies.emitter import Names

TURN_BYTES = 4 << 20
"""Copies into each peer for which turns pay: three of so many bytes take 75 us with turns and 80
without, three of half of that 56 and 48 (four H200)."""
Visit = Sequence[int]
"""The puts of a site into one peer, by their places in the list."""


@dataclass(frozen=True)
class TakeTurns:
    """Has ranks put into a peer one after another, where what each puts there is large."""

    name: ClassVar[str] = "take_turns"
    least: int = 0
    """Bytes that a rank puts into each peer, at least; 0: TURN_BYTES."""

    def run(self, program: Program) -> Program:
        """The same Program with the signals of turns."""
        if program.rank is not None:
            return program
        signals = _Turns(program, self.least or TURN_BYTES)
        ops: list[Op] = []
        for index, op in enumerate(program.ops):
            ops += [*signals.before.get(index, ()), op, *signals.after.get(index, ())]
        return program.replace(ops=tuple(ops))


class _Turns:
    """The signals of all sites, by the ops that they stand before and after."""

    def __init__(self, program: Program, least: int) -> None:
        self.before: dict[int, tuple[Op, ...]] = {}
        self.after: dict[int, tuple[Op, ...]] = {}
        self._ops, self._least = program.ops, least
        self._buffers = program.buffers()
        self._wheres = [program.where(rank) for rank in representatives(program)]
        names = Names(program)
        wanted = {site.id for site in program.sites if site.kind.startswith("matmul_")}
        puts: dict[int, list[int]] = {}
        for index, op in enumerate(program.ops):
            if isinstance(op, Put) and op.site in wanted:
                puts.setdefault(op.site, []).append(index)
        for places in puts.values():
            visits = self._visits(places)
            if visits:
                self._add(visits, names)

    def _add(self, visits: Sequence[Visit], names: Names) -> None:
        one, two = (self._put(visit[0]) for visit in visits[:2])
        step, rank = _offset(two) - _offset(one), RankIndex(one.team)
        turn = names.new(f"{one.dst.buffer}_turn")
        for number, (visit, following) in enumerate(pairwise(visits), 1):
            done = Notify(signal=turn, peer=rank - step, team=one.team, value=number)
            due = Expect(signal=turn, peer=rank + step, team=one.team, value=number)
            place = {"stream": one.stream, "site": one.site, "loc": one.loc}
            self.after[self._told(visit[-1])] = (replace(done, **place),)
            self.before[following[0]] = (replace(due, **place),)

    def _visits(self, places: Sequence[int]) -> list[Visit]:
        """The puts of a site peer after peer; none where there are no turns to take: peers are not
        each a step further than the one before, or what is put is little. All ranks decide alike.
        """
        puts = [self._put(index) for index in places]
        streams = {put.stream for put in puts}
        if len(streams) != 1 or not all(isinstance(put.peer, RankIndex) for put in puts):
            return []
        between = self._ops[places[0] : places[-1]]
        if any(isinstance(op, Expect) and op.stream in streams for op in between):
            return []  # it waits for peers already
        visits: list[Visit] = [
            list(group) for _, group in groupby(places, lambda i: self._put(i).peer)
        ]
        offsets = [_offset(self._put(visit[0])) for visit in visits]
        steps = {after - before for before, after in pairwise(offsets)}
        if len(steps) != 1:
            return []
        most = max(
            sum(put.src.box(self._buffers[put.src.buffer], where).nbytes for put in puts)
            for where in self._wheres
        )
        return visits if most >= self._least * len(visits) else []

    def _told(self, last: int) -> int:
        """Where the peer has been told of its last put."""
        told = last
        for index in range(last + 1, len(self._ops)):
            if self._ops[index].stream == self._ops[last].stream:
                if not isinstance(self._ops[index], Notify | Record):
                    break
                told = index
        return told

    def _put(self, index: int) -> Put:
        op = self._ops[index]
        assert isinstance(op, Put)
        return op


def _offset(put: Put) -> int:
    assert isinstance(put.peer, RankIndex)
    return put.peer.offset
