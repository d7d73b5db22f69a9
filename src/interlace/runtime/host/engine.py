"""The CPU engine: a thread for each stream, real concurrency, every wait bounded.

The first stream runs on the thread that calls `run`; each other one has a thread of its own, which
lives as long as the engine. Nothing but `StreamOrder` and the signals of `comm` orders them, as in
the Program's text.

Note [Threads and arithmetic]
    How MKL and OpenMP split a matrix multiplication depends on the number of threads, which is set
    per calling thread. A stream's thread takes the caller's number before each run, so that a Call
    gives the same bits on whatever stream it runs. It takes the caller's inference mode too: what
    the caller allocates in that mode may not be written out of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from interlace.comm.control import DONE, STREAMS
from interlace.comm.rendezvous.patience import Patience
from interlace.errors import ExecutorError, InterlaceError, PeerError
from interlace.ir import Call, Collective, Fused, Group, Op, Recv, Send, in_order
from interlace.runtime.calling.calls import Thunk, bind_call
from interlace.runtime.engine import Context
from interlace.runtime.host.binder import HostBinder, StreamOrder
from interlace.runtime.host.quick import is_plain
from interlace.runtime.releases import releases

GRACE_S = 1.0
"""How long a failed transfer looks for the peer whose end explains it."""


@dataclass(frozen=True, slots=True)
class Step:
    """An op of a stream, bound."""

    index: int
    op: Op
    run: Thunk
    lane: int = 0
    """The number of its stream."""
    proper: bool = True
    """False for what only comes along with an op: waiting for the host, dropping a tensor."""


class Stopped(BaseException):
    """Ends a stream whose Executor failed elsewhere. Never leaves the engine."""


class CpuEngine:
    """Runs the bound ops of one rank."""

    def __init__(self, context: Context) -> None:
        self.spans: list[tuple[int, float, float]] = []
        self.context = context
        self.rank = context.plan.rank
        self.flight = context.flight
        self._teams = context.crew.teams
        self._before_op = context.before_op
        self._trace = context.options.trace
        self._time_out_s = context.time_out_s
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._order = StreamOrder(self.flight)
        self._streams = self._bind(context)

    def _bind(self, context: Context) -> dict[str, list[Step]]:
        """Every op as a step of its stream; of one stream for all with the option `in_order`."""
        plan, compiled = context.plan, context.options.regions == "inductor"
        regions = {region.name: region for region in plan.program.regions}
        binder = HostBinder(context, self._order, self.check)
        streams: dict[str, list[Step]] = {}
        leaving = releases(plan.program)
        lanes = {stream: lane for lane, stream in enumerate(plan.program.streams())}
        for index, op, members, last in _listed(plan.program.ops, context.options.in_order):
            steps = streams.setdefault("" if context.options.in_order else op.stream, [])
            for point in plan.syncs.get(index, ()):
                wait = binder.pass_by((point, 0), index)
                steps.append(Step(index, op, wait, lanes[op.stream], proper=False))
            runs: list[Thunk] = []
            for number, member in members:
                if isinstance(member, Call):
                    run = bind_call(member, context.values, regions, context.device, compiled)
                else:
                    run = binder.bind(index, member, number)
                if run is not None:
                    runs.append(run)
            if runs:
                run = runs[0] if len(runs) == 1 else _in_turn(runs)
                steps.append(Step(index, op, run, lanes[op.stream]))
            for name in leaving.get(index, ()) if last else ():
                release = binder.free(name)
                assert release is not None
                steps.append(Step(index, op, release, lanes[op.stream], proper=False))
        return streams

    def alone(self) -> list[Step] | None:
        """The steps, if one stream has them all and nobody watches it."""
        plan = self.context.plan
        if self._before_op is not None or self._trace or len(self._streams) != 1:
            return None
        (steps,) = self._streams.values()
        if self._teams:
            told = len(self._teams) == 1 and len(plan.program.streams()) <= STREAMS
            return steps if told and steps else None
        return steps if not plan.syncs and all(map(is_plain, steps)) else None

    def begin_alone(self) -> None:
        """A run of those steps begins, on the caller's thread."""
        self._order.begin()
        self._failure = None

    def check(self) -> None:
        """Raises where waiting on is pointless: this rank or a peer has failed."""
        if self._failure is not None:
            raise Stopped
        for team in self._teams.values():
            team.control.check()

    def run(self) -> None:
        """Runs every stream to its end; raises what made one fail, with all of them stopped.

        The caller has turned gradients off.
        """
        streams = self._streams
        lost = [worker.name for worker in self._workers.values() if worker.lost]
        if lost:
            raise ExecutorError(f"stream {lost[0]} of rank {self.rank} still hangs: make another")
        self._order.begin()
        self._failure = None
        self.spans = []
        self.flight.begin()
        (_, mine), *others = streams.items() if streams else (("", ()),)
        workers = [self._worker(name) for name, _ in others]
        mode = torch.get_num_threads(), torch.is_inference_mode_enabled()
        for worker, (_, steps) in zip(workers, others, strict=True):
            worker.start_run(steps, mode)
        self._drive(mine)
        self._join(workers, self._time_out_s)
        if self._failure is not None:
            raise self._failure

    def _worker(self, name: str) -> _Worker:
        if name not in self._workers:
            self._workers[name] = _Worker(name, self._drive)
        return self._workers[name]

    def _join(self, workers: Sequence[_Worker], time_out_s: float) -> None:
        """Waits for the other streams; one that hangs in a computation gets a time-out's grace."""
        patience: Patience | None = None
        for worker in workers:
            while not self._ended(worker):
                if self._failure is None:
                    continue
                patience = patience or Patience(time_out_s)
                if patience.is_over():
                    worker.lost = True
                    raise ExecutorError(
                        f"stream {worker.name} of rank {self.rank} does not stop: it is in "
                        f"{self.flight.text(self.flight.stands[worker.name])}; this Executor "
                        "cannot be used again"
                    ) from self._failure

    def _ended(self, worker: _Worker) -> bool:
        """Looks for the end of a stream; an interrupt stops the streams before it is raised."""
        try:
            return worker.finished.acquire(timeout=0.1)
        except KeyboardInterrupt as error:
            self._fail(error, None)
            return False

    # -- on the streams' threads -----------------------------------------------------------------

    def _drive(self, steps: Sequence[Step]) -> None:
        """Runs the steps of one stream; what goes wrong stops all streams and tells the peers."""
        step: Step | None = None
        try:
            stands, since, clock = self.flight.stands, self.flight.since, time.perf_counter
            progress = [team.control.teller() for team in self._teams.values()]
            extra = self._before_op is not None or self._trace
            for step in steps:
                if self._failure is not None:
                    raise Stopped
                if not step.proper:
                    step.run()
                    continue
                stream = step.op.stream
                since[stream] = clock()
                stands[stream] = step.index
                for tell in progress:
                    tell(step.lane, step.index)
                if extra:
                    self._run_watched(step)
                else:
                    step.run()
            if step is not None:
                stands[step.op.stream] = -2
                for tell in progress:
                    tell(step.lane, DONE)
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error, step)

    def _run_watched(self, step: Step) -> None:
        start = time.perf_counter()
        if self._before_op is not None:
            self._before_op(self.rank, step.index, step.op)
        step.run()
        if self._trace:
            self.spans.append((step.index, start, time.perf_counter()))

    def explain(self, error: BaseException, step: Step | None) -> BaseException:
        """The error of a step that was run alone, as the user should see it."""
        return error if step is None else self._explain(error, step)

    def synchronize(self) -> None:
        """Nothing: a run that returned has ended."""

    def _fail(self, error: BaseException, step: Step | None) -> None:
        with self._lock:
            if self._failure is not None:
                return
            told = self._explain(error, step) if step is not None else error
            self._failure = told
        for team in self._teams.values():
            team.control.fail(told)
        self._order.wake()

    def _explain(self, error: BaseException, step: Step) -> BaseException:
        """The error as the user should see it: which op, and which peer if one is behind it."""
        text = self.flight.describe(step.index)
        if not isinstance(error, Exception):
            return error  # KeyboardInterrupt and the like
        if isinstance(error, InterlaceError):
            if text not in str(error):
                error.args = (f"{error}\nwhile running {text}", *error.args[1:])
            return error
        if isinstance(step.op, Collective | Send | Recv | Group) and isinstance(
            error, RuntimeError
        ):
            known = self._peer_behind()
            if known is None:
                known = PeerError(f"a transfer failed: {str(error).splitlines()[0]}")
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
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            for team in self._teams.values():
                found = team.control.failure()
                if found is not None:
                    return found
            time.sleep(0.01)
        return None

    def close(self) -> None:
        """Ends the threads."""
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.stop()


