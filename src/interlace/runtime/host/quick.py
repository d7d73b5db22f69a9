"""One run on the CPU of a Program of one stream and no teams, with as little of Python as can be.

    steps = engine.alone()               # None: it has more to order than that
    run = Quick(engine, steps, inputs, outputs, results)
    (y,) = run.run([x, w], None)         # None: the Executor has to look at something first

Nothing waits there and nobody else looks: the ops are called one after another, and which one
raised is known by how many are left. The rest is as in the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Use
from interlace.errors import ExecutorError
from interlace.ir import Alloc, Call, Copy, Free
from interlace.runtime.inputs import Given
from interlace.runtime.results import Results

if TYPE_CHECKING:
    from interlace.runtime.host.engine import CpuEngine, Step


def is_plain(step: Step) -> bool:
    """Whether it computes, and orders nothing."""
    return isinstance(step.op, Call | Copy | Alloc | Free)


NO_USES: Mapping[str, Use] = MappingProxyType({})


class Quick:
    """Issues runs of one engine."""

    def __init__(
        self,
        engine: CpuEngine,
        steps: Sequence[Step],
        inputs: Given,
        outputs: Given,
        results: Results,
    ) -> None:
        context = engine.context
        self._engine, self._steps = engine, steps
        self._inputs, self._outputs, self._results = inputs, outputs, results
        self._runs = [step.run for step in steps]
        self._limit = context.time_out_s
        self._name, self._end = context.plan.program.name, context.values.end
        self._start = context.values.starter((*inputs.names, *outputs.names))
        self._lock = threading.Lock()
        self._grad: Callable[[bool], None] = torch._C._set_grad_enabled  # pyright: ignore

    def run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...] | None:
        """A run, and its results; None, with nothing done, where the Executor has to look first."""
        if self._inputs.fit(inputs) and (out is None or self._outputs.fit(out)):
            return self.issue(inputs, out)
        return None

    def issue(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> tuple[Any, ...] | None:
        """`run`, once the Executor has looked at all that there may be to look at."""
        lock = self._lock
        if not lock.acquire(False) and not lock.acquire(True, self._limit):
            raise ExecutorError(
                f"{self._name} waited {self._limit:g} s for another thread's run: call Executors "
                "from one thread"
            )
        had_grad = torch.is_grad_enabled()
        left = iter(self._runs)
        try:
            if had_grad:
                self._grad(False)
            if out is None:
                out = self._outputs.new()
            self._start((*inputs, *out), NO_USES)
            for run in left:
                run()
            return self._results()
        except BaseException as error:
            raise self._explained(error, left)  # noqa: B904
        finally:
            self._end()
            if had_grad:
                self._grad(True)
            lock.release()

    def _explained(self, error: BaseException, left: Iterator[Any]) -> BaseException:
        """The error as the user should see it; the last step that is not left raised it."""
        done = len(self._steps) - length_hint(left)
        return self._engine.explain(error, self._steps[done - 1] if done else None)
