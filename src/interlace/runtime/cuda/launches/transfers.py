"""Collectives and messages, bound to NCCL or to one kernel over peer memory.

issue = collective(binder, lane, index, op)
issue = messages(binder, lane, index, (send, recv))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from interlace.comm.cuda.collectives import bind_messages, bind_on_stream
from interlace.errors import UnsupportedError
from interlace.ir import Collective, Recv, Send
from interlace.runtime.cuda.lanes import EventPoint, Lane, Thunk, in_turn
from interlace.runtime.cuda.launches.exchanges import bind_exchange

if TYPE_CHECKING:
    from interlace.runtime.cuda.binder import Binder


def collective(binder: Binder, lane: Lane, index: int, op: Collective) -> Thunk | None:
    """By NCCL, or by one kernel over peer memory."""
    turn, spec = binder.plan.turns[index], binder.plan.specs[index]
    items = binder.values.items
    src = None if op.src is None else binder.values.own(op.src)
    dst = None if op.dst is None else binder.values.own(op.dst)
    if turn.backend == "peer":
        issue = bind_exchange(
            *(binder.links.spaces[op.team].side, spec, lambda: lane.handle),
            *(None if place is None else (lambda p=place: items[p]) for place in (src, dst)),
        )
        if issue is None:
            return None
        if spec.size == 1:
            return lane.within(issue)
        return _after_the_last(binder, lane, op.team, issue)
    backend = binder.crew.backends[op.team, turn.backend]
    issue = bind_on_stream(backend, spec, binder.context.time_out_s)
    check = binder.links.check

    def run() -> None:
        check()  # Note [Aborts] in aborts.py
        issue(None if src is None else items[src], None if dst is None else items[dst])

    return lane.within(run)


def _after_the_last(binder: Binder, lane: Lane, team: str, issue: Thunk) -> Thunk:
    """An exchange after the team's last one in the Program, whatever its stream: they share flags
    and staging memory."""
    last = binder.exchanged.get(team)
    mine = EventPoint(binder.driver, binder.event())
    binder.exchanged[team] = lane, mine
    if last is None or last[0] is lane:
        before: list[Thunk] = []
    else:
        before = [last[1].wait(lane)]
    # Recorded only where a later one stands on another stream.
    streams = {
        op.stream
        for op in binder.plan.program.ops
        if isinstance(op, Collective) and op.team == team
    }
    after = [mine.record(lane)] if len(streams) > 1 else []
    return in_turn([*before, issue, *after])


def messages(binder: Binder, lane: Lane, index: int, ops: Sequence[Send | Recv]) -> Thunk:
    """Sends and receipts that start together."""
    backends = {
        (op.team, binder.plan.letters[index, number].backend) for number, op in enumerate(ops)
    }
    if len(backends) > 1:
        raise UnsupportedError(
            f"a group on CUDA has messages of teams {sorted(team for team, _ in backends)}: NCCL "
            "starts those of one team together, and those of another after them. Give each team a "
            "group of its own, on a stream of its own where one may have to wait for the other"
        )
    ((team, name),) = backends
    if name == "peer":
        raise UnsupportedError(
            "messages go by NCCL on CUDA: leave the backend of sends and receipts open, or "
            "use one-sided copies (strategy peer)"
        )
    parts = [
        ("send" if isinstance(op, Send) else "recv", binder.plan.members(team, op.peer)[0])
        for op in ops
    ]
    issue = bind_messages(binder.crew.backends[team, name], parts, binder.context.device)
    check, items = binder.links.check, binder.values.items  # Note [Aborts] in aborts.py
    places = [binder.values.own(op.src if isinstance(op, Send) else op.dst) for op in ops]
    return lane.within(in_turn([check, lambda: issue([items[place] for place in places])]))
