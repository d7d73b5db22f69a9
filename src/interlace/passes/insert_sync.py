"""insert_sync: the events that order the streams, and no more than suffice.

Every dependency between two streams needs a path of stream order and events. `clocks` follows those
paths: a dependency that others imply gets no event, so what remains is the transitive reduction of
the order. Events that the Program already has are dropped first.

    comm: all_gather(x, full, team=tp)
    comm: record(e1)
    main: wait(e1)
    main: call("aten.mm.out", full, w, out=y)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.errors import PassError
from interlace.ir import Op, Program, Record, Wait
from interlace.passes.dependencies import Before, dependencies
from interlace.passes.rewrite import Rewrite


@dataclass(frozen=True)
class InsertSync:
    """Adds the fewest `Record`s and `Wait`s that order every dependency between streams."""

    name: ClassVar[str] = "insert_sync"

    def run(self, program: Program) -> Program:
        """The same ops in the same order on the same streams, with events between them."""
        program = strip_events(program)
        return with_events(program, dependencies(program, listed=False))


def with_events(program: Program, before: Before) -> Program:
    """A Program without events, with those that order what its ops must follow on their streams."""
    order = clocks(program.ops, before)
    events = {source: 0 for wait in order.waits for source in wait}
    for number, source in enumerate(sorted(events), 1):
        events[source] = number
    rewrite = Rewrite(program.ops)
    for index, op in enumerate(program.ops):
        for source in order.waits[index]:
            wait = Wait(stream=op.stream, event=f"e{events[source]}", site=op.site)
            rewrite.before(index, wait)
        if index in events:
            record = Record(stream=op.stream, event=f"e{events[index]}", site=op.site)
            rewrite.after(index, record)
    return program.replace(ops=rewrite.ops())


def strip_events(program: Program) -> Program:
    """The Program without its `Record`s and `Wait`s."""
    if program.fused():
        raise PassError(f"{program.name} holds fused ops: the pass fuse comes last, and only once")
    orders = ((op, op.ordering()) for op in program.ops)
    return program.replace(ops=tuple([op for op, o in orders if not (o.records or o.waits)]))


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a Program's ops once the events that it needs are there.

    A clock says, for each stream, how many of its ops happen before a point.
    """

    streams: tuple[str, ...]
    waits: Before
    """For each op the ops of other streams that its stream must wait for just before it."""
    clock: tuple[tuple[int, ...], ...]
    """For each op what happens before its end, itself included."""
    position: tuple[int, ...]
    """For each op its place in its stream, from 1."""
    lane: tuple[int, ...]
    """For each op its stream, as an index of `streams`."""


def clocks(ops: Sequence[Op], before: Before) -> Order:
    """Where the streams must wait for one another, and what happens before each op."""
    streams = tuple(dict.fromkeys(op.stream for op in ops))
    number = {stream: i for i, stream in enumerate(streams)}
    now = [[0] * len(streams) for _ in streams]
    lane = tuple(number[op.stream] for op in ops)
    clock: list[tuple[int, ...]] = []
    position: list[int] = []
    waits: list[tuple[int, ...]] = []
    for index, op in enumerate(ops):
        mine, here = now[lane[index]], lane[index]
        latest: dict[int, int] = {}  # of each stream, the last op that this one needs
        for other in before[index]:
            there = lane[other]
            if position[other] > mine[there] and position[other] > latest.get(there, 0):
                latest[there] = position[other]
        needed = [o for o in before[index] if latest.get(lane[o]) == position[o]]
        kept: list[int] = []
        for other in sorted(needed, reverse=True):  # a later op may already imply an earlier one
            if position[other] > mine[lane[other]]:
                kept.append(other)
                for there, count in enumerate(clock[other]):
                    mine[there] = max(mine[there], count)
        mine[here] += 1
        position.append(mine[here])
        clock.append(tuple(mine))
        waits.append(tuple(sorted(kept)))
        if op.ordering().holds_host:  # the host issues nothing more until this op is done
            for other in now:
                for there, count in enumerate(mine):
                    other[there] = max(other[there], count)
    return Order(streams, tuple(waits), tuple(clock), tuple(position), lane)
