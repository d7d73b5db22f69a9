"""Bounds what streams wait for: a thread that looks at all runs under way, a few times a second.

A stream cannot time out by itself. So every run of a Program with teams has an event where it
begins on the device and one where it ends. Where the oldest run under way does not end within the
time-out, or a peer has failed, the watchdog finds out what is missing, tells the peers, writes the
words that streams and kernels of this rank wait for (so that they end, with results that nobody may
use) and keeps the error for the next call. Where the CUDA driver is held up it cannot, and ends the
process with the error: Note [Held up] in words.py. Without teams there is nothing of that kind to
find.

    watched = Watched(engine, context)
    watchdog().add(watched)
    watched.finish()        # returns when all runs are over, or raises

`Marks` holds the events. A run's two events are those of the run `num` before it: once so many are
issued on top, they tell nothing of it any more, so `num` is more than a device lets a host be
ahead.

Note [Events that are asked for as they go]
    The driver crashes where an event is asked for that is destroyed, and the watchdog may be asking
    when a thread closes an engine, or the garbage collector does, amid the question itself. So they
    take turns; for who asks afterwards all is over.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from interlace.comm.cuda.driver import Driver, Event, relax_captures, uncollected
from interlace.comm.cuda.nccl import abort, all_ended
from interlace.comm.cuda.words import DriverHeldUpError, reached
from interlace.comm.rendezvous.board import named
from interlace.comm.rendezvous.patience import LONGER, Patience
from interlace.errors import BackendError, CommTimeoutError, InterlaceError, TeamError
from interlace.runtime.engine import EngineContext

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine

PERIOD_S = 0.05
GRACE_S = 5.0
STALL_S = 2.0
"""Seconds without progress, after which ranks on other hosts are asked whether they live."""
HELD_UP_S = 3.0
"""Seconds after a failure that the driver may be held up: an abort of NCCL may still release it."""
EXIT_CODE = 70
PATIENCE_S = 1.0
"""Seconds that a thread gets to finish issuing a run, before communicators are aborted."""


class Marks:
    """Events of the begin and the end of the last `num` runs. One thread records, others look."""

    def __init__(self, driver: Driver, num: int) -> None:
        self.num = num
        self._driver = driver
        self.events = [(driver.event(), driver.event()) for _ in range(num)]
        """Run r has number r % num."""
        self._turn = threading.RLock()  # Note [Events that are asked for as they go]
        self._asking = self._closed = False

    def of(self, run: int) -> tuple[Event, Event]:
        return self.events[run % self.num]

    def begun(self, run: int) -> bool:
        return self.done(self.of(run)[0])

    def ended(self, run: int) -> bool:
        """True if a run, one of the last few, or the later run in its place has ended."""
        return self.done(self.of(run)[1])

    def done(self, event: Event) -> bool:
        """True if what an event of these marks the end of is over, as it is for all once closed."""
        with self._turn:
            if self._closed:
                return True
            self._asking = True
            try:
                return self._driver.done(event)
            finally:
                self._asking = False
                if self._closed:
                    self._destroy()

    def owns(self, event: Event) -> bool:
        return any(event in pair for pair in self.events)

    def close(self) -> None:
        with self._turn:
            closed, self._closed = self._closed, True
            if not (closed or self._asking):
                self._destroy()

    def _destroy(self) -> None:
        for pair in self.events:
            for event in pair:
                self._driver.destroy_event(event)


class Watched:
    """The runs of one engine, as the watchdog sees them."""

    def __init__(self, engine: CudaEngine, context: EngineContext) -> None:
        self._engine = weakref.ref(engine)
        self._context = context
        self._ended = self._seen = 0
        """The last run that is known to have ended, and what of that the watchdog has seen."""
        self._patience = Patience(context.timeout_s)
        self._lock, self._counting = threading.RLock(), threading.Lock()
        self.failure: BaseException | None = None
        self.issuing = False
        """True while a thread is issuing a run: Note [Aborts] in nccl.py."""
        self._failed_at = 0.0
        self._aborting = False
        self._aborts: list[threading.Thread] | None = None
        self._teams = list(context.resources.teams.values())
        self._resets = [(team, team.resets) for team in self._teams]

    @property
    def idle(self) -> bool:
        """True if every run that was entered has ended."""
        engine = self._engine()
        return engine is None or self.progress(engine) == engine.entered

    @property
    def at_rest(self) -> bool:
        """True if no run is under way, or about to be, and no failure still counts."""
        return not self.issuing and (self.failure is None or self.past) and self.idle

    @property
    def mended(self) -> bool:
        """True if nothing is under way, and all teams were reset since this was made."""
        resets = [team.is_set_up and team.resets != count for team, count in self._resets]
        return bool(resets) and all(resets) and self.idle

    @property
    def gone(self) -> bool:
        """True if nothing is under way, and all teams were released."""
        return bool(self._teams) and self.idle and not any(team.is_set_up for team in self._teams)

    @property
    def past(self) -> bool:
        """True if a team of this engine was reset or released since this was made."""
        return any(team.resets != count or not team.is_set_up for team, count in self._resets)

    def progress(self, engine: CudaEngine) -> int:
        """The last run that is known to have ended. Those who wait count too, not only `look`."""
        if not self._counting.acquire(timeout=0.1):  # the garbage collector came, amid this count
            return self._ended
        try:
            issued = engine.issued
            runs = range(max(self._ended, issued - engine.marks.num) + 1, issued + 1)
            if runs and engine.ended(issued):
                self._ended = issued
            elif ended := bisect_left(runs, True, key=lambda run: not engine.ended(run)):
                self._ended = runs[ended - 1]
        finally:
            self._counting.release()
        return self._ended

    def look(self) -> None:
        """One look: notes progress, finds failures, lets go what is stuck."""
        engine = self._engine()
        if engine is None or not self._teams or self.past:
            return
        idle = self.idle
        if self.failure is not None:
            if not idle or self.issuing:  # it may be issuing what has not begun a run: a capture
                try:
                    with uncollected():
                        engine.release()
                except DriverHeldUpError as error:
                    if time.monotonic() - self._failed_at > HELD_UP_S:
                        end_process(self._held_up(error))
                    raise
                finally:
                    self._end_backends()
            return
        before, ended = self._seen, self.progress(engine)
        self._seen, under_way = ended, engine.issued - ended
        if under_way == 0 and not idle:  # the host is at it, or is kept from it
            went_on = engine.since > self._patience.since
        else:
            waits = under_way < engine.marks.num and not engine.marks.begun(ended + 1)
            went_on = idle or ended != before or waits
        if went_on:
            self._patience.restart()
        for team in self._teams:
            found = team.control.heard() or (None if idle else team.control.disagreement())
            if found is None and not idle and self._patience.waited_s > STALL_S:
                found = team.control.cause()  # of a rank on another host that was killed
            if found is not None:
                self.fail(found)
                return
        if not idle and self._patience.is_over(self.stalled):
            self.fail(CommTimeoutError(f"{self.stalled()}\n{LONGER}"))

    def stalled(self) -> str:
        """Which ranks the oldest run under way waits for, and where they are."""
        engine = self._engine()
        with uncollected():
            return "" if engine is None else stalled(engine, self._context, self._ended)

    @property
    def backends(self) -> list[Any]:
        return list(self._context.resources.backends.values())

    def _held_up(self, error: DriverHeldUpError) -> str:
        return (
            f"interlace: rank {self._context.plan.rank} ends its process, as it cannot release a "
            f"failed run of {self._context.plan.program.name}: {error}. A thread of this process "
            "waits in the driver behind that run, as in .cpu(), empty_cache() or a launch into a "
            f"full queue, or all streams share one queue. The run failed with\n{self.failure}\n"
            "Stacks of the threads of this process:"
        )

    def fail(self, error: BaseException) -> None:
        """Keeps the error, tells the peers, and ends what waits for them, if anything does."""
        if not self._teams:
            return
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self._failed_at = error, time.monotonic()
        for team, resets in self._resets:
            if team.resets == resets:
                with contextlib.suppress(TeamError):  # released by now
                    team.control.fail(error)
        engine = self._engine()
        with contextlib.suppress(BackendError), uncollected():  # of a device that is past asking
            if engine is not None and not self.idle:
                engine.release()

    def hear(self) -> None:
        """Asks for failures that `look` has not come to."""
        for team, resets in self._resets:
            found = team.control.failure() if team.resets == resets else None
            if found is not None:
                self.fail(found)

    def _end_backends(self) -> None:
        """Aborts the communicators, when it may: Note [Aborts] in nccl.py."""
        if self._aborting or not self.backends or self.failure is None:
            return
        sharers = self._sharers()
        for other in sharers:
            other.fail(self.failure)
        issuing = any(other.issuing for other in sharers)
        if issuing and time.monotonic() - self._failed_at < PATIENCE_S:
            return
        with self._lock:
            if self._aborting:
                return
            self._aborting = True
        self._aborts = abort(self.backends)

    def _sharers(self) -> list[Watched]:
        """All that use a backend of this one's, itself among them."""
        mine = set(map(id, self.backends))
        others = [w for w in watchdog().all() if w is not self]
        return [self, *(w for w in others if not mine.isdisjoint(map(id, w.backends)))]

    def finish(self) -> None:
        """Returns when all that was issued has ended; raises what failed."""
        engine = self._engine()
        if engine is not None and self.failure is None:
            engine.finish_unmarked()
        del engine
        pause = 20e-6
        while not self.idle and self.failure is None:
            if self.past:  # the watchdog, which bounds this loop, looks at it no more
                raise TeamError("runs were under way when their team was reset or released")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)
        if self.failure is None and not self.past:
            self.hear()
        if self.failure is not None:
            self.settle()
            if not self.mended:
                raise self.failure

    def settle(self) -> None:
        """Gives what was issued some time to end."""
        deadline = time.monotonic() + GRACE_S
        while not (self.idle and self._aborted()) and time.monotonic() < deadline:
            with contextlib.suppress(BackendError):  # what failed is raised, not that this did
                self.look()
            time.sleep(0.002)

    def _aborted(self) -> bool:
        """True if no abort is under way. NCCL waits for the graphs that it is in, of any engine."""
        if not self._aborting:
            return True
        for other in self._sharers():
            engine, free = other._engine(), other.idle and not other.issuing
            if engine is not None and engine.graphs is not None and free:
                engine.graphs.drop()
        return self._aborts is not None and all_ended(self._aborts, 0)


