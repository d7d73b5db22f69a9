"""Seeing what was compiled: the Programs behind a `torch.compile`d model.

    with interlace.frontend.capture() as captured:
        model(x).sum().backward()
    for program in captured.programs:
        print(program)

Only what is compiled inside the block is seen; call `torch.compiler.reset()` first to see it all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from interlace.frontend.artefact import Artefact
from interlace.frontend.binding import Bound
from interlace.frontend.explain import explain
from interlace.ir import Program


@dataclass(slots=True)
class Captured:
    """The compiled graphs, in the order in which they were compiled."""

    artefacts: list[Artefact] = field(default_factory=list)

    @property
    def bound(self) -> list[Bound]:
        """Every bound Program with its proof and its Executor."""
        return [bound for artefact in self.artefacts for bound in artefact.bound]

    @property
    def programs(self) -> list[Program]:
        """The overlapped Programs: forward and backward of each graph."""
        return [bound.program for bound in self.bound]

    def explain(self) -> str:
        """Each communication with its strategy, the reason and the gain that is predicted."""
        return explain(self.bound)


_CAPTURING: ContextVar[tuple[Captured, ...]] = ContextVar("interlace_capturing", default=())


@contextmanager
def capture() -> Iterator[Captured]:
    """Collects what the `interlace` backend compiles inside the block."""
    captured = Captured()
    token = _CAPTURING.set((*_CAPTURING.get(), captured))
    try:
        yield captured
    finally:
        _CAPTURING.reset(token)


def notice(artefact: Artefact) -> None:
    """Tells every `capture` around about a compiled graph."""
    for captured in _CAPTURING.get():
        captured.artefacts.append(artefact)
