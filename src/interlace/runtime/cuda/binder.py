"""The ops of a Program bound to streams and words, with what stands before and after them in a run.

    binding = Binding(context, driver, spaces, engine)
    binding.issue(stream, event)                  # a run, from the caller's stream
    issue = binding.binder.bind(index, op)        # a function; None where there is nothing to do

Bytes in a row go by copy engines, others by torch's copy kernel. Torch's own ops run with the op's
stream as the current one.

Note [When slots are taken]
    A stream must wait until all ranks have ended the run before last only where it writes what a
    peer may still be reading: a peer's memory, or a slot of its own that peers read by Get. Its own
    reads of what came by Put are behind the signal of that Put, whose writer has waited. So the
    stream that computes seldom waits. Executors share slots: what one only writes itself another's
    peers may read, and then it waits as well.

    In a graph, signals are words that the peer's next run takes back, so there a stream also waits
    before it raises any: raised earlier, they would be taken back too (graphs.py, Note [Words in
    graphs]).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace import ir
from interlace.comm.cuda.driver import Driver, Event
from interlace.errors import ExecutorError
from interlace.ir.lifetimes import callers, homes
from interlace.runtime.calling.calls import Thunk, bind_call, in_turn
from interlace.runtime.cuda.lanes import EventPoint, Lane, Point, Words, brought_together
from interlace.runtime.cuda.launches.fused import (
    Awaited,
    bind_kernel,
    bind_member,
    bind_sum,
    sums_itself,
)
from interlace.runtime.cuda.launches.transfers import collective, messages
from interlace.runtime.cuda.waits.waiting import holds
from interlace.runtime.engine import EngineContext, unbound
from interlace.runtime.prepare.plan import listed

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


def _alike(one: ir.Expect, other: ir.Expect) -> bool:
    return (one.stream, one.team, one.value) == (other.stream, other.team, other.value)


def if_gotten(slot: Any, take: Thunk) -> Thunk:
    """The wait for a slot, where another Executor's peers read it by Get."""

    def run() -> None:
        if slot.gotten:
            take()

    return run


