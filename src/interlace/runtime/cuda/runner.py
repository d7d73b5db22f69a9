"""One run on CUDA, from the caller's tensors to the results, with as little of Python as can be.

runner = Runner(engine)
(y,) = runner.run([x, w], None)       # None: the Executor has to look at something first

Note [One run path on CUDA]
    Every run is issued by `_issue`, and all but replays op by op, by `_eager`. Two things are apart
    for the host's time. What waits for nobody is `plain`: no peer hears of it, no watchdog looks at
    it, and it has no event to mark where it begins. A replay makes no table and minds no gradient
    mode: it looks up the graphs of its addresses and launches one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from interlace.comm import TeamComm
from interlace.errors import BackendError, ExecutorError
from interlace.ir import views_in
from interlace.runtime.cuda.graphs.captured import may_draw
from interlace.runtime.engine import EngineContext
from interlace.runtime.prepare.plan import homes

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


class Changes:
    """What the runs of a Program write of the tensors that they are given: autograd hears of it, as
    of torch's own ops, since what was saved of them for a backward is other now."""

    def __init__(self, context: EngineContext) -> None:
        known, ops = context.values.registered, context.plan.program.ops
        self.registered = [held.tensor for held in known.values() if held.written]
        """What runs of any rank write."""
        self.buffers = {access.view.buffer for op in ops for access in op.writes()} - {*known}
        """What those of this rank write, but for what is registered."""
        names = context.inputs.names
        self._inputs = [index for index, name in enumerate(names) if name in self.buffers]
        self.always = bool(self.registered or self._inputs)
        """Whether a run changes something, also where it is given no outputs."""

    def tell(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None) -> None:
        """Counts a version of each of these tensors; inference mode's have none, and are let be."""
        increment_version(
            [*self.registered, *[inputs[index] for index in self._inputs], *(out or ())]
        )


