"""The CPU engine: a thread for each stream, real concurrency, every wait bounded.

    engine = CpuEngine(context)
    (y,) = engine.issue([x, w], None)

The first stream runs on the thread that calls `issue`; each other one has a thread of its own,
which lives as long as the engine. Each stream is a flat list of bound functions. Where each stream
is, it writes into cells (`progress_of`): a team's shared memory, which peers read too, or a list of
the engine's own. A Program of one stream and no team waits for nobody, and has no cells.

Note [Threads and arithmetic]
    How MKL and OpenMP split a matrix multiplication depends on the number of threads, which is set
    per calling thread. A stream's thread takes the caller's number before each run, so that a Call
    gives the same bits on whatever stream it runs. It takes the caller's inference mode too: what
    the caller allocates in that mode may not be written out of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import length_hint
from queue import Empty, SimpleQueue
from typing import Any

import torch

from interlace.comm import BoundedWait, Slot, Workspace
from interlace.comm.between_hosts import ASK_S
from interlace.comm.control import DONE, ENTERED, PROGRESS, STREAMS, progress_of
from interlace.comm.host.signals import Cells
from interlace.comm.rendezvous.patience import Patience
from interlace.errors import ExecutorError, InterlaceError, PeerError
from interlace.ir import VALUE_BITS, Op
from interlace.runtime.calling.calls import Outputs, Thunk, in_turn
from interlace.runtime.engine import Engine, EngineContext, ShareRequest, TeamResources
from interlace.runtime.host.binder import HostBinder
from interlace.runtime.prepare.plan import listed
from interlace.torch_private import live_groups, set_grad_enabled

LOOK_EVERY_S = 0.1
"""Time between looks at streams that take long."""
GRACE_S = 1.0
"""Seconds in which a failed transfer looks for the peer whose end explains it."""
Progress = Callable[[int], Sequence[tuple[int, float]]]
"""For a run: the op that each stream began last, and how many seconds ago."""
NOWHERE: Progress = lambda _: ()  # noqa: E731


class Stopped(BaseException):
    """Ends a stream whose Executor failed elsewhere. Never leaves the engine."""


class CpuEngine(Engine):
    """Runs the bound ops of one rank. A run that returned has ended, and raised what failed."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._spans: list[tuple[int, float, float]] = []
        self._program, self._rank = context.plan.program, context.plan.rank
        self._flight, resources = context.flight, context.resources
        self._fit, self._fit_outputs = context.inputs.fit, context.outputs.fit
        self._outputs = context.outputs
        self._results, self._label = context.results, context.label
        self._failure: BaseException | None = None
        self._failing = threading.Lock()
        self._lost = ""
        """The stream that hangs in a computation, if one does."""
        self._grace_s = GRACE_S + (ASK_S if self._apart else 0.0)
        streams = context.plan.program.streams()
        self._controls = [control for _, _, control in self._teams]
        self._groups = live_groups()
        self._cells: list[Cells] = [control.cells for control in self._controls]
        """The cells in which streams tell where they are; the last ones tell it of all streams."""
        self._own: list[int] = []
        if len(streams) > (STREAMS if self._teams else 1) or context.options.trace:
            self._own = [0] * (PROGRESS + 2 * len(streams))
            self._cells.append(self._own)
        flight, progress = self._flight, NOWHERE
        if self._cells:
            progress = partial(progress_of, self._cells[-1], len(streams))
            flight.follow(progress)
        self._order = StreamOrder(lambda: [op for op, _ in progress(flight.run)], self._grace_s)
        self._first, *self._others = self._bind(context) or [Stream("")]
        self._workers = [StreamThread(stream.name, self._drive) for stream in self._others]
        self._takes, self._end = resources.takes, context.values.end
        self._taken = [(buffer, resources.slots[buffer]) for buffer in context.plan.takes]
        self._values = context.values
        self._arena = context.arena if context.values.nbytes else None
        if self._arena is not None:
            self._arena.enter(self._values)
            self._arena.leave(self._values)
        self._grad: Callable[[bool], None] = set_grad_enabled

    @staticmethod
    def share(request: ShareRequest) -> TeamResources:
        plan, limit = request.plan, request.timeout_s
        slots, spaces = dict[str, Slot](), dict[str, Workspace]()
        request.refuse_memory()
        for name, team in request.ordered():
            topic = f"{team.num_prepared}/{name}"
            found = team.slots.ensure(topic, plan.slots.get(name, {}), limit)
            for slot in found.values():
                request.kept.callback(team.slots.let_go, slot)
            mine = [buffer for buffer, of_team in plan.takes.items() if of_team == name]
            slots |= {buffer: found[plan.slot_of(buffer)] for buffer in mine}
            spaces[name] = Workspace(team, topic, plan.demands[name], limit)
            for _, backend in (key for key in request.backends if key[0] == name):
                team.backend(backend, request.device.type, limit)
        return TeamResources(request.teams, slots, spaces)

    def _bind(self, context: EngineContext) -> list[Stream]:
        """Every op as a step of its stream; of one stream for all with the option `in_order`."""
        plan, alone = context.plan, context.options.in_order
        binder = HostBinder(context, self._order, self.check)
        streams: dict[str, Stream] = {}
        lanes = {stream: lane for lane, stream in enumerate(plan.program.streams())}
        ends: dict[int, Stream] = {}
        for index, op, single, released in listed(plan.program, alone):
            name = "" if alone else op.stream
            stream = streams.setdefault(name, Stream(name))
            for point in plan.syncs.get(index, ()):
                stream.add(index, binder.pass_by((point, 0), index))
            runs: list[Thunk] = []
            for number, member in enumerate(op.steps):
                if single in (None, number) and (run := binder.bind(index, member, number)):
                    runs.append(run)
            if runs:
                run, lane = self._watched(index, op, in_turn(runs)), lanes[op.stream]
                if self._cells:
                    run, ends[lane] = self._telling(lane, index, run), stream
                stream.add(index, run)
            for buffer in released:
                stream.add(index, binder.free(buffer))
        for lane, stream in ends.items():
            stream.add(-1, self._telling(lane, DONE, lambda: None))
        return list(streams.values())

    def _telling(self, lane: int, index: int, run: Thunk) -> Thunk:
        """A step that first tells in the cells where its stream is; none begins after a failure."""
        cells = self._cells if lane < STREAMS else self._cells[-1:]
        at, clock = PROGRESS + 2 * lane, time.monotonic_ns

        def telling() -> None:
            if self._failure is not None and index != DONE:  # of another stream
                raise Stopped
            for each in cells:
                each[at] = each[ENTERED] << VALUE_BITS | index
                each[at + 1] = clock()
            run()

        return telling

    def _watched(self, index: int, op: Op, run: Thunk) -> Thunk:
        """A step with what tests and traces want around it."""
        before_op, trace, rank = self.context.before_op, self.context.options.trace, self._rank
        if before_op is None and not trace:
            return run

        def watched() -> None:
            start = time.perf_counter()
            if before_op is not None:
                before_op(rank, index, op)
            run()
            if trace:
                self._spans.append((index, start, time.perf_counter()))

        return watched

    def admit(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> object | None:
        """True where the tensors fit, and no team was reset or has gone or failed."""
        if not self._fit(inputs) or (out is not None and not self._fit_outputs(out)):
            return None
        for team, resets, control in self._teams:
            if team.resets != resets or team.group() not in self._groups or not control.quiet():
                return None
        return True

    def issue(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        at: object | None = None,
        boxes: Sequence[list[Any]] = (),
    ) -> Outputs:
        """Enters the teams, fills the table, drives the streams and reads the results."""
        if self._under_way or self._lost:
            raise self._hanging() if self._lost else self.nested()
        had_grad = torch.is_grad_enabled()
        try:
            self._under_way = True
            if had_grad:
                self._grad(False)
            for control in self._controls:
                self._flight.run = control.enter(*self._label.entry)
            for buffer, slot in self._taken:
                self._takes[buffer] = slot.takes
                slot.takes += 1
            self._order.run += 1
            if self._own or self._apart:
                self._enter_further()
            if out is None:
                out = self._outputs.new() if self._outputs.names else ()
            if self._arena is not None:
                self._arena.enter(self._values)
            self._values.start((*inputs, *out), self._takes)
            for box in boxes:
                box.clear()
            if self._workers:
                self._drive_all()
            else:
                self._drive(self._first)
            if self._failure is not None:
                self._raise_failure()
            results = self._results()
            for control in self._controls:
                control.leave()
            self._leave(had_grad)
            return results
        except BaseException:
            self._leave(had_grad)  # all of it: an interrupt may have come amid the one above
            raise

    def _enter_further(self) -> None:
        """Enters a run in this engine's own cells, and meets ranks of other hosts."""
        if self._own:
            self._own[ENTERED] += 1
            self._flight.run = self._own[ENTERED]
            self._spans.clear()
        for control, contacts in self._apart:
            control.begin(contacts)
        for control, _ in self._apart:
            control.meet_all(self.context.wait_for("the begin of a run", self.check_teams))

    def _raise_failure(self) -> None:
        failure = self._failure
        try:
            if isinstance(failure, InterlaceError):
                failure.with_traceback(None)  # frames of ours: the message has the op
            assert failure is not None
            raise failure
        finally:
            del failure  # else its own traceback would keep it, and the run's tensors

    def _leave(self, had_grad: bool) -> None:
        """Whatever the run did to the process is undone."""
        if self._failure is not None:
            self._leave_failure()
        if self._arena is not None:
            self._arena.leave(self._values)
        self._end()
        if had_grad:
            self._grad(True)
        self._under_way = False

    def _leave_failure(self) -> None:
        if self._arena is not None and (self._lost or self._teams):
            self._arena.abandon()  # transfers of gloo, or a hanging stream, may go on writing
        if not self._lost:  # else that stream is to stop
            self._failure = None

    def check(self) -> None:
        """Raises where waiting on is pointless: this rank or a peer has failed."""
        if self._failure is not None:
            raise Stopped
        for _, _, control in self._teams:
            control.check_run()

    def _drive_all(self) -> None:
        """Runs every stream to its end, each on its thread; an interrupt stops the streams before
        it is raised."""
        mode = torch.get_num_threads(), torch.is_inference_mode_enabled()
        try:
            for worker, stream in zip(self._workers, self._others, strict=True):
                worker.start_run(stream, mode)
            self._drive(self._first)
            for worker in self._workers:
                worker.done.get(timeout=LOOK_EVERY_S)
                if worker.task is not None:
                    raise Empty  # that was the end of an earlier run
        except BaseException as error:
            self._await_streams(error)

    def _await_streams(self, error: BaseException) -> None:
        """Waits for streams that take long, or are to stop because of an error."""
        if not isinstance(error, Empty):
            self._fail(error, -1)
        patience: Patience | None = None
        running = [*self._workers]
        while running and not self._lost:
            try:
                while running and not self._lost:
                    if running[0].is_done(LOOK_EVERY_S):
                        running.pop(0)
                    elif self._failure is not None:  # one that hangs gets a time-out's grace
                        patience = patience or Patience(self.context.timeout_s)
                        self._lost = running[0].name if patience.is_over() else ""
            except BaseException as error:
                self._fail(error, -1)
        if self._lost:
            raise self._hangs() from self._failure

    def _hangs(self) -> ExecutorError:
        op = self._flight.text(self._flight.stands[self._lost][0])
        return ExecutorError(
            f"stream {self._lost} of rank {self._rank} does not stop: it is in {op}; this Executor "
            "cannot be used again"
        )

    def _hanging(self) -> ExecutorError:
        return ExecutorError(f"stream {self._lost} of rank {self._rank} still hangs: make another")

    def _drive(self, stream: Stream) -> None:
        """Runs the steps of one stream; what goes wrong stops all streams and tells the peers."""
        left = iter(stream.runs)
        try:
            for run in left:
                run()
        except Stopped:
            pass
        except BaseException as error:
            done = len(stream.runs) - length_hint(left)
            self._fail(error, stream.ops[done - 1] if done else -1)

    def _fail(self, error: BaseException, index: int) -> None:
        """Keeps the error of op `index` (-1: of none), and tells peers and the other streams. An
        interrupt replaces what was kept, for it must be raised."""
        with self._failing:
            if self._failure is not None and isinstance(error, Exception):
                return
            told = self._failure = error if index < 0 else self._explain(error, index)
        for _, _, control in self._teams:
            control.fail(told)

    def _explain(self, error: BaseException, index: int) -> BaseException:
        """The error as the user should see it: which op, and which peer if one is behind it."""
        if not isinstance(error, Exception):
            return error  # KeyboardInterrupt and the like
        text, op = self._flight.describe(index), self._program.ops[index]
        if isinstance(error, InterlaceError):
            if text not in str(error):
                error.args = (f"{error}\nwhile running {text}", *error.args[1:])
            return error
        moves = op.ordering().meets is not None or op.ordering().messages
        if moves and isinstance(error, RuntimeError):
            first = str(error).splitlines()[0]
            known = self._peer_behind() or PeerError(f"a transfer failed: {first}")
            known.args = (f"{known}\nwhile running {text}", *known.args[1:])
            known.__cause__ = error
            return known
        until = "\nThe Executor is out of order until every rank of its teams calls reset()"
        told = ExecutorError(
            f"{text} raised {type(error).__name__}: {error}{until if self._teams else ''}"
        )
        told.__cause__ = error
        return told

    def _peer_behind(self) -> InterlaceError | None:
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline:
            for _, _, control in self._teams:
                if (found := control.cause()) is not None:
                    return found
            time.sleep(0.01)
        return None

    @property
    def spans(self) -> list[tuple[int, float, float]]:
        return self._spans

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop(wait=worker.name != self._lost)
        for stream in (self._first, *self._others):  # whose steps hold this engine, and its teams
            stream.runs, stream.ops = [], []


Bell = SimpleQueue[None]


@dataclass(slots=True)
class Stream:
    """The steps of one stream, and the op that each belongs to (-1: its end)."""

    name: str
    runs: list[Thunk] = field(default_factory=list[Thunk])
    ops: list[int] = field(default_factory=list[int])

    def add(self, index: int, run: Thunk) -> None:
        self.runs.append(run)
        self.ops.append(index)


Task = tuple[Stream, tuple[int, bool]]


class StreamOrder:
    """Points that the streams of one rank await: events, and turns in the teams' queues. Each has a
    cell for the run that has got there last."""

    def __init__(self, stands: Callable[[], list[int]], grace_s: float) -> None:
        """`stands` tells the op that each stream began last; `grace_s` is how much longer than an
        op that waits for peers a stream waits for it."""
        self._stands, self._grace_s = stands, grace_s
        self._cells: dict[object, list[tuple[Cells, int]]] = {}
        self.run = 0
        """Counts runs: in a new one, every point lies ahead again."""

    def cells_of(self, point: object) -> list[tuple[Cells, int]]:
        """The cell of a point, as `tell` and `for_marks` take it."""
        return self._cells.setdefault(point, [([0], 0)])

    def bounded(self, wait: BoundedWait) -> BoundedWait:
        """The wait of an op, as `pass_by` takes it. The waits of the other stream know more of the
        cause, so this one ends only when no stream has begun an op for longer than the time-out."""
        limit = wait.timeout_s + self._grace_s
        return replace(wait, timeout_s=limit, progress=self._stands)


class StreamThread:
    """The thread of a stream. `task` is what it has to do, and None when that is done; the bells
    only say that there is something to look at (Note [Interrupts] in patience.py)."""

    def __init__(self, name: str, drive: Callable[[Stream], None]) -> None:
        self.name = name
        self.task: Task | None = None
        self._stops = False
        self._go, self.done = Bell(), Bell()
        self._drive = drive
        self._thread: threading.Thread | None = None

    def _begin(self) -> None:
        """Starts the thread: before the first run, and in a process that was forked since."""
        self._go, self.done = Bell(), Bell()  # a fork may have left a lock held
        self._thread = threading.Thread(
            target=self._live, name=f"interlace stream {self.name}", daemon=True
        )
        self._thread.start()

    def start_run(self, stream: Stream, mode: tuple[int, bool]) -> None:
        """Runs this stream, in the caller's `mode` (number of threads, inference mode)."""
        if self._thread is None or not self._thread.is_alive():
            self._begin()
        self.task = stream, mode
        self._go.put(None)

    def is_done(self, within_s: float) -> bool:
        """True if the run has ended; waits for it up to `within_s` seconds."""
        if self.task is not None and not rung(self.done, within_s):
            self._go.put(None)  # an interrupt may have come before it was told to go
        return self.task is None

    def _live(self) -> None:
        num_threads = 0
        while not self._stops:
            self._go.get()
            if (task := self.task) is None:
                continue
            stream, (wanted, inference) = task  # see Note [Threads and arithmetic]
            if wanted != num_threads:
                torch.set_num_threads(num_threads := wanted)
            with torch.inference_mode(inference), torch.no_grad():
                self._drive(stream)
            self.task = task = stream = None
            self.done.put(None)

    def stop(self, wait: bool) -> None:
        """Ends the thread; does not wait for one that hangs."""
        self._stops, thread = True, self._thread
        if thread is not None:
            self._go.put(None)
            if wait and threading.current_thread() is not thread:
                thread.join(5.0)


def rung(bell: Bell, within_s: float) -> bool:
    try:
        bell.get(timeout=within_s)
    except Empty:
        return False
    return True