class Binder:
    def __init__(self, binding: Binding) -> None:
        self.context = context = binding.context
        self.plan, self.values = context.plan, context.values
        self.resources = context.resources
        self.binding, self.lanes, self.driver = binding, binding.lanes, binding.driver
        self.spaces: Mapping[str, Any] = binding.spaces
        self.check = binding.engine.check
        self.regions = {region.name: region for region in context.plan.program.regions}
        self.compiled = context.options.regions == "inductor"
        self.points: dict[ir.Spot, Point] = {}
        self.events: list[Event] = []
        self.kernels: list[int] = []
        """The Fused ops that one kernel runs."""
        self._last = self._end_of_main()
        self._awaited = {
            record for (index, _), record in self.plan.waits.items() if index < self._last
        }
        self._homes = homes(self.plan.program)
        self._users: dict[str, dict[str, None]] = {}
        for op in self.plan.program.ops:
            for access in (*op.reads(), *op.writes()):
                self._users.setdefault(access.view.buffer, {})[op.stream] = None
        self.exchanged: dict[str, tuple[Lane, EventPoint]] = {}
        """Stream and end of each team's last exchange."""
        near = {team for team, space in self.spaces.items() if space.side.shares_gpu}
        self._holds = {} if context.options.in_order else holds(self.plan, near)
        held = {hold for needed in self._holds.values() for hold in needed}
        self._unheld = {hold: EventPoint(self.driver, self.event()) for hold in held}
        self._on: dict[int, list[int]] = {}  # by stream: its ops, but for what is nothing here
        for index, op in enumerate(self.plan.program.ops):
            if not isinstance(op, ir.Alloc):
                self._on.setdefault(id(self.lanes[op.stream]), []).append(index)
        self._taken: set[tuple[int, str, int | None]] = set()

    def steps(self, index: int, op: ir.Op, number: int | None = None) -> list[Thunk]:
        """Steps that issue an op (or one member of a Fused), with the slots that it needs."""
        if number is not None and isinstance(op, ir.Fused):
            item, step = op.members[number], self.member(index, op, number)
        else:
            item, step = op, self.bind(index, op)
        before = self.takes(item)
        if mark := self._unheld.get((index, False)):
            before.append(mark.record(self.lanes[op.stream]))
        issued = [*before, *((step,) if step is not None else ())]
        if mark := self._unheld.get((index, True)):
            issued.append(mark.record(self.lanes[op.stream]))
        return issued

    def bind(self, index: int, op: ir.Op, member: int = 0) -> Thunk | None:
        """The function that issues an op; `member` is its number in the Fused at `index`."""
        lane = self.lanes[op.stream]
        match op:
            case ir.Call() if (total := self.sum(lane, index, op)) is not None:
                return total
            case ir.Call():
                call = bind_call(op, self.values, self.regions, self.context.device, self.compiled)
                return lane.within(call)
            case ir.Copy():
                return self.copy(lane, (op.src, None), (op.dst, None))
            case ir.Put():
                (peer,) = self.plan.members(op.team, op.peer)
                return self.copy(lane, (op.src, None), (op.dst, peer))
            case ir.Get():
                (peer,) = self.plan.members(op.team, op.peer)
                return self.copy(lane, (op.src, peer), (op.target, None))
            case ir.Notify():
                return self.notify(lane, op)
            case ir.Expect():
                return self.expect(lane, index, op)
            case ir.Record() if (index, member) not in self._awaited:
                return None
            case ir.Record() if not member and self._only_allocs(index, op.stream):
                return None
            case ir.Record():
                point = self.points[index, member] = EventPoint(self.driver, self.event())
                return point.record(lane)
            case ir.Wait() if index >= self._last:
                return None
            case ir.Wait():
                point = self.points.get(self.plan.waits[index, member])
                return None if point is None else point.wait(lane)
            case ir.Free(buffer=name) if self.plan.buffers[name].kind in ("fresh", "input"):
                return self.drop(name, lane)
            case ir.HostSync():
                return self.host_sync(lane, index)
            case ir.Collective():
                return collective(self, lane, index, op)
            case ir.Send() | ir.Recv():
                return messages(self, lane, index, (op,))
            case ir.Group():
                return messages(self, lane, index, op.ops)
            case ir.Fused():
                return self.fused(lane, index, op)
            case ir.Alloc() | ir.Free():
                return None  # slots: Note [When slots are taken]; other memory is there
            case _:
                raise unbound(op, "CUDA")

    def event(self) -> int:
        event = self.driver.event()
        self.events.append(event)
        return event

    def close(self) -> None:
        events, self.events = self.events, []
        for event in events:
            self.driver.destroy_event(event)

    def copy(
        self, lane: Lane, src: tuple[ir.View, int | None], dst: tuple[ir.View, int | None]
    ) -> Thunk | None:
        """One view into another of as many elements, each with the peer in whose memory it is."""
        values, source, target = self.values, self.plan.box(src[0]), self.plan.box(dst[0])
        if not source.numel:
            return None
        if source.dtype == target.dtype and source.contiguous and target.contiguous:
            driver, here, there = self.driver, values.address(*src), values.address(*dst)
            nbytes = values.sizes.sized((source.nbytes,), lambda numbers: numbers[0])
            return lambda: driver.copy(lane.handle, there(), here(), nbytes.now)
        items = values.items
        a = values.at(src[0].buffer, source, src[1])
        b = values.at(dst[0].buffer, target, dst[1])

        def run() -> None:
            items[b].copy_(items[a])

        return lane.within(run)

    def takes(self, op: ir.Op) -> list[Thunk]:
        """Steps that precede an op and take the slots it writes: Note [When slots are taken]."""
        lane, found = self.lanes[op.stream], list[Thunk]()
        items = op.steps
        graph = self.context.options.graph
        wanted: list[tuple[str, Any]] = []
        if graph:
            wanted += [(item.team, None) for item in items if isinstance(item, ir.Notify)]
        for access in op.writes():
            buffer = self.plan.buffers.get(access.view.buffer)
            if buffer is None or buffer.kind != "symmetric" or buffer.team is None:
                continue
            slot: Any = self.resources.slots[buffer.name]
            if access.peer is not None or slot.name in self.spaces[buffer.team].gotten:
                wanted.append((buffer.team, None))
            elif not graph:  # whose slots are its own
                wanted.append((buffer.team, slot))
        for team, slot in wanted:
            sure, key = (id(lane), team, None), (id(lane), team, slot and id(slot))
            if (
                not self._taken & {sure, key}
                and (take := self.binding.take(team, lane)) is not None
            ):
                found.append(take if slot is None else if_gotten(slot, take))
            self._taken.add(key)
        return found

    def _end_of_main(self) -> int:
        """From which op on the stream `main` only waits: the end of the run waits for all."""
        ops = self.plan.program.ops
        end = len(ops)
        for index in reversed(range(end)):
            if not isinstance(ops[index], ir.Wait | ir.Free | ir.Alloc | ir.Record):
                break
            end = index
        return end

    def _only_allocs(self, index: int, stream: str) -> bool:
        """True if a stream has done no work before an op: no more than Allocs and Records."""
        before = (op for op in self.plan.program.ops[:index] if op.stream == stream)
        return all(isinstance(op, ir.Alloc | ir.Record) for op in before)

    def drop(self, name: str, lane: Lane) -> Thunk:
        """Gives the memory of a tensor of this run back to its stream, once other streams have done
        with it (plan.py, Note [Whose memory]); on that stream itself, that is so already."""
        items, places, device = self.values.items, self.values.family(name), self.context.device
        home, given = self.lanes[self._homes[name]], self.plan.buffers[name].kind == "input"
        users = [self.lanes[stream] for stream in self._users.get(name, ())]
        others = {id(user): user for user in users if user is not home}
        streams = [other.stream for other in others.values()] if lane is not home else []

        def run() -> None:
            tensor = items[places[0]]
            if tensor is not None and not (given and tensor.is_cpu):  # None: its Call left it out
                for stream in streams:
                    tensor.record_stream(stream or torch.cuda.current_stream(device))
            for place in places:
                items[place] = None

        return run

    def notify(self, lane: Lane, op: ir.Notify) -> Thunk | None:
        space, value, driver = self.spaces[op.team], op.value, self.driver
        words = space.theirs(op.signal, self.plan.members(op.team, op.peer))
        return Words.of("write", driver, lane, words, lambda: space.base + value)

    def expect(self, lane: Lane, index: int, op: ir.Expect) -> Thunk | None:
        """Makes the stream wait for its words; of expects in a row, the last one waits for those of
        all: the first would wait before what this rank issues, and peers await, between them. A sum
        behind them may wait for them itself."""
        row, ops = [op], self.plan.program.ops
        if ops[index] is op:
            mine = self._on[id(lane)]
            at = bisect_left(mine, index) + 1
            after = ops[mine[at]] if at < len(mine) else None
            if isinstance(after, ir.Expect) and _alike(op, after):
                return None
            if after is not None and sums_itself(self, lane, after):
                return None
            row += self._row(lane, index)
        return Words.of("wait", self.driver, lane, *self._awaits(row))

    def sum(self, lane: Lane, index: int, op: ir.Call) -> Thunk | None:
        """The kernel that adds up slots, if it does, with what it waits for."""
        row: list[ir.Expect] = []
        if self.plan.program.ops[index] is op and sums_itself(self, lane, op):
            row = self._row(lane, index)
        return bind_sum(self, lane, op, self._awaits(row) if row else None)

    def _row(self, lane: Lane, index: int) -> list[ir.Expect]:
        """The expects of one value right before an op on its stream."""
        found, mine, ops = list[ir.Expect](), self._on[id(lane)], self.plan.program.ops
        for before in (ops[other] for other in reversed(mine[: bisect_left(mine, index)])):
            alike = found[-1] if found else ops[index]
            if not isinstance(before, ir.Expect):
                break
            if isinstance(alike, ir.Expect) and not _alike(alike, before):
                break
            found.append(before)
        return found

    def _awaits(self, row: Sequence[ir.Expect]) -> Awaited:
        space, value, members = self.spaces[row[0].team], row[0].value, self.plan.members
        words = tuple([space.own(e.signal, m) for e in row for m in members(e.team, e.peer)])
        return words, lambda: space.base + value

    def host_sync(self, lane: Lane, index: int) -> Thunk:
        event, driver, confirm = self.event(), self.driver, self.binding.engine.confirm
        wait = self.context.wait(index, self.check)

        def run() -> None:
            driver.record(lane.handle, event)
            wait.until(lambda: driver.done(event))
            confirm()  # else what made it end may be that a peer has stopped

        return run

    def member(self, index: int, op: ir.Fused, number: int) -> Thunk | None:
        """One member of a Fused, for itself."""
        item, lane = op.members[number], self.lanes[op.stream]
        if isinstance(item, ir.Call):
            bound = bind_member(self, lane, op, item)
            if bound is not None:
                return bound
        return self.bind(index, item, number)

    def fused(self, lane: Lane, index: int, op: ir.Fused) -> Thunk | None:
        """The kernel that the op names, or its members in turn."""
        bound = bind_kernel(self, lane, index, op)
        if bound is not None:
            self.kernels.append(index)
            held = self._holds.get(index, [])  # waiting.py, Note [Kernels that wait]
            return in_turn([*(self._unheld[hold].wait(lane) for hold in held), bound])
        steps = [self.bind(index, item, number) for number, item in enumerate(op.members)]
        found = [step for step in steps if step is not None]
        return in_turn(found) if found else None


