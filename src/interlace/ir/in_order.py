"""A Program one op after another: the order in which the twin of an overlapped Program runs.

It is the list's own, but for one thing. A part of a Fused may await what peers send only once they
are told of an earlier part's Record; the ops that see to this stand behind the Fused in every
rank's list. So before such a wait the order goes on, on the other streams, with all that waits for
nobody.

    >>> in_order(program.ops)[:4]
    [(0, 0), (1, 0), (1, 1), (2, 0)]
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.ir.ops import (
    Alloc,
    Collective,
    Expect,
    Fused,
    Group,
    HostSync,
    Op,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.program import Spot, spots


def in_order(ops: Sequence[Op]) -> list[Spot]:
    """Every op (the members of a Fused instead of the Fused) in an order that streams allow."""
    if not any(isinstance(op, Fused) for op in ops):
        return [(index, 0) for index in range(len(ops))]
    return _Order(ops).run()


def bindings(ops: Sequence[Op]) -> dict[Spot, Spot]:
    """The Record that each Wait means: the last one of its event that is listed before."""
    records: dict[str, Spot] = {}
    found: dict[Spot, Spot] = {}
    for spot, op in spots(ops):
        if isinstance(op, Record):
            records[op.event] = spot
        elif isinstance(op, Wait) and op.event in records:
            found[spot] = records[op.event]
    return found


class _Order:
    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.waits = bindings(ops)
        self.done: set[Spot] = set()
        self.listed: list[Spot] = []

    def run(self) -> list[Spot]:
        for index, op in enumerate(self.ops):
            if not isinstance(op, Fused):
                self.add((index, 0))
                continue
            told = False  # whether others may have heard of what was done here
            for number, member in enumerate(op.members):
                if told and isinstance(member, Expect | Wait):
                    self.go_on(index, op.stream)
                    told = False
                told = told or isinstance(member, Record)
                self.add((index, number))
        return self.listed

    def add(self, spot: Spot) -> None:
        if spot not in self.done:
            self.done.add(spot)
            self.listed.append(spot)

    def go_on(self, index: int, stream: str) -> None:
        """What later ops of other streams can do without waiting for anybody."""
        held = {stream}
        for later in range(index + 1, len(self.ops)):
            op, spot = self.ops[later], (later, 0)
            if isinstance(op, HostSync):
                return
            if op.stream in held or spot in self.done:
                continue
            due = isinstance(op, Wait) and self.waits.get(spot, spot) not in self.done
            if due or isinstance(op, _MEETS):
                held.add(op.stream)
            else:
                self.add(spot)


_MEETS = (Alloc, Collective, Expect, Fused, Group, Recv, Send)
"""What may wait for peers (an Alloc for a slot that they hold)."""
