"""One run on the CPU of a Program of one stream whose rank is in a team, with little of Python.

    run = Flat(engine, steps, inputs, outputs, results, door)
    (y,) = run.run([x, w], None)         # None: the Executor has to look at something first

The ops are called one after another on the caller's thread, as the engine would. Peers are told the
same: that this rank entered the run, at which op it is and since when, that it left the run, or
what made it fail. Every wait is the op's own, and bounded as ever.

Note [What a flat run leaves to others]
    Where a peer has failed, a team was reset or released, or a lock is taken, nothing is begun: the
    Executor then goes the long way, which waits for locks, binds anew and raises what is to be
    raised. The flight log is not kept: where this rank is stands in the words that its peers read,
    and messages take it from there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Control
from interlace.comm.control import DONE, PROGRESS, STREAMS
from interlace.errors import ExecutorError
from interlace.ir import VALUE_BITS
from interlace.runtime.engine import Door
from interlace.runtime.host.quick import Quick, is_plain
from interlace.runtime.inputs import Given
from interlace.runtime.results import Results

if TYPE_CHECKING:
    from interlace.runtime.host.engine import CpuEngine, Step


class Flat(Quick):
    """Issues runs of one engine."""

    def __init__(
        self,
        engine: CpuEngine,
        steps: Sequence[Step],
        inputs: Given,
        outputs: Given,
        results: Results,
        door: Door,
    ) -> None:
        super().__init__(engine, steps, inputs, outputs, results)
        crew, plan = engine.context.crew, engine.context.plan
        (self._team,) = crew.teams.values()
        self._resets, self._control = self._team.resets, self._team.control
        self._under_way = False
        """Whether this thread is in a run: the team's lock keeps out only others."""
        self._tag, self._text = door.tag, door.peer_text
        self._uses = crew.uses
        self._takes = [(buffer, crew.slots[buffer]) for buffer in plan.takes]
        self._listed = [
            (PROGRESS + 2 * step.lane if step.proper else 0, step.index, step.run) for step in steps
        ]
        """Where peers read which op this is, if they are told."""
        assert self._listed
        self._orders = not all(map(is_plain, steps))
        self._last = PROGRESS + 2 * steps[-1].lane
        streams = plan.program.streams()
        assert len(streams) <= STREAMS
        engine.flight.follow(functools.partial(stands, self._control, streams))

    def issue(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...] | None:
        """The same; None, with nothing done, also where it cannot be begun at once.

        Whoever has the team's lock already may call it too.
        """
        team, control, clock = self._team, self._control, time.monotonic_ns
        lock = team.lock
        if not lock.acquire(False):
            return None
        if self._under_way or not team.is_as_of(self._resets, control):
            lock.release()
            if self._under_way:  # the lock was this thread's
                raise ExecutorError(f"{self._name} was called in a run of its own: make another")
            return None
        cells, had_grad, left = control.cells, torch.is_grad_enabled(), iter(self._listed)
        self._under_way = True
        try:
            run = control.enter(self._tag, self._name, self._text)
            mark = run << VALUE_BITS
            for buffer, slot in self._takes:
                self._uses[buffer] = slot.next_use()
            if had_grad:
                self._grad(False)
            if out is None:
                out = self._outputs.new()
            if self._orders:
                self._engine.begin_alone()
            self._start((*inputs, *out), self._uses)
            for at, index, issue in left:
                if at:
                    cells[at] = mark | index
                    cells[at + 1] = clock()
                issue()
            results = self._results()
            cells[self._last] = mark | DONE
            control.leave(run)
            return results
        except BaseException as error:
            raise self._explained(error, left)  # noqa: B904
        finally:
            self._end()
            if had_grad:
                self._grad(True)
            self._under_way = False
            lock.release()


def stands(control: Control, streams: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Each stream's op and for how many seconds it has been at it, as the peers see them."""
    return dict(zip(streams, control.progress(len(streams)), strict=True))