class Binding:
    def __init__(
        self, context: EngineContext, driver: Driver, spaces: Mapping[str, Any], engine: CudaEngine
    ) -> None:
        self.context, self.driver, self.engine = context, driver, engine
        self.spaces = spaces
        self.runs = 0
        mine = callers(context.plan.program)
        names = context.plan.program.streams() or (mine,)
        self.main = Lane(mine)
        alone = context.options.in_order
        self.lanes = {
            name: self.main if alone or name == mine else self.side(name) for name in names
        }
        self.sides = [lane for lane in self.lanes.values() if lane is not self.main]
        self.aside = self.sides[0] if self.sides else self.main
        """Where the hand-over between runs is issued: off the stream that computes, if possible."""
        self.binder = Binder(self)
        self.steps: list[Thunk] = self._bind()
        self._ends = [(lane, driver.event()) for lane in self.sides]
        self._counted = [space for space in spaces.values() if space.uses]

    def side(self, name: str) -> Lane:
        """A stream beside the caller's."""
        return Lane.own(name, self.context.device)

    def take(self, team: str, lane: Lane) -> Thunk | None:
        """Makes a stream wait until all ranks have ended the run before the last."""
        side = self.spaces[team].side
        batch = self.driver.batch(("wait", side.heard))

        def run() -> None:
            if side.closed != side.run - 1:  # Note [Two runs apart]
                batch.run(lane.handle, side.run - 2)

        return run

    def _bind(self) -> list[Thunk]:
        binder, steps = self.binder, list[tuple[Lane | None, Thunk]]()
        alone = self.context.options.in_order
        for index, op, number, released in listed(self.context.plan.program, alone):
            lane = self.lanes[op.stream]
            waits = isinstance(op, ir.HostSync)
            for step in binder.steps(index, op, number):
                steps.append((None if waits else lane, self._watched(index, step)))
            steps += [(lane, binder.drop(name, lane)) for name in released]
        return brought_together(steps)

    def _watched(self, index: int, step: Thunk) -> Thunk:
        context, op = self.context, self.context.plan.program.ops[index]
        before_op, rank, lane = context.before_op, context.plan.rank, self.lanes[op.stream]
        if before_op is not None:
            delay = lane.within(lambda: before_op(rank, index, op))
            plain = step

            def delayed() -> None:
                delay()
                plain()

            step = delayed
        if context.options.trace and not context.options.graph:
            return self.engine.timed.step(index, lane, step)
        return step

    def issue(self, stream: int, entry: Event | None) -> None:
        """Issues all ops, and before them the event `entry`, from which the other streams fork."""
        driver, self.main.handle = self.driver, stream
        self.runs += 1
        for space in self._counted:
            space.begin()
        if entry is not None:
            driver.record(stream, entry)
        for lane in self.sides:
            driver.wait_event(lane.handle, entry)
        for step in self.steps:
            step()
        if self._ends:
            self.join()

    def join(self) -> None:
        driver, main = self.driver, self.main
        for lane, event in self._ends:
            driver.record(lane.handle, event)
            driver.wait_event(main.handle, event)

    def shut(self) -> None:
        """Lets go of the steps: a run that begins now is an error."""
        self.steps = [_closed]

    def close(self) -> None:
        self.shut()
        self.binder.close()
        for _, event in self._ends:
            self.driver.destroy_event(event)


def _closed() -> None:
    """Raises ExecutorError in another thread's run that began during the close."""
    raise ExecutorError("this Executor was closed by another thread")
