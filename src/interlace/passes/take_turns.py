"""take_turns: puts into a peer begin when those of the rank before it are done.

Before a reduction all ranks put to rank + 1, then to rank + 2, and so on. Ranks that are not quite
in step meet at a receiver, and two copies into one GPU take far longer than one after the other: of
16 MiB to each of three peers, four H200 move 217 GB/s where ranks meet and 355 where they do not.
So a rank that is done with a peer says so to the one that comes to it next:

    comm: put(y[tp.rank + 1], slots[tp.rank], peer=tp.rank + 1)
    comm: notify(slots_arrived, to=tp.rank + 1)
    comm: notify(slots_turn, to=tp.rank - 1)
    comm: expect(slots_turn, tp.rank + 1)
    comm: put(y[tp.rank + 2], slots[tp.rank], peer=tp.rank + 2)

A turn takes some microseconds, which pays from TURN_BYTES on. No dependency rests on it, so this
pass goes after `insert_sync`. Before a matmul nothing is said: there the kernel that waits for what
the peers put would have to wait for all turns before it may begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar

from interlace.ir import Expect, Notify, Op, Program, Put, RankIndex, Record
from interlace.passes.emitter import Names
from interlace.passes.overlaps import representatives

TURN_BYTES = 4 << 20
"""Copies into each peer for which turns pay: 80 against 75 us for three of so many bytes, but 48
against 56 for half of them (four H200)."""
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
        names = Names(program)
        before: dict[int, Op] = {}
        after: dict[int, Op] = {}
        for site in program.sites:
            visits = _visits(program, site.id) if site.kind.startswith("matmul_") else []
            if not visits or not self._pays(program, visits):
                continue
            one, two = (_put(program, visit[0]) for visit in visits[:2])
            turn = names.new(f"{one.dst.buffer}_turn")
            step = _offset(two) - _offset(one)
            peer = RankIndex(one.team)
            for number, (visit, following) in enumerate(pairwise(visits), 1):
                done = Notify(signal=turn, peer=peer - step, team=one.team, value=number)
                due = Expect(signal=turn, peer=peer + step, team=one.team, value=number)
                place = {"stream": one.stream, "site": site.id, "loc": one.loc}
                after[_told(program.ops, visit[-1])] = replace(done, **place)
                before[following[0]] = replace(due, **place)
        ops: list[Op] = []
        for index, op in enumerate(program.ops):
            ops += [*([before[index]] if index in before else ()), op]
            ops += [after[index]] if index in after else ()
        return program.replace(ops=tuple(ops))

    def _pays(self, program: Program, visits: Sequence[Visit]) -> bool:
        """Whether some rank puts that much, in the mean of its peers. All ranks say the same."""
        buffers, least = program.buffers(), self.least or TURN_BYTES
        views = [_put(program, index).src for visit in visits for index in visit]
        return any(
            sum(view.box(buffers[view.buffer], where).nbytes for view in views)
            >= least * len(visits)
            for where in map(program.where, representatives(program))
        )


def _visits(program: Program, site: int) -> list[Visit]:
    """The visits of a site, in their order; none where there are no turns to take: peers are not
    each a step further than the one before, or their puts are on streams that await peers."""
    places = [i for i, op in enumerate(program.ops) if isinstance(op, Put) and op.site == site]
    puts = [_put(program, index) for index in places]
    streams = {put.stream for put in puts}
    awaits = any(
        isinstance(op, Expect) and op.site == site and op.stream in streams for op in program.ops
    )
    if awaits or len(streams) != 1 or not all(isinstance(put.peer, RankIndex) for put in puts):
        return []
    visits = [list(group) for _, group in groupby(places, lambda i: _put(program, i).peer)]
    offsets = [_offset(_put(program, visit[0])) for visit in visits]
    steps = {after - before for before, after in pairwise(offsets)}
    return [*visits] if len(steps) == 1 and 0 not in steps else []


def _told(ops: Sequence[Op], last: int) -> int:
    """Where the peer has been told of its last put."""
    told = last
    for index in range(last + 1, len(ops)):
        if ops[index].stream == ops[last].stream:
            if not isinstance(ops[index], Notify | Record):
                break
            told = index
    return told


def _put(program: Program, index: int) -> Put:
    op = program.ops[index]
    assert isinstance(op, Put)
    return op


def _offset(put: Put) -> int:
    assert isinstance(put.peer, RankIndex)
    return put.peer.offset