Listed = tuple[int, Op, list[tuple[int, Op]], bool]


def _listed(ops: Sequence[Op], one_by_one: bool) -> Iterator[Listed]:
    """The ops, each with what it is made of, and whether that is the last of it.

    One by one, the members of a Fused stand for themselves.
    """
    for index, number in (
        in_order(ops) if one_by_one else [(index, -1) for index in range(len(ops))]
    ):
        op = ops[index]
        members = list(enumerate(op.members if isinstance(op, Fused) else (op,)))
        last = number in (-1, len(members) - 1)
        yield index, op, members if number < 0 else [members[number]], last


def _in_turn(runs: Sequence[Thunk]) -> Thunk:
    """The members of a Fused, one after another."""

    def run() -> None:
        for each in runs:
            each()

    return run


class _Worker:
    """The thread of one stream."""

    def __init__(self, name: str, drive: Callable[[Sequence[Step]], None]) -> None:
        self.name = name
        self.lost = False
        self.finished = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._steps: Sequence[Step] | None = None
        self._mode = (0, False)
        self._drive = drive
        self._thread = threading.Thread(
            target=self._live, name=f"interlace stream {name}", daemon=True
        )
        self._thread.start()

    def start_run(self, steps: Sequence[Step], mode: tuple[int, bool]) -> None:
        """Lets the thread run these steps; `finished` is released at their end.

        `mode` is the caller's: its number of threads, and whether it is in inference mode.
        """
        self._steps, self._mode = steps, mode
        self._go.release()

    def _live(self) -> None:
        num_threads = 0
        while True:
            self._go.acquire()
            steps = self._steps
            if steps is None:
                return
            wanted, inference = self._mode  # see Note [Threads and arithmetic]
            if wanted != num_threads:
                torch.set_num_threads(num_threads := wanted)
            with torch.inference_mode(inference), torch.no_grad():
                self._drive(steps)
            self._steps = None
            self.finished.release()

    def stop(self) -> None:
        """Ends the thread, unless it hangs."""
        self._steps = None
        self._go.release()
        if not self.lost and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
