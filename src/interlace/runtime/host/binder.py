"""The ops, bound for an executor whose streams are threads of the host.

    binder = HostBinder(context, order, check)
    run = binder.bind(index, op)         # a function without arguments
    run = binder.bind(index, op, 2)      # the same for a member of a Fused

`order` (a `StreamOrder`) is what the streams of one rank share: events, and the queue of each
team's collectives. `check` raises where a wait has become pointless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from interlace import ir
from interlace.comm import (
    Mailbox,
    Transfer,
    bind_collective,
    bind_peer_collective,
    exchange,
)
from interlace.comm.backends import cut
from interlace.comm.host.signals import stamp, tell
from interlace.options import BACKENDS
from interlace.runtime.calling.calls import Thunk, bind_call
from interlace.runtime.engine import EngineContext, unbound

if TYPE_CHECKING:
    from interlace.runtime.host.engine import StreamOrder


class HostBinder:
    def __init__(
        self, context: EngineContext, order: StreamOrder, check: Callable[[], None]
    ) -> None:
        self.context, self.plan = context, context.plan
        self.values = context.values
        self.resources = context.resources
        self.regions = {region.name: region for region in context.plan.program.regions}
        self.order = order
        self.mailboxes = defaultdict[str, Mailbox](Mailbox)
        """Messages of this rank to itself, by team."""
        self.wait_of = lambda index: context.wait(index, check)

    def bind(self, index: int, op: ir.Op, member: int = 0) -> Thunk | None:
        """The function that runs an op, or member number `member` of the Fused at `index`; None
        where there is nothing to do."""
        match op:
            case ir.Call():
                compiled = self.context.options.regions == "inductor"
                return bind_call(op, self.values, self.regions, self.context.device, compiled)
            case ir.Copy():
                return self.copy(self.values.own(op.src), self.values.own(op.dst))
            case ir.Alloc(buffer=buffer) if buffer.kind == "symmetric":
                return self.take(index, buffer.name)
            case ir.Free(buffer=name) if self.plan.buffers[name].kind != "local":
                return self.free(name)
            case ir.Record() | ir.HostSync():
                order, cells = self.order, self.order.cells_of((index, member))
                return lambda: tell(cells, order.run)
            case ir.Wait():
                return self.pass_by(self.plan.waits[index, member], index)
            case ir.Collective():
                return self.collective(index, op)
            case ir.Send() | ir.Recv():
                return self.messages(index, (op,))
            case ir.Group():
                return self.messages(index, op.ops)
            case ir.Put():
                (peer,) = self.plan.members(op.team, op.peer)
                dst = self.values.own(op.dst, peer)
                return self.meeting(index, op.team, peer, self.values.own(op.src), dst)
            case ir.Get():
                (peer,) = self.plan.members(op.team, op.peer)
                src = self.values.own(op.src, peer)
                return self.meeting(index, op.team, peer, src, self.values.own(op.target))
            case ir.Notify():
                space, value = self.resources.spaces[op.team], stamp(0, op.value)
                control = space.team.control
                raised = space.raised(op.signal, self.plan.members(op.team, op.peer))
                return lambda: tell(raised, control.run << ir.VALUE_BITS | value)
            case ir.Expect():
                return self.expect(index, op)
            case ir.Alloc() | ir.Free():
                return None  # its memory is there, and stays
            case _:
                raise unbound(op, "the CPU")

    def pass_by(self, point: ir.Spot, index: int) -> Thunk:
        order, wait = self.order, self.order.bounded(self.wait_of(index))
        cells = order.cells_of(point)
        return lambda: wait.for_marks(cells, order.run)

    def expect(self, index: int, op: ir.Expect) -> Thunk:
        """Returns when all these members have raised the signal in this run."""
        space, wait, value = self.resources.spaces[op.team], self.wait_of(index), stamp(0, op.value)
        members, control = self.plan.members(op.team, op.peer), space.team.control
        cells = space.awaited(op.signal, members)
        where = lambda late: control.where([members[n] for n in late])  # noqa: E731
        return lambda: wait.for_marks(cells, control.run << ir.VALUE_BITS | value, where)

    def copy(self, src: int, dst: int) -> Thunk:
        items = self.values.items
        return lambda: items[dst].copy_(items[src])

    def meeting(self, index: int, team: str, peer: int, src: int, dst: int) -> Thunk:
        """A one-sided copy, once the peer is known to run the same Program."""
        control, items = self.resources.teams[team].control, self.values.items
        wait = self.wait_of(index)

        def run() -> None:
            control.meet(peer, wait)
            items[dst].copy_(items[src])

        return run

    def take(self, index: int, name: str) -> Thunk:
        slot, takes, wait = self.resources.slots[name], self.resources.takes, self.wait_of(index)
        control = self.resources.teams[self.plan.takes[name]].control
        return lambda: slot.take(takes[name], wait, control.where)

    def free(self, name: str) -> Thunk:
        """Gives back the slot of a symmetric buffer, or lets go of a fresh one or of an input."""
        if self.plan.buffers[name].kind == "symmetric":
            slot, takes = self.resources.slots[name], self.resources.takes
            return lambda: slot.free(takes[name])
        items, places = self.values.items, self.values.family(name)

        def run() -> None:
            for place in places:
                items[place] = None

        return run

    def collective(self, index: int, op: ir.Collective) -> Thunk:
        """Waits for its turn in the team's queue and for every member; then runs."""
        turn, spec, wait = self.plan.turns[index], self.plan.specs[index], self.wait_of(index)
        team, order, items = self.resources.teams[op.team], self.order, self.values.items
        control, queue = team.control, BACKENDS.index(turn.backend)
        src = None if op.src is None else self.values.own(op.src)
        dst = None if op.dst is None else self.values.own(op.dst)
        counts = self.values.counts(index, op, self.plan.known_counts.get(index))
        if turn.backend == "peer":
            space = self.resources.spaces[op.team]
            bind = lambda parts: bind_peer_collective(  # noqa: E731
                space, replace(spec, parts=parts), turn.number, counts
            )
        else:
            backend = self.resources.backends[op.team, turn.backend]
            wait = replace(wait, behind=control.behind, cut=partial(cut, backend))
            bind = lambda parts: bind_collective(  # noqa: E731
                backend, replace(spec, parts=parts), wait.timeout_s, counts
            )
        run = self.values.sizes.sized(spec.parts, bind)
        last = op.team, turn.backend, turn.number - 1
        before = order.cells_of(last) if turn.number > 1 else []
        mine = order.cells_of((op.team, turn.backend, turn.number))
        own_turn = order.bounded(wait)

        def thunk() -> None:
            own_turn.for_marks(before, order.run)
            control.reach(queue, turn.number, wait)
            source = None if src is None else items[src]
            run.now(source, None if dst is None else items[dst], wait)
            tell(mine, order.run)

        return thunk

    def messages(self, index: int, ops: tuple[ir.Send | ir.Recv, ...]) -> Thunk:
        parts: list[Transfer] = []
        places: list[int] = []
        for number, op in enumerate(ops):
            message, sends = self.plan.messages[index, number], isinstance(op, ir.Send)
            facts, name = (self.resources.teams[op.team], message.member, sends), message.backend
            carrier = self.resources.backends[op.team, name] if name else self.mailboxes[op.team]
            parts.append(Transfer(*facts, carrier, message.nth))
            places.append(self.values.own(op.src if isinstance(op, ir.Send) else op.dst))
        wait, items = self.wait_of(index), self.values.items
        return lambda: exchange(parts, [items[place] for place in places], wait)
