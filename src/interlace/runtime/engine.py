"""The seam between the Executor, which is the same everywhere, and what runs ops on a device.

A device has one `Engine`: it binds the ops of a plan to that device's streams and runs them.
Another device adds a file with its engine and a line to `executor_for`; the Executor does not
change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from interlace.comm import Slot, TeamComm, Use, Wait, Workspace
from interlace.errors import BackendError, UnsupportedError
from interlace.ir import Op
from interlace.options import Options
from interlace.runtime.flight import Flight
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.values import Values

if TYPE_CHECKING:
    from interlace.runtime.inputs import Given
    from interlace.runtime.results import Results

BeforeOp = Callable[[int, int, Op], None]
"""Called as (rank, index, op) before each op, on its stream: delays and faults for tests."""


@dataclass(frozen=True, slots=True)
class Crew:
    """What a rank's Program shares with other ranks."""

    teams: Mapping[str, TeamComm]
    slots: Mapping[str, Slot]
    """By the name of the buffer that takes it."""
    spaces: Mapping[str, Workspace]
    """By team."""
    backends: Mapping[tuple[str, str], Any]
    """By team and name of the backend."""
    uses: dict[str, Use]
    """The takes of the run under way, by buffer."""
    graph_spaces: tuple[Mapping[str, Any], ...] = ()
    """On CUDA, by team: the words of the graph of even runs, and of odd ones."""


@dataclass(frozen=True, slots=True)
class Context:
    """All that an engine binds from."""

    plan: Plan
    values: Values
    crew: Crew
    options: Options
    device: torch.device
    flight: Flight
    time_out_s: float
    """The option, or what it follows."""
    before_op: BeforeOp | None = None

    def wait(self, index: int, check: Callable[[], None], member: int | None = None) -> Wait:
        """How op `index` waits (or, if it is a Fused, one of its members)."""
        return Wait(
            self.time_out_s,
            lambda: self.flight.describe(index, member),
            check,
            self.flight.tail,
        )


def unbound(op: Op, device: str) -> UnsupportedError:
    """The error of a binder for an op that it has no case for."""
    return UnsupportedError(
        f"{device} has no binding for the op {type(op).__name__}"
        f"{f' ({op.loc})' if str(op.loc) else ''}: add a case to the device's binder"
    )


class Engine(Protocol):
    """Runs a bound Program on one device."""

    spans: list[tuple[int, float, float]]
    """With the option `trace`: op, start and end of each op of the last run, in seconds."""

    def __init__(self, context: Context) -> None:
        """Binds every op."""
        ...

    def run(self) -> None:
        """One run: returns when all streams are done, raises what made one fail."""
        ...

    def close(self) -> None:
        """Ends threads and gives back what the engine holds."""
        ...


def executor_for(device: torch.device | str) -> type[Engine]:
    """The engine of a device."""
    kind = torch.device(device).type
    if kind == "cpu":
        from interlace.runtime.host.engine import CpuEngine  # which imports this file

        return CpuEngine
    if kind == "cuda":
        from interlace.runtime.cuda.engine import CudaEngine  # which needs the CUDA driver

        return cast("type[Engine]", CudaEngine)
    raise BackendError(f"there is no executor for {kind!r} devices yet: choose device='cpu'")


@dataclass(frozen=True, slots=True)
class Door:
    """What an Executor's runs go in by."""

    tag: int
    """The Program's, the same on all ranks."""
    peer_text: Callable[[int], str] | None
    """Tells the ops of peers by index, where they are the same as this rank's."""


Ends = tuple["Given", "Given", "Results"]


def runner_for(device: torch.device, engine: Any, ends: Ends, door: Door) -> Any:
    """What issues the runs of an engine quicker than the Executor does; None where nothing does.

    `ends` is what the Program takes, fills and returns.
    """
    if device.type == "cuda":
        from interlace.runtime.cuda.runner import runner_of

        return runner_of(engine, *ends, door.tag)
    from interlace.runtime.host.flat import Flat
    from interlace.runtime.host.quick import Quick

    steps = engine.alone()
    if steps is None or engine.context.values.registered:
        return None
    if engine.context.crew.teams:
        return Flat(engine, steps, *ends, door)
    return Quick(engine, steps, *ends)
