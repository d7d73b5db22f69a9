"""The CUDA engine: every op of a Program bound once, and issued in list order in every run.

A run returns when all is issued; the caller's stream then ends with the run, as with any CUDA op.
The watchdog bounds what the streams wait for: `failure` holds what it found.

Note [A run on the streams]
    entry   the other streams wait for the caller's, and the caller's for the end of the team's last
            run, of whatever Executor, if that was on another stream: slots, words and staging
            memory are one run's at a time
    exit    the caller's stream waits for the others
    after   another stream tells the peers that this run has ended
    The stream that computes has nothing on it but its own ops and a few events: writes and waits
    for words each keep a stream for a microsecond or more (Note [When slots are taken]).

Note [Runs that wait for nobody]
    Outside of teams the watchdog has nothing to bound. One event stands for the end of the last
    run, for which the next one waits on another stream: what kernels keep is one run's at a time.
    It is recorded when the run ends: later the caller may have destroyed the stream. A run of
    torch's own operators without an arena leaves no event: `synchronize` waits for the device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version

from interlace.comm import TeamComm, Use
from interlace.comm.cuda.driver import Driver, Event
from interlace.errors import BackendError, ExecutorError
from interlace.ir import Alloc, Call, Copy, Free, views_in
from interlace.ir.lifetimes import homes
from interlace.runtime.arena import Arena, Last
from interlace.runtime.calling.calls import Outputs
from interlace.runtime.cuda.binder import Binding
from interlace.runtime.cuda.graphs.graphs import Graphs
from interlace.runtime.cuda.graphs.warm_up import warm_up
from interlace.runtime.cuda.lanes import OpTimer
from interlace.runtime.cuda.sharing import hears_all, share
from interlace.runtime.cuda.waits.watchdog import Marks, Watched, watchdog
from interlace.runtime.engine import Engine, EngineContext
from interlace.torch_private import (
    cuda_device,
    cuda_raw_stream,
    is_cuda_stream_capturing,
    set_grad_enabled,
)

Fit = Callable[[Sequence[torch.Tensor]], Any]
"""Tells whether tensors fit, or (with graphs) at which addresses they do."""
MARKS = 1024
"""Runs whose begin and end on the device can be told apart: more than a device queues, which is 340
of those with the fewest entries, their two marks and a graph (H200, CUDA 13)."""
NO_USES: Mapping[str, Use] = MappingProxyType({})


class Here(threading.local):
    bound = False
    """True if this thread already has a CUDA context (`isCurrentStreamCapturing` creates one). The
    default stream cannot be captured: there the function is called for the context alone, once."""


class Changes:
    """Caller's tensors that runs write. Autograd is told of it, as by torch itself."""

    def __init__(self, context: EngineContext) -> None:
        ops = context.plan.program.ops
        self.buffers = {access.view.buffer for op in ops for access in op.writes()}
        """Buffers that runs of this rank write."""
        names = context.inputs.names
        self._inputs = [index for index, name in enumerate(names) if name in self.buffers]
        self.always = bool(self._inputs)
        """True if a run writes a caller's tensor even without given outputs."""

    def of(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """The tensors that a run writes; inference tensors have no version counter."""
        return [*[inputs[index] for index in self._inputs], *(out or ())]


class CudaEngine(Engine):
    share = staticmethod(share)

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.device = context.device
        spaces: Any = context.resources.spaces
        self.sides = list({id(s.side): s.side for s in spaces.values()}.values())
        self.driver = self.sides[0].driver if self.sides else Driver()
        self.timed = OpTimer(self.device)
        self.watched = Watched(self, context)
        self.watches = bool(context.resources.teams) or context.options.trace
        """True if runs have marks for the watchdog: Note [Runs that wait for nobody]."""
        with torch.cuda.device(self.device):
            self.binding = Binding(context, self.driver, spaces, self)
            self.marks = Marks(self.driver, MARKS if self.watches else 1)
            self._told = self.driver.event()
        self.plain = not (self.watches or self.binding.sides or context.options.graph)
        """True if a run is nothing but its ops, on the caller's stream."""
        self._keeps = not self.plain or keeps_memory(context)
        self._finished = 0
        self._used = [s.side for s in spaces.values() if s.uses]
        self._generations = [(side, side.generation) for side in self.sides]
        self._closing = [s.side for team, s in spaces.items() if hears_all(context.plan, team)]
        self._tells = [(side, self.driver.batch(("write", side.told))) for side in self._used]
        self.last: tuple[int, Event] | None = None
        self._owners: list[Any] = [*self.sides] or [self]
        self._arena: Arena | None = None
        self._uses: dict[tuple[int, ...], Mapping[str, Use]] = {(): NO_USES}
        self.graphs: Graphs | None = None
        self.warm = False
        """True once a run has been issued op by op, as graphs need before they are captured."""
        self.issued = self.entered = 0
        self.since = 0.0
        self._here = Here()
        self.changes, self._lent = Changes(context), lent(context, self.binding)
        self._index = context.device.index or 0
        self._raw_stream: Callable[[int], int] = cuda_raw_stream
        self._capturing: Callable[[], bool] = is_cuda_stream_capturing
        self._current: Callable[[], int] = cuda_device
        self._grad: Callable[[bool], None] = set_grad_enabled
        self._fit: Fit = context.inputs.fit
        self._fit_outputs: Fit = context.outputs.fit
        watchdog().add(self.watched)
        watchdog().start()
        for team, _, _ in self._teams:
            team.used_by(self)
        with torch.cuda.device(self.device):
            self._lay_out()
            if context.options.graph:
                self._fit, self._fit_outputs = context.inputs.addresses, context.outputs.addresses
                self.graphs = Graphs(self)

    def _lay_out(self) -> None:
        """Has temporaries in the arena, but for those of graphs."""
        arena, values = self.context.arena, self.context.values
        if values.nbytes and not self.context.options.graph:
            self._arena, stream = arena, self._raw_stream(self._index)
            _, over = self.marks.of(0)
            arena.enter(values, stream, lambda last: last[2].done(last[1]))
            self.driver.record(stream, over)
            arena.leave(values, (stream, over, self.marks))
            if not self.sides:
                self.last = stream, over

    def _follows(self, last: Last) -> bool:
        """True if this run, which has begun, comes after the end of a run on another stream."""
        waited = [owner.last for owner in self._owners if owner.last is not None]
        return any(event == last[1] for _, event in waited) or last[2].done(last[1])

    def warm_up(self, teams: Sequence[TeamComm]) -> None:
        """With graphs: a run of all ranks together that sets up what cannot be in a capture."""
        if self.graphs is not None:
            warm_up(self, teams)
            self.warm = True

    def admit(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> object | None:
        """True, or with graphs the addresses of the tensors; None where something does not fit."""
        at = self._fit(inputs)
        if out is not None and at is not False:
            more = self._fit_outputs(out)
            at = more is not False and at + more
        if at is False or self._current() != self._index:
            return None
        if self.watched.failure is not None or self.captured:
            return None
        for team, resets, _ in self._teams:
            if team.resets != resets or team.is_gone:
                return None
        return at

    def issue(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        at: Any = None,
        boxed: bool = False,
    ) -> Outputs:
        """Issues a run and gives its results, which are there once the caller's stream is. Copies
        into and out of a graph are part of the run: the next one uses the same memory."""
        if at is None:  # `admit` did not look at the current device
            with torch.cuda.device(self.device):
                return self.issue(inputs, out, (), boxed)
        if self._under_way:
            raise self.nested()
        changed = self.changes.of(inputs, out) if self.changes.always or out is not None else None
        graphs = self.graphs
        if self._teams:
            self._enter()
        try:
            if graphs is not None and self.warm:
                return self._replay(graphs, inputs, out, at, boxed)
            stream, begin, over = self._begin()
            try:
                results = self._issue_ops(inputs, out, stream, begin, boxed)
            except BaseException as error:
                self._abandon(error, stream, over)
                raise
            self._leave(stream, over)
            if self._used:
                self._tell_peers(stream, over)
            return results
        except BackendError as error:
            self.watched.hear()
            known = self.watched.failure
            if known is None or known is error:
                raise
            raise known from error  # what NCCL was ended for, by an abort or by a peer
        finally:
            if changed is not None:
                increment_version(changed)
            self.watched.issuing = False

    def _replay(
        self,
        graphs: Graphs,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        at: Any,
        boxed: bool,
    ) -> Outputs:
        """Replays a graph. `at` are the addresses of the tensors, where `admit` looked at them."""
        given = inputs if out is None else (*inputs, *out)
        at = at or tuple([tensor.data_ptr() for tensor in given])
        pair = graphs.find(given, at, self._raw_stream(self._index), boxed)
        turn = graphs.turn()
        stream, begin, over = self._begin()
        try:
            if self.watches:
                self.driver.record(stream, begin)
            results = pair.run(turn, stream, given)
        except BaseException as error:
            self._abandon(error, stream, over)
            raise
        self._leave(stream, over)
        return results

    def turn(self, at: Sequence[int]) -> None:
        with torch.cuda.device(self.device):  # which kernels are loaded on
            super().turn(at)

    def _enter(self) -> None:
        """Tells the peers that this rank enters a run; raises where it cannot."""
        watched, context = self.watched, self.context
        watched.issuing = True  # before it enters: `Watchdog.leave`
        try:
            for _, _, control in self._teams:
                control.enter(*context.label.entry)
            for control, contacts in self._apart:
                control.begin(contacts)
            for control, _ in self._apart:
                control.meet_all(context.wait_for("the begin of a run", self.check_teams))
            if watched.failure is not None:  # from before; a later one waits for the end
                raise watched.failure
        except BaseException:
            watched.issuing = False
            raise

    def _begin(self) -> tuple[int, Event, Event]:
        """The caller's stream, after the last run on another; the events of a run."""
        stream = self._raw_stream(self._index)
        run = self.entered = self.issued + 1
        if not self._keeps:
            return stream, *self.marks.events[0]
        self.since = time.monotonic()
        for owner in self._owners:
            last = owner.last
            if last is not None and last[0] != stream:
                self.driver.wait_event(stream, last[1])
        return stream, *self.marks.of(run)

    def _issue_ops(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        stream: int,
        begin: Event,
        boxed: bool,
    ) -> Outputs:
        """Issues the ops one by one, in a table of this run's tensors."""
        context, had_grad = self.context, torch.is_grad_enabled()
        self._under_way = True
        try:
            if had_grad:
                self._grad(False)
            made = context.outputs.new() if out is None else out
            if self._arena is not None:
                self._arena.enter(context.values, stream, self._follows)
            context.values.start((*inputs, *made), self.uses() if self.sides else NO_USES)
            if boxed:
                cast("list[torch.Tensor]", inputs).clear()
            if context.options.trace:
                self.timed.begin()
            for side in self._used:
                side.enter()
            self.binding.issue(stream, None if self.plain else begin)
            if self._lent:
                self._lend()
            return context.results()
        finally:
            context.values.end()
            if had_grad:
                self._grad(True)
            self._under_way = False

    def _lend(self) -> None:
        """Lets the allocator know that the caller's stream goes on using results of others."""
        stream, items = torch.cuda.current_stream(self.device), self.context.values.items
        for place in self._lent:
            if items[place] is not None:  # else its Call left it out
                items[place].record_stream(stream)

    def _leave(self, stream: int, over: Event) -> None:
        """All of a run is issued. Only now it counts: before, its event stands for an older one."""
        if self._keeps:
            self.driver.record(stream, over)
            last = stream, over
            for owner in self._owners:
                owner.last = last
            if self._arena is not None:
                self._arena.leave(self.context.values, (stream, over, self.marks))
        self.issued += 1

    def _tell_peers(self, stream: int, over: Event) -> None:
        """Has a stream aside tell the peers that this run has ended."""
        for side in self._closing:
            side.closed = side.run
        aside = self.binding.aside.handle
        if aside != stream:
            self.driver.wait_event(aside, over)
        for side, tells in self._tells:
            if side.teller != aside:
                # What another Executor's stream tells comes before: the peers' words never go back.
                if side.teller is not None:
                    self.driver.record(side.teller, self._told)
                    self.driver.wait_event(aside, self._told)
                side.teller = aside
            tells.run(aside, side.run)

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

    @property
    def captured(self) -> bool:
        """True if the caller's stream is captured, in which there must be no run."""
        if not self._raw_stream(self._index) and self._here.bound:
            return False
        found = self._capturing()
        self._here.bound = self._here.bound or not found
        return found

    def look(self) -> None:
        """Raises where the caller's stream is captured, before anything is done for a run."""
        with torch.cuda.device(self.device):
            if self.captured:
                raise ExecutorError(
                    f"{self.context.plan.program.name} was called inside a CUDA graph capture, "
                    "which would keep this run's numbers: use Options(graph=True) instead"
                )

    @property
    def failure(self) -> BaseException | None:
        return self.watched.failure

    def check(self) -> None:
        if self.watched.failure is not None:
            raise self.watched.failure

    def confirm(self) -> None:
        """Raises what stopped this rank or a peer by now, whether or not it was found yet."""
        self.watched.hear()
        self.check()

    @property
    def spaces(self) -> Mapping[str, Any]:
        return self.binding.spaces if self.graphs is None else self.graphs.spaces

    @property
    def spans(self) -> list[tuple[int, float, float]]:
        """With the option `trace`: op, start and end of each op of the last run, in seconds."""
        self.synchronize()
        return self.timed.spans()

    def ended(self, run: int) -> bool:
        """True if a run, of the last few, has ended, or if runs leave no event to look at."""
        return not self._keeps or self.marks.ended(run)

    def finish_unmarked(self) -> None:
        """Waits for runs that left no event."""
        issued = self.issued
        if not self._keeps and self._finished != issued:
            with torch.cuda.device(self.device):
                self.driver.finish_device()
            self._finished = issued

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

    def leave(self) -> None:
        """Lets go of graphs, when no run is under way: NCCL waits for those that it is in."""
        with contextlib.suppress(Exception):  # kept, and raised by the next call
            self.watched.finish()  # bounded: what stalls fails, and is let go
        if self.graphs is not None:
            self.graphs.drop()

    def later(self, end: Callable[[], None]) -> bool:
        """Has the watchdog call `end` behind runs that are still under way after a while."""
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
        arena = self.context.arena
        if over:
            self.context.values.drop()
        elif arena is self._arena:
            arena.abandon()  # before its marks say that all is done
        if arena.last is not None and arena.last[2] is self.marks:
            arena.last = None
        self.marks.close()
        self.driver.destroy_event(self._told)


def keeps_memory(context: EngineContext) -> bool:
    """True if runs may share memory that only one of them may use at a time."""
    program = context.plan.program
    regions = {region.name for region in program.regions}
    return context.values.nbytes > 0 or not all(
        isinstance(op, Alloc | Copy | Free)
        or (isinstance(op, Call) and op.fn.startswith("aten.") and op.fn not in regions)
        for op in program.ops
    )


def lent(context: EngineContext, binding: Binding) -> list[int]:
    """The places of results whose memory is another stream's than the caller's (plan.py, Note
    [Whose memory]): freed, that stream's next ops would get it while the caller still reads."""
    made, buffers = homes(context.plan.program), context.plan.buffers
    returned = {v.buffer: None for arg in context.plan.program.returned() for v in views_in(arg)}
    return [
        context.values.family(name)[0]
        for name in returned
        if buffers[name].kind == "fresh"
        and name in made
        and name not in context.values.host
        and binding.lanes[made[name]] is not binding.main
    ]