class Watchdog:
    """The thread, and what it looks at."""

    def __init__(self) -> None:
        self._watched: weakref.WeakValueDictionary[int, Watched] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._leaving = threading.RLock()  # the garbage collector may end an Executor in it
        self._later: list[tuple[Watched, Callable[[], None]]] = []

    def add(self, watched: Watched) -> None:
        self._watched[id(watched)] = watched

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._live, name="interlace watchdog", daemon=True
                )
                self._thread.start()

    def drop(self, watched: Watched) -> None:
        """Looks at this no more; the garbage collector may call it at any moment."""
        self._watched.pop(id(watched), None)

    def all(self) -> list[Watched]:
        return [found for ref in self._watched.valuerefs() if (found := ref()) is not None]

    def later(self, watched: Watched, end: Callable[[], None]) -> None:
        """Calls `end` once nothing of it is under way any more, and looks at it until then."""
        self._later.append((watched, end))

    def leave(self) -> None:
        """Tells each team that its runs up to here are over, where they are. A thread that enters a
        run is `issuing` before it does, so none is missed."""
        teams = {id(team): team for watched in self.all() for team in watched._teams}
        with self._leaving:
            runs = [(team, team.control.run) for team in teams.values() if team.is_set_up]
            busy = {id(t) for w in self.all() if not w.at_rest for t in w._teams}
            for team, run in runs:
                if id(team) not in busy and team.is_set_up:
                    team.control.leave(run)

    def _live(self) -> None:
        relax_captures()  # else a look at an event would end a capture of the user's
        while True:
            time.sleep(PERIOD_S)
            with contextlib.suppress(Exception):  # kept by those that failed
                self.once()

    def once(self) -> None:
        for watched in self.all():
            try:
                watched.look()
            except Exception as error:
                if watched.past:  # by now: its teams' memory went while it was looked at
                    self.drop(watched)
                    continue
                with contextlib.suppress(Exception):
                    if isinstance(error, InterlaceError):
                        watched.fail(error)
                    else:
                        watched.fail(CommTimeoutError(f"the watchdog failed: {error!r}"))
            finally:
                del watched
        for kept in list(self._later):
            with contextlib.suppress(Exception):  # of a device that is past asking: it stays
                if kept[0].idle:
                    self._later.remove(kept)
                    _apart(kept[1])
        self.leave()


