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
    while lowering.round():
        pass
    stuck = [found for rank in range(len(order.cells)) if (found := lowering.missing(rank))]
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
        self.active = set(range(len(order.cells)))
        """Ranks that are not known to wait for an input, or to be at their end."""

    def round(self) -> bool:
        """One turn of every rank; whether any went on."""
        moved = False
        for rank, cells in enumerate(self.order.cells):
            if rank not in self.active:
                continue
            if self.next[rank] < len(cells) and self.missing(rank) is None:
                self.take(rank)
                moved = True
            else:
                self.active.discard(rank)
        return moved

    def missing(self, rank: int) -> tuple[Placed, Action] | None:
        """The next action of a rank that is not ready, and what it lacks."""
        cells, index = self.order.cells[rank], self.next[rank]
        cell = cells[index] if index < len(cells) else None
        for leaf in cell.leaves() if cell is not None else ():
            source = self.layout.source(leaf)
            if source is not None and _input(leaf) not in self.ready[rank]:
                kind = "F" if source[0] == "SEND_F" else "B"
                return Placed(rank, index, leaf), Action(kind, source[1], source[2])
        return None

    def take(self, rank: int) -> None:
        index = self.next[rank]
        self.next[rank] += 1
        cell = self.order.cells[rank][index]
        leaves = tuple(cell.leaves()) if cell is not None else ()
        self.sequences[rank] += [Placed(rank, index, leaf) for leaf in leaves]
        for leaf in leaves:
            self.pass_on(rank, leaf)

    def pass_on(self, rank: int, action: Action) -> None:
        """The result of a computation, to whoever takes it."""
        if action.kind not in COMPUTE or action.kind == "W":
            return
        forward = action.kind == "F"
        send = Action("SEND_F" if forward else "SEND_B", action.stage, action.microbatch)
        peer = self.layout.peer(send)
        if peer is None:
            return
        receive = self.layout.other_end(send)
        if peer != rank:
            self.sequences[rank].append(Placed(rank, None, send))
            self.sequences[peer].append(Placed(peer, None, receive))
        self.ready[peer].add(("F" if forward else "B", receive.stage, action.microbatch))
        self.active.add(peer)


def _input(action: Action) -> Key:
    """The name of an action's input: B and I take the same."""
    return "B" if action.kind in BACKWARD else action.kind, action.stage, action.microbatch
