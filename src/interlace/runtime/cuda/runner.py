"""One run on CUDA, from the caller's tensors to the results, with as little of Python as can be.

runner = Runner(engine, inputs, outputs, results, tag)
(y,) = runner.run([x, w], None)       # None: the Executor has to look at something first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import TeamComm
from interlace.errors import BackendError, ExecutorError
from interlace.ir import views_in
from interlace.runtime.cuda.graphs.captured import Source, may_draw
from interlace.runtime.cuda.graphs.changes import Changes
from interlace.runtime.host.quick import NO_USES
from interlace.runtime.inputs import Given
from interlace.runtime.releases import homes
from interlace.runtime.results import Results

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


class Together:
    """Several locks, taken in their order, as one."""

    def __init__(self, locks: Sequence[Any]) -> None:
        self._locks = locks

    def acquire(self, blocking: bool, time_out_s: float = -1) -> bool:
        """Takes all of them, or none."""
        taken = 0
        try:
            for lock in self._locks:
                if not lock.acquire(blocking, time_out_s):
                    break
                taken += 1
        finally:
            if taken < len(self._locks):
                for lock in self._locks[:taken]:
                    lock.release()
        return taken == len(self._locks)

    def release(self) -> None:
        """Lets go of all."""
        for lock in self._locks:
            lock.release()


class Runner:
    """Issues runs of one engine."""

    def __init__(
        self,
        engine: CudaEngine,
        inputs: Given,
        outputs: Given,
        results: Results,
        tag: int,
    ) -> None:
        context = engine.context
        self._engine, self._inputs, self._outputs, self._results = engine, inputs, outputs, results
        self._values = context.values
        self._teams = list(context.crew.teams.values())
        self._resets = [(team, team.resets) for team in self._teams]
        ordered = sorted(dict.fromkeys(self._teams), key=lambda team: team.topic)
        locks = [team.lock for team in ordered]
        self._lock: Any = locks[0] if len(locks) == 1 else Together(locks) if locks else RLock()
        self._shared = " on the same teams" if ordered else ""
        self._limit = context.time_out_s
        self._name, self._tag = context.plan.program.name, tag
        self._text = context.flight.text
        self._start = self._values.starter((*inputs.names, *outputs.names))
        self._source = Source(inputs.names, outputs.names, outputs.new, results)
        self._changes = Changes(context, inputs.names)
        self._has_places = bool(self._values.registered)
        self._lent = lent(engine)
        self.warm = False
        """Whether a run has been issued op by op, as graphs need before they are captured."""
        self._grad: Callable[[bool], None] = torch._C._set_grad_enabled  # pyright: ignore
        self._device, self._index = engine.device, engine.device.index or 0
        self._current: Callable[[], int] = torch._C._cuda_getDevice  # pyright: ignore

    def warm_up(self, teams: Sequence[TeamComm]) -> None:
        """With graphs: one run op by op, with zeros, which sets up what cannot be in a capture.
        What it writes of registered parameters is put back, also where it fails, and so are the
        generators of random numbers: runs draw what they would without graphs.

        None goes on before all ranks have ended it, and where one fails the others hear of it.
        """
        places = [(team, f"{team.topic}/{self._tag:x}/{team.resets}/warm-up") for team in teams]
        with ExitStack() as meetings:
            for team, place in places:
                meetings.enter_context(team.board.attending([place], team.rank))
            self._run_once()
        try:
            for team, place in places:
                team.board.exchange(place, team.ranks, team.rank, {}, self._limit)
        except BaseException as error:
            self._engine.watched.fail(error)  # a reset then gives it another place
            raise
        self.warm = True

    def _run_once(self) -> None:
        """A run with zeros, to its end, that leaves what is registered as it was."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            with torch.inference_mode():  # they may be leaves that want a gradient, or inference's
                kept += [(tensor, tensor.clone()) for tensor in self._changes.registered]
            with self._same_draws():
                self.issue(self._inputs.zeros(self._changes.buffers), None)
                self._engine.synchronize()
        except BaseException as error:
            self._engine.watched.fail(error)  # peers wait for this rank in their runs
            if kept:  # peers are let go of; what the streams still do, they do before the copies
                self._engine.watched.settle()
            raise
        finally:
            self._put_back(kept)

    def _same_draws(self) -> AbstractContextManager[None]:
        """Puts generators back, where the Program may draw random numbers; a capture draws none."""
        device = self._values.device
        draws = may_draw(self._engine.context.plan.program)
        devices = [device] if device.type == "cuda" else []
        return torch.random.fork_rng(devices, enabled=draws, device_type="cuda")

    def _put_back(self, kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies the contents back; after a run that went well its peers are done with them too."""
        if kept:
            with torch.inference_mode():
                for tensor, before in kept:
                    tensor.copy_(before)
            if self._engine.watched.idle:  # else it failed, and may never end: nobody waits for it
                torch.cuda.current_stream(self._values.device).synchronize()

    @property
    def ready(self) -> bool:
        """Whether nothing has happened since this was made that a run must look at first, and the
        thread's current device is this one, as it is not in a new thread."""
        engine = self._engine
        if engine.watched.failure is not None or self._current() != self._index or engine.captured:
            return False
        for team, resets in self._resets:
            if team.resets != resets:
                return False
        return True

    def look(self) -> None:
        """Raises where there must be no run, before anything is done for it."""
        with torch.cuda.device(self._device):
            self._engine.look()

    def run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...] | None:
        """Issues a run and gives its results, which are there once the caller's stream is; None,
        with nothing done, where the Executor has to look first."""
        if self.ready and self._inputs.fit(inputs) and (out is None or self._outputs.fit(out)):
            return self._run(inputs, out)
        return None

    def issue(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """`run`, on whatever device the thread is, once the Executor has looked at all that there
        may be to look at."""
        with torch.cuda.device(self._device):
            return self._run(inputs, out)

    def _run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        if not self._lock.acquire(False):
            self._wait()
        had_grad = torch.is_grad_enabled()
        try:
            if had_grad:
                self._grad(False)
            return self._issue(inputs, out)
        finally:
            if had_grad:
                self._grad(True)
            self._lock.release()

    def _wait(self) -> None:
        """Takes the lock that another thread has."""
        if not self._lock.acquire(True, self._limit):
            raise ExecutorError(
                f"{self._name} waited {self._limit:g} s for another thread's run{self._shared}: "
                "call Executors from one thread"
            )

    def _issue(self, inputs: Sequence[Any], out: Sequence[Any] | None) -> tuple[Any, ...]:
        engine = self._engine
        values, watched, given = self._values, engine.watched, out
        watched.issuing = True  # before it enters: `Watchdog.leave`
        try:
            for team in self._teams:
                team.control.enter(self._tag, self._name, self._text)
            if self._has_places:
                self._inputs.check_places(inputs)
                if out is not None:
                    self._outputs.check_places(out)
            try:
                if watched.failure is not None:  # from before; a later one waits for the end
                    raise watched.failure
                if engine.graphs is not None and self.warm:
                    return engine.graphs.run(self._source, inputs, out)
                out = self._outputs.new() if out is None else out
                try:
                    self._start((*inputs, *out), engine.uses())
                    engine.run()
                    if self._lent:
                        self._lend()
                    return self._results()
                finally:
                    values.end()
            except BackendError as error:
                watched.hear()
                known = watched.failure
                if known is None or known is error:
                    raise
                raise known from error  # what NCCL was ended for, by an abort or by a peer
            finally:
                if self._changes.always or given is not None:
                    self._changes.tell(inputs, given)
        finally:
            watched.issuing = False

    def _lend(self) -> None:
        """Lets the allocator know that the caller's stream goes on using results of others."""
        stream, items = torch.cuda.current_stream(self._values.device), self._values.items
        for place in self._lent:
            if items[place] is not None:  # else its Call left it out
                items[place].record_stream(stream)


def lent(engine: CudaEngine) -> list[int]:
    """The places of results whose memory is another stream's than the caller's: releases.py,
    Note [Whose memory]. Let go of, it is given to the next run's ops on that stream, and a run that
    is called on another stream than this one waits for what this run did, not for its reader."""
    context, binding = engine.context, engine.binding
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


class PlainRunner(Runner):
    """Issues runs that are nothing but their ops, of an engine that is `plain`."""

    def __init__(self, engine: CudaEngine, *rest: Any) -> None:
        super().__init__(engine, *rest)
        self._lock, self._end = Lock(), self._values.end

    @property
    def ready(self) -> bool:
        """A run that failed leaves nothing behind."""
        return self._current() == self._index

    def _run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        if not self._lock.acquire(False):
            self._wait()
        had_grad = torch.is_grad_enabled()
        try:
            if had_grad:
                self._grad(False)
            made = self._outputs.new() if out is None else out
            self._start((*inputs, *made), NO_USES)
            self._engine.run_plain()
            return self._results()
        finally:
            self._end()
            if had_grad:
                self._grad(True)
            self._lock.release()
            if self._changes.always or out is not None:
                self._changes.tell(inputs, out)


class Replayer(Runner):
    """Issues runs of an engine with graphs."""

    def __init__(self, engine: CudaEngine, *rest: Any) -> None:
        super().__init__(engine, *rest)
        assert engine.graphs is not None
        self._graphs = engine.graphs
        self._enters = [team.control.enter for team in self._teams]
        self._inputs_at, self._outputs_at = self._inputs.addresses, self._outputs.addresses

    def run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...] | None:
        """The same; where graphs lie ready for these tensors, with as little around the launch as
        can be: nothing there minds the gradient mode, and what is registered lies where it did."""
        at = self._inputs_at(inputs)
        more = () if out is None else self._outputs_at(out)
        if at is False or more is False or not self.ready:
            return None
        watched, graphs, lock = self._engine.watched, self._graphs, self._lock
        if not lock.acquire(False):
            self._wait()
        try:
            pair = graphs.at.get(at + more if more else at)
            if pair is None:
                return self._run(inputs, out)
            watched.issuing = True  # before it enters: `Watchdog.leave`
            for enter in self._enters:
                enter(self._tag, self._name, self._text)
            if watched.failure is not None:
                raise watched.failure
            if self._changes.always or out is not None:
                self._changes.tell(inputs, out)
            given = inputs if out is None else (*inputs, *out)
            return self._engine.replay(pair, graphs.turn(pair), given)
        except BackendError as error:
            if watched.failure is None or watched.failure is error:
                raise
            raise watched.failure from error
        finally:
            watched.issuing = False
            lock.release()


def runner_of(engine: CudaEngine, *rest: Any) -> Runner:
    """What issues the runs of this engine."""
    kind = PlainRunner if engine.plain else Runner if engine.graphs is None else Replayer
    return kind(engine, *rest)
