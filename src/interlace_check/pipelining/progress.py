"""Progress of a compute-only schedule, to which torch's loader adds the messages before a run.

    >>> order = PipelineOrder.of([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> stuck(order, Layout.of(order))
    []

torch lets ranks take turns, one action each if its input was received or made on its own rank. An
action whose result another rank needs is followed by its send, and at the same moment the receive
is put at the end of what that rank has done. So all ranks issue their messages in one common order,
both ends of a channel in the same one, and whether every action becomes ready does not depend on
who goes first: the messages cannot be crossed and cannot deadlock, and what is left to show is that
the computations go on.
"""

from __future__ import annotations

from collections import defaultdict

from interlace_check.pipelining.actions import BACKWARD, Action
from interlace_check.pipelining.schedule import Key, Layout, PipelineOrder, Placed


def stuck(order: PipelineOrder, layout: Layout) -> list[tuple[Placed, Action]]:
    """The action at which each rank stops for good, and the computation whose result it lacks."""
    done: set[Key] = set()
    waiting: dict[Key, list[int]] = defaultdict(list)
    lacking: dict[int, tuple[Placed, Action]] = {}
    places = [0] * len(order.cells)
    ready = list(range(len(order.cells)))
    while ready:
        rank = ready.pop()
        lacking.pop(rank, None)
        while rank not in lacking and places[rank] < len(order.cells[rank]):
            cell = order.cells[rank][places[rank]]
            leaves = [] if cell is None else list(cell.leaves())
            for leaf in leaves:
                source = layout.source(leaf)
                if source is not None and source not in done:
                    kind = "F" if source[0] == "SEND_F" else "B"
                    placed = Placed(rank, places[rank], leaf)
                    lacking[rank] = placed, Action(kind, source[1], source[2])
                    waiting[source].append(rank)
                    break
            else:
                places[rank] += 1
            for leaf in leaves if rank not in lacking else ():
                if leaf.kind == "F" or leaf.kind in BACKWARD:
                    sent = "SEND_F" if leaf.kind == "F" else "SEND_B"
                    result = sent, leaf.stage, leaf.microbatch
                    done.add(result)
                    ready += waiting.pop(result, ())
    return [lacking[rank] for rank in sorted(lacking)]