def _apart(end: Callable[[], None]) -> None:
    """Calls it in a thread of its own: it may wait in the driver behind a run that stalls."""

    def act() -> None:
        with contextlib.suppress(Exception):
            relax_captures()
        with contextlib.suppress(Exception):
            end()

    try:
        threading.Thread(target=act, name="interlace end", daemon=True).start()
    except RuntimeError:  # there is no room for one
        act()


def end_process(report: str) -> None:
    """Ends this process at once, with a report and every thread's stack on stderr."""
    with contextlib.suppress(Exception):  # of a stderr that is closed, or is no file
        print(report, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
    os._exit(EXIT_CODE)


def stalled(engine: CudaEngine, context: EngineContext, ended: int) -> str:
    """Which ranks the run after `ended` waits for, and where they are."""
    limit, teams, behind = context.timeout_s, context.resources.teams, engine.entered - ended - 1
    try:
        lines, place = _awaited(engine, context, behind), "in a collective or a computation"
    except BackendError as error:
        lines, place = [], f"and its signals cannot be read ({error})"
    if not lines:
        lines.append(
            f"no progress in {limit:g} s: rank {context.plan.rank} in "
            f"{context.plan.program.name}, {place}"
        )
        others = [(t, [i for i in range(t.size) if i != t.me]) for t in teams.values()]
        lines += [team.control.where(members) for team, members in others if members]
    return "\n".join(lines)


def _awaited(engine: CudaEngine, context: EngineContext, behind: int) -> list[str]:
    """The signals that are missing of a run with `behind` others behind it, and from whom."""
    limit, teams = context.timeout_s, context.resources.teams
    lines: list[str] = []
    missing: dict[str, set[int]] = {}
    awaited = [
        (index, level)
        for index, op in enumerate(context.plan.program.ops)
        for step in op.steps
        if (level := step.ordering().expects) is not None
    ]
    for index, item in awaited:
        space: Any = engine.spaces[item.team]
        base = space.base - behind * space.span
        late = [
            member
            for member in context.plan.members(item.team, item.peer)
            if not reached(space.value(item.signal, member), base + item.value)
        ]
        if late:
            missing.setdefault(item.team, set()).update(late)
            if not lines:
                lines.append(f"no progress in {limit:g} s: {context.flight.describe(index)}")
    for name, late in missing.items():
        lines.append(teams[name].control.where(sorted(late)))
    for side in engine.sides:
        late = side.late(behind)
        if late:
            ranks = side.team.ranks
            lines.append(f"{named([ranks[i] for i in late])} did not end the run before last")
    return lines


@cache
def watchdog() -> Watchdog:
    return Watchdog()


def synchronize() -> None:
    """Returns when every run of every CUDA Executor of this process has ended.

    Results on GPUs are proved valid only after it. The wait is bounded by each Executor's time-out.

    Raises:
        CommTimeoutError, PeerError, AgreementError: a run failed.
    """
    dog = watchdog()
    for watched in dog.all():
        try:
            watched.finish()
        finally:
            if watched.gone:  # told once
                dog.drop(watched)
    dog.leave()
