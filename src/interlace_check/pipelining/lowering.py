"""Adds the messages to a compute-only schedule, in the order in which torch adds them.

    >>> order = PipelineOrder.of([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> [str(placed.action) for placed in add_messages(order, Layout.of(order)).sequences[1]]
    ['1RECV_F0', '1F0', '1B0', '1SEND_B0']

torch's loader (`format="compute_only"`) does this before a run, so what is checked of such a file
is what would run. Ranks take turns, in order, one action each if it is ready; an action whose
result another rank needs is followed by its send, and at the same moment the receive is put at the
end of what that rank has done. So a receive stands where its sender was in this order, not where
its reader is. An action is ready if its input was received, or made on its own rank.

torch's turns also count what it adds for FSDP (UNSHARD and so on), which differs by version and is
left out here. The verdict does not depend on it: whatever the turns, the two ends of a message are
appended at one moment, so all ranks issue their messages in one common order, and whether every
action becomes ready at some time does not depend on who goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlace_check.pipelining.actions import BACKWARD, COMPUTE, Action
from interlace_check.pipelining.schedule import Key, Layout, PipelineOrder, Placed


@dataclass(frozen=True, slots=True)
class Lowered:
    """The schedule with its messages. If no rank could go on, these end where each one stopped."""

    sequences: list[list[Placed]]
    stuck: tuple[tuple[Placed, Action], ...] = ()
    """An action that never becomes ready, and the computation whose result it lacks."""


def add_messages(order: PipelineOrder, layout: Layout) -> Lowered:
    """The schedule with the sends and receives that torch adds."""
    lowering = _Lowering(order, layout)
    active = set(range(len(order.cells)))
    while active:
        for rank in range(len(order.cells)):
            if rank in active:
                active |= lowering.turn(rank)
                if lowering.is_done(rank) or lowering.missing(rank) is not None:
                    active.discard(rank)
    stuck = [lack for rank in range(len(order.cells)) if (lack := lowering.missing(rank))]
    for rank, sequence in enumerate(lowering.sequences):
        first = lowering.next[rank]
        sequence += [placed for placed in order.placed(rank) if (placed.index or 0) >= first]
    return Lowered(lowering.sequences, tuple(stuck))


class _Lowering:
    def __init__(self, order: PipelineOrder, layout: Layout) -> None:
        self.order, self.layout = order, layout
        self.next = [0] * len(order.cells)
        self.sequences: list[list[Placed]] = [[] for _ in order.cells]
        self.ready: list[set[Key]] = [set() for _ in order.cells]
        """Inputs that are there, by rank: the computation that takes one."""

    def is_done(self, rank: int) -> bool:
        return self.next[rank] == len(self.order.cells[rank])

    def leaves(self, rank: int) -> tuple[Action, ...]:
        """The next actions of a rank."""
        cell = None if self.is_done(rank) else self.order.cells[rank][self.next[rank]]
        return () if cell is None else tuple(cell.leaves())

    def missing(self, rank: int) -> tuple[Placed, Action] | None:
        """The next action of a rank that is not ready, and what it lacks."""
        for leaf in self.leaves(rank):
            source = self.layout.source(leaf)
            if source is not None and _input(leaf) not in self.ready[rank]:
                kind = "F" if source[0] == "SEND_F" else "B"
                placed = Placed(rank, self.next[rank], leaf)
                return placed, Action(kind, source[1], source[2])
        return None

    def turn(self, rank: int) -> set[int]:
        """One turn of a rank, if it is ready; the ranks that get an input by it."""
        if self.is_done(rank) or self.missing(rank) is not None:
            return set()
        leaves = self.leaves(rank)
        self.sequences[rank] += [Placed(rank, self.next[rank], leaf) for leaf in leaves]
        self.next[rank] += 1
        reached: set[int] = set()
        for leaf in leaves:
            if leaf.kind in COMPUTE and leaf.kind != "W":
                forward = leaf.kind == "F"
                send = Action("SEND_F" if forward else "SEND_B", leaf.stage, leaf.microbatch)
                peer, receive = self.layout.peer(send), self.layout.other_end(send)
                if peer is None:
                    continue
                if peer != rank:
                    self.sequences[rank].append(Placed(rank, None, send))
                    self.sequences[peer].append(Placed(peer, None, receive))
                self.ready[peer].add(("F" if forward else "B", receive.stage, leaf.microbatch))
                reached.add(peer)
        return reached


def _input(action: Action) -> Key:
    """The name of an action's input: B and I take the same."""
    return "B" if action.kind in BACKWARD else action.kind, action.stage, action.microbatch
