"""The ops of a Program bound to streams and words, with what stands before and after them in a run.

binding = Binding(context, driver, spaces, engine)
binding.issue(stream, event)         # the caller's stream
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

from interlace.comm.cuda.driver import Driver, Event
from interlace.errors import ExecutorError
from interlace.ir import Fused, HostSync, in_order
from interlace.runtime.cuda.binder import Binder
from interlace.runtime.cuda.lanes import Lane, Thunk
from interlace.runtime.cuda.waits.words import brought_together
from interlace.runtime.engine import EngineContext
from interlace.runtime.prepare.plan import callers, releases
from interlace.runtime.ranges import range_names

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


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
            name: self.main if alone or name == mine else Lane.own(name, context.device)
            for name in names
        }
        self.sides = [lane for lane in self.lanes.values() if lane is not self.main]
        self.aside = self.sides[0] if self.sides else self.main
        """Where the hand-over between runs is issued: off the stream that computes, if possible."""
        self.binder = Binder(self)
        self.sites: dict[Thunk, int | None] = {}
        """Site of each step; a step that several ops share has none."""
        self.steps = self._bind()
        self._ends = [(lane, driver.event()) for lane in self.sides]
        self._counted = [space for space in spaces.values() if space.uses]

    def take(self, team: str, lane: Lane) -> Thunk | None:
        """Makes a stream wait until all ranks have ended the run before the last."""
        side = self.spaces[team].side
        batch = self.driver.batch(("wait", side.heard))

        def run() -> None:
            if side.closed != side.run - 1:  # Note [Two runs apart]
                batch.run(lane.handle, side.run - 2)

        return run

    def _bind(self) -> list[Thunk]:
        plan, watched = self.context.plan, self._watched
        leaving = releases(plan.program)
        steps: list[tuple[Lane | None, Thunk]] = []
        ops, binder = plan.program.ops, self.binder
        one_by_one = self.context.options.in_order
        for index, number in in_order(ops) if one_by_one else ((i, -1) for i in range(len(ops))):
            op = ops[index]
            lane = self.lanes[op.stream]
            waits = isinstance(op, HostSync)
            for step in binder.steps(index, op, number):
                step = watched(index, step)
                steps.append((None if waits else lane, step))
                self.sites[getattr(step, "run", step)] = op.site
            if number < 0 or not isinstance(op, Fused) or number == len(op.members) - 1:
                steps += [(lane, binder.drop(name, lane)) for name in leaving.get(index, ())]
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
        if profiler._is_profiler_enabled:
            self._issue_in_ranges()
        else:
            for step in self.steps:
                step()
        if self._ends:
            self.join()

    def _issue_in_ranges(self) -> None:
        """Each step in a range for the profiler."""
        names = range_names(self.context.plan.program)
        for step in self.steps:
            with profiler.record_function(names[self.sites.get(step)]):
                step()

    def join(self) -> None:
        driver, main = self.driver, self.main
        for lane, event in self._ends:
            driver.record(lane.handle, event)
            driver.wait_event(main.handle, event)

    def shut(self) -> None:
        """Lets go of the steps: a run that begins now is an error."""
        self.steps, self.sites = [_closed], {}

    def close(self) -> None:
        self.shut()
        self.binder.close()
        for _, event in self._ends:
            self.driver.destroy_event(event)


def _closed() -> None:
    """Raises ExecutorError in another thread's run that began during the close."""
    raise ExecutorError("this Executor was closed by another thread")
