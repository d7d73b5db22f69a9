"""The CUDA engine: every op of a Program bound once, and issued in list order in every run.

A run returns when all is issued; the caller's stream then ends with the run, as with any CUDA op.
The watchdog bounds what the streams wait for: `failure` holds what it found.

Note [A run on the streams]
    entry   the other streams wait for the caller's, and the caller's for the end of the team's last
            run, of whatever Executor, if that was on another stream: slots, words and staging
            memory are one run's at a time
    slots   see Note [When slots are taken]
    exit    the caller's stream waits for the others
    after   another stream tells the peers that this run has ended
    The stream that computes has nothing on it but its own ops and a few events: writes and waits
    for words each keep a stream for a microsecond or more.

Note [Runs that wait for nobody]
    Outside of teams nothing waits for a peer, so the watchdog has nothing to bound and needs no
    mark of where a run begins. One event stands for the end of the last run: whoever runs next on
    another stream waits for it, since the arena is one run's at a time. It is recorded when the run
    ends, not when the next one comes on another stream: by then the caller may have destroyed the
    old stream, or capture a graph on it. A run of torch's own operators that has no arena shares
    nothing with the next: it leaves no event at all, and `synchronize` waits for the device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from interlace.comm import TeamComm, Use
from interlace.comm.cuda.driver import Driver, Event
from interlace.errors import BackendError, ExecutorError, InterlaceError
from interlace.ir import Alloc, Call, Copy, Free
from interlace.runtime.cuda.binding import Binding
from interlace.runtime.cuda.graphs.captured import Captured
from interlace.runtime.cuda.graphs.graphs import Graphs
from interlace.runtime.cuda.lanes import OpTimer
from interlace.runtime.cuda.runner import Runner
from interlace.runtime.cuda.sharing import hears_all, share
from interlace.runtime.cuda.waits.marks import Marks
from interlace.runtime.cuda.waits.watchdog import Watched, watchdog
from interlace.runtime.engine import EngineContext

MARKS = 1024
"""Runs whose begin and end on the device can be told apart: more than a device queues, which is 340
of those with the fewest entries, their two marks and a graph (H200, CUDA 13)."""
NO_USES: Mapping[str, Use] = MappingProxyType({})


class Here(threading.local):
    """What is known in a thread."""

    bound = False
    """Whether it has CUDA's context, which torch's question whether a stream is captured gives a
    new thread. The default stream cannot be captured: there it is asked for this alone, once."""


class CudaEngine:
    """Runs a bound Program on one CUDA device."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self.device = context.device
        spaces: Any = context.resources.spaces
        self.sides = list({id(s.side): s.side for s in spaces.values()}.values())
        self.driver = self.sides[0].driver if self.sides else Driver()
        self.timed = OpTimer(self.device)
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # pyright: ignore
        self._index = context.device.index or 0
        self.watched: Any = None
        self.watches = bool(context.resources.teams) or context.options.trace
        """Whether runs have marks for the watchdog: Note [Runs that wait for nobody]."""
        with torch.cuda.device(self.device):
            self.binding = Binding(context, self.driver, spaces, self)
            self.marks = Marks(self.driver, MARKS if self.watches else 1)
            self._told = self.driver.event()
        self.plain = not (self.watches or self.binding.sides or context.options.graph)
        """Whether a run is nothing but its ops, on the caller's stream."""
        self._keeps = not self.plain or keeps_memory(context)
        self._finished = 0
        self._used = [s.side for s in spaces.values() if s.uses]
        self._generations = [(side, side.generation) for side in self.sides]
        self._closing = [s.side for team, s in spaces.items() if hears_all(context.plan, team)]
        self._tells = [(side, self.driver.batch(("write", side.told))) for side in self._used]
        self.last: tuple[int, Event] | None = None
        self._owners: list[Any] = [*self.sides] or [self]
        self._uses: dict[tuple[int, ...], Mapping[str, Use]] = {}
        self.graphs: Graphs | None = None
        self.issued = self.entered = 0
        self._here = Here()
        self.since = 0.0
        self._capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing  # pyright: ignore
        self.watched = Watched(self, context)
        watchdog().add(self.watched)
        for team in context.resources.teams.values():
            team.used_by(self)
        if context.options.graph:
            with torch.cuda.device(self.device):
                self.graphs = Graphs(self)
        if self.plain:
            self.issue_ops, self.uses = self.issue_plain, lambda: NO_USES
        self.runner = Runner(self)
        self.run, self.issue = self.runner.run, self.runner.issue

    share = staticmethod(share)

    @property
    def failure(self) -> BaseException | None:
        """What was found to have failed."""
        return self.watched.failure

    def warm_up(self, teams: Sequence[TeamComm]) -> None:
        """With graphs: a run of all ranks together that sets up what cannot be in a capture."""
        if self.graphs is not None:
            self.runner.warm_up(teams)

    def issue_ops(self) -> None:
        """Issues one run on the stream that the caller is on."""
        binding, driver = self.binding, self.driver
        stream, entry, over = self._enter()
        if self.context.options.trace:
            self.timed.begin()
        binding.main.handle = stream
        try:
            for side in self._used:
                side.enter()
            binding.issue(entry)
        except BaseException as error:
            self._abandon(error, stream, over)
            raise
        self._leave(stream, over)
        for side in self._closing:
            side.closed = side.run
        if self._used:
            aside = binding.aside
            if aside.handle != stream:
                driver.wait_event(aside.handle, over)
            for side, tells in self._tells:
                if side.teller != aside.handle:
                    self._tell_after(side, aside.handle)
                tells.run(aside.handle, side.run)

    def issue_plain(self) -> None:
        """`issue_ops`, of a Program that is `plain`: nothing before the ops and nothing after."""
        stream, binding = self._raw_stream(self._index), self.binding
        if stream or not self._here.bound:
            self.refuse_capture()
        last = self.last
        if last is not None and last[0] != stream:
            self.driver.wait_event(stream, last[1])
        self.entered = self.issued + 1
        binding.main.handle = stream
        binding.runs += 1
        try:
            for step in binding.steps:
                step()
            self._leave_plain(stream)
        except BaseException:
            with contextlib.suppress(InterlaceError):  # the error is that of the op
                self._leave_plain(stream)
            raise
        finally:
            self.issued = self.entered

    def _leave_plain(self, stream: int) -> None:
        if self._keeps:
            _, over = self.marks.of(0)
            self.driver.record(stream, over)
            self.last = stream, over

    def finish_unmarked(self) -> None:
        """Waits for runs that left no event."""
        issued = self.issued
        if not self._keeps and self._finished != issued:
            with torch.cuda.device(self.device):
                self.driver.finish_device()
            self._finished = issued

    def replay(self, pair: Captured, turn: int, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """One run that was captured, with copies in and out, and its results: all before its end,
        since the next run, maybe on another stream, uses the same memory.

        `_enter` and `_leave` stand here in full: as calls they are a fourteenth of its Python.
        """
        stream, driver = self._raw_stream(self._index), self.driver
        self.since = time.monotonic()
        run = self.entered = self.issued + 1
        owners, marks = self._owners, self.marks
        for owner in owners:
            last = owner.last
            if last is not None and last[0] != stream:
                driver.wait_event(stream, last[1])
        begin, over = marks.events[run % marks.num]
        try:
            if self.watches:
                driver.record(stream, begin)
            if pair.moves:
                pair.bring(driver, stream, given)
            pair.launch[turn](stream)
            if pair.moves:
                pair.take(given)
            results = pair.gives[turn](given)
        except BaseException as error:
            self._abandon(error, stream, over)
            raise
        driver.record(stream, over)
        last = stream, over
        for owner in owners:
            owner.last = last
        self.issued = run
        if run >= marks.next and self.watches:
            marks.probe(stream, run)
        return results

    def _tell_after(self, side: Any, stream: int) -> None:
        """What another Executor's stream tells comes before: the peers' words never go back."""
        if side.teller is not None:
            self.driver.record(side.teller, self._told)
            self.driver.wait_event(stream, self._told)
        side.teller = stream

    def _abandon(self, error: BaseException, stream: int, over: Event) -> None:
        """A run is issued in part: it ends here, and so does what it waits for."""
        try:
            for end in (self.binding.join, lambda: self._leave(stream, over)):
                with contextlib.suppress(Exception):  # of a device that takes no calls any more
                    end()
            self.entered = self.issued
            if isinstance(error, BackendError):
                self.watched.hear()  # of a peer that stopped, for which NCCL ended the op
        finally:
            self.watched.fail(error)

    @property
    def spaces(self) -> Mapping[str, Any]:
        """The words of the last run, by team."""
        return self.binding.spaces if self.graphs is None else self.graphs.spaces

    def check(self) -> None:
        """Raises what the watchdog found."""
        if self.watched is not None and self.watched.failure is not None:
            raise self.watched.failure

    def _enter(self) -> tuple[int, Event, Event]:
        """The stream that the caller is on, after the last run on another; the events of a run."""
        stream = self._raw_stream(self._index)
        self.since, self.entered = time.monotonic(), self.issued + 1
        for owner in self._owners:
            last = owner.last
            if last is not None and last[0] != stream:
                self.driver.wait_event(stream, last[1])
        return stream, *self.marks.of(self.entered)

    @property
    def captured(self) -> bool:
        """Whether the caller's stream is captured, in which there must be no run."""
        if not self._raw_stream(self._index) and self._here.bound:
            return False
        found = self._capturing()
        self._here.bound = self._here.bound or not found
        return found

    def look(self) -> None:
        """Raises where the caller's stream is captured, before anything is done for a run."""
        with torch.cuda.device(self.device):
            self.refuse_capture()

    def refuse_capture(self) -> None:
        """`look`, where this device is the current one."""
        if self.captured:
            raise ExecutorError(
                f"{self.context.plan.program.name} was called inside a CUDA graph capture, which "
                "would keep this run's numbers: use Options(graph=True) instead"
            )

    def _leave(self, stream: int, over: Event) -> None:
        """All of a run is issued. Only now it counts: before, its event stands for an older one."""
        self.driver.record(stream, over)
        for owner in self._owners:
            owner.last = stream, over
        self.issued += 1
        if self.watches and self.issued >= self.marks.next:
            self.marks.probe(stream, self.issued)

    def ended(self, run: int) -> bool:
        """Whether a run has ended, of the last few, as far as that is to be seen."""
        return not self._keeps or self.marks.ended(run)

    def uses(self) -> Mapping[str, Use]:
        """Which copy of its slot each symmetric buffer has in the next run."""
        parities = tuple([side.run + 1 & 1 for side in self.sides])
        if parities not in self._uses:
            of = dict(zip(map(id, self.sides), parities, strict=True))
            spaces: Any = self.context.resources.spaces
            self._uses[parities] = {
                buffer: Use(of[id(spaces[team].side)], 0)
                for buffer, team in self.context.plan.takes.items()
            }
        return self._uses[parities]

    def confirm(self) -> None:
        """Raises what stopped this rank or a peer by now, whether or not it was found yet."""
        self.watched.hear()
        self.check()

    def synchronize(self) -> None:
        """Returns when all runs are over; raises what made one fail."""
        self.watched.finish()
        watchdog().leave()

    def settle(self) -> None:
        """After a failure: ends what is under way."""
        self.watched.fail(ExecutorError("reset() was called"))
        self.watched.settle()

    def release(self) -> None:
        """Lets go of every stream that waits for a peer, again and again if need be."""
        with contextlib.ExitStack() as each:  # also after one that fails
            for side, generation in self._generations:
                each.callback(side.release, generation)

    @property
    def spans(self) -> list[tuple[int, float, float]]:
        """With the option `trace`: op, start and end of each op of the last run, in seconds."""
        self.synchronize()
        return self.timed.spans()

    def leave(self) -> None:
        """Lets go of graphs, when no run is under way: NCCL waits for those that it is in."""
        with contextlib.suppress(Exception):  # kept, and raised by the next call
            self.watched.finish()  # bounded: what stalls fails, and is let go
        if self.graphs is not None:
            self.graphs.drop()

    def later(self, end: Callable[[], None]) -> bool:
        """Where runs are still under way after a while, has the watchdog call `end` behind them:
        what they use is not given back before."""
        self.binding.shut()  # then no run begins, and one that has begun is under way
        self.watched.settle()
        if self.watched.idle:
            return False
        watchdog().later(self.watched, end)
        return True

    def close(self) -> None:
        """Waits for what is under way (bounded), then gives everything back."""
        self.binding.shut()
        self.watched.settle()
        over = self.watched.idle
        watchdog().leave()
        for team in self.context.resources.teams.values():
            team.left_by(self)  # whose events are gone after this
        watchdog().drop(self.watched)
        for owner in self._owners:
            if owner.last is not None and self.marks.owns(owner.last[1]):
                owner.last = None
        if self.graphs is not None:
            self.graphs.close()
        self.binding.close()
        self.marks.close()
        self.driver.destroy_event(self._told)
        self.runner.changes.registered.clear()
        if over:
            self.context.values.drop()


def keeps_memory(context: EngineContext) -> bool:
    """Whether runs share memory that only one of them may use at a time, as far as is known."""
    program = context.plan.program
    regions = {region.name for region in program.regions}
    return context.values.arena_nbytes > 0 or not all(
        isinstance(op, Alloc | Copy | Free)
        or (isinstance(op, Call) and op.fn.startswith("aten.") and op.fn not in regions)
        for op in program.ops
    )