class Runner:
    """Issues runs of one engine: Note [One run path on CUDA]."""

    def __init__(self, engine: CudaEngine) -> None:
        context = engine.context
        self._engine, self._graphs = engine, engine.graphs
        self._plain = engine.plain and engine.graphs is None
        self._inputs, self._outputs, self._results = (
            context.inputs,
            context.outputs,
            context.results,
        )
        self._values, self._end = context.values, context.values.end
        teams = dict.fromkeys(context.resources.teams.values())
        self._resets = [(team, team.resets) for team in teams]
        self._controls = [team.control for team in teams]
        self._label, self._lock = context.label, context.lock
        self._under_way = False
        """Whether a run is issued op by op: the lock keeps out only other threads."""
        self._start = self._values.starter((*self._inputs.names, *self._outputs.names))
        self.changes = Changes(context)
        self._has_places = bool(self._values.registered)
        self._lent = lent(engine)
        self.warm = False
        """Whether a run has been issued op by op, as graphs need before they are captured."""
        self._grad: Callable[[bool], None] = torch._C._set_grad_enabled  # pyright: ignore
        self._device, self._index = engine.device, engine.device.index or 0
        self._current: Callable[[], int] = torch._C._cuda_getDevice  # pyright: ignore
        self._fit: Callable[[Any], Any] = self._inputs.fit
        self._fit_outputs: Callable[[Any], Any] = self._outputs.fit
        if self._graphs is not None:
            self._fit, self._fit_outputs = self._inputs.addresses, self._outputs.addresses

    def warm_up(self, teams: Sequence[TeamComm]) -> None:
        """With graphs: one run op by op, with zeros, which sets up what cannot be in a capture.
        What it writes of registered parameters is put back, also where it fails, and so are the
        generators of random numbers: runs draw what they would without graphs.

        None goes on before all ranks have ended it, and where one fails the others hear of it.
        """
        places = [
            (team, f"{team.topic}/{self._label.tag:x}/{team.resets}/warm-up") for team in teams
        ]
        with ExitStack() as meetings:
            for team, place in places:
                meetings.enter_context(team.board.attending([place]))
            self._run_once()
        try:
            limit = self._engine.context.time_out_s
            for team, place in places:
                team.board.exchange(place, {}, limit)
        except BaseException as error:
            self._engine.watched.fail(error)  # a reset then gives it another place
            raise
        self.warm = True

    def _run_once(self) -> None:
        """A run with zeros, to its end, that leaves what is registered as it was."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            with torch.inference_mode():  # they may be leaves that want a gradient, or inference's
                kept += [(tensor, tensor.clone()) for tensor in self.changes.registered]
            with self._same_draws():
                self.issue(self._inputs.zeros(self.changes.buffers), None)
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
        if self._current() != self._index:
            return False
        if self._plain:  # a run that failed leaves nothing behind
            return True
        engine = self._engine
        if engine.watched.failure is not None or engine.captured:
            return False
        for team, resets in self._resets:
            if team.resets != resets:
                return False
        return True

    def run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...] | None:
        """Issues a run and gives its results, which are there once the caller's stream is; None,
        with nothing done, where the Executor has to look first."""
        at = self._fit(inputs)  # with graphs: the addresses
        if at is False:
            return None
        if out is not None:
            more = self._fit_outputs(out)
            if more is False:
                return None
            at += more
        if not self.ready or not self._lock.acquire(False):
            return None
        try:
            return self._issue(inputs, out, at)
        finally:
            self._lock.release()

    def issue(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """`run`, on whatever device the thread is, once the Executor has the lock and has looked at
        all that there may be to look at."""
        with torch.cuda.device(self._device):
            return self._issue(inputs, out, None)

    def _issue(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None, at: Any
    ) -> tuple[Any, ...]:
        """One run; `at` has the addresses of the tensors, if they are known."""
        watched, graphs = self._engine.watched, self._graphs
        if not self._plain:
            self._enter(inputs, out)
        try:
            if graphs is None or not self.warm:
                return self._eager(inputs, out)
            pair = graphs.at.get(at)
            if pair is None:
                return graphs.run(inputs, out)
            given = inputs if out is None else (*inputs, *out)
            return self._engine.replay(pair, graphs.turn(pair), given)
        except BackendError as error:
            watched.hear()
            known = watched.failure
            if known is None or known is error:
                raise
            raise known from error  # what NCCL was ended for, by an abort or by a peer
        finally:
            if self.changes.always or out is not None:
                self.changes.tell(inputs, out)
            watched.issuing = False

    def _enter(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None) -> None:
        """Tells the peers that this rank enters a run; raises where it cannot."""
        watched = self._engine.watched
        watched.issuing = True  # before it enters: `Watchdog.leave`
        try:
            for control in self._controls:
                control.enter(*self._label)
            if self._has_places:
                self._inputs.check_places(inputs)
                if out is not None:
                    self._outputs.check_places(out)
            if watched.failure is not None:  # from before; a later one waits for the end
                raise watched.failure
        except BaseException:
            watched.issuing = False
            raise

    def _eager(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """Issues the ops one by one, in a table of this run's tensors."""
        if self._under_way:
            name = self._label.name
            raise ExecutorError(f"{name} was called in a run of its own: make another Executor")
        had_grad = torch.is_grad_enabled()
        self._under_way = True
        try:
            if had_grad:
                self._grad(False)
            made = self._outputs.new() if out is None else out
            self._start((*inputs, *made), self._engine.uses())
            self._engine.issue_ops()
            if self._lent:
                self._lend()
            return self._results()
        finally:
            self._end()
            if had_grad:
                self._grad(True)
            self._under_way = False

    def _lend(self) -> None:
        """Lets the allocator know that the caller's stream goes on using results of others."""
        stream, items = torch.cuda.current_stream(self._values.device), self._values.items
        for place in self._lent:
            if items[place] is not None:  # else its Call left it out
                items[place].record_stream(stream)


def lent(engine: CudaEngine) -> list[int]:
    """The places of results whose memory is another stream's than the caller's: plan.py,
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
