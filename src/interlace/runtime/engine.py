"""The seam between the Executor, which is the same everywhere, and what runs ops on a device.

A device has one `Engine`: it sets up what ranks share there, binds the ops of a plan to that
device's streams, and runs them. Another device adds a file with its engine and a case to
`engine_for`; the Executor does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import (
    BoundedWait,
    Contacts,
    HostsControl,
    Slot,
    TeamComm,
    Use,
    Workspace,
)
from interlace.errors import BackendError, ExecutorError, UnsupportedError
from interlace.ir import Op, Program
from interlace.options import Options
from interlace.runtime.arena import Arena
from interlace.runtime.calling.calls import Outputs, Results
from interlace.runtime.flight import Flight
from interlace.runtime.inputs import Parameters
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.values import ValueTable

if TYPE_CHECKING:
    from interlace.runtime.executor import RunLabel

BeforeOp = Callable[[int, int, Op], None]
"""Called as (rank, index, op) before each op, on its stream: delays and faults for tests."""


@dataclass(frozen=True, slots=True)
class TeamResources:
    """Resources that a rank's Program shares with other ranks."""

    teams: Mapping[str, TeamComm]
    slots: Mapping[str, Slot]
    spaces: Mapping[str, Workspace]
    backends: dict[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    """Backends by team and name; after a reset new ones."""
    uses: dict[str, Use] = field(default_factory=dict[str, Use])
    """The takes of the run under way, by buffer."""
    graph_spaces: tuple[Mapping[str, Any], ...] = ()
    """On CUDA, by team: the words of the graph of even runs, and of odd ones."""


@dataclass(frozen=True, slots=True)
class ShareRequest:
    """Request to `Engine.share`, which all ranks of the teams call together."""

    plan: Plan
    teams: Mapping[str, TeamComm]
    device: torch.device
    graph: bool
    timeout_s: float
    backends: Sequence[tuple[str, str]]
    """Team and name of each backend that a rank of the team needs, in the order of connecting."""
    programs: Callable[[], Sequence[Program]]
    """Returns the Programs of all ranks, as they were proved."""
    kept: ExitStack
    """Closing it gives back what there is, also after an error: slots, words and mappings; nothing
    that used them may be under way."""

    def ordered(self) -> list[tuple[str, TeamComm]]:
        """The teams by name, in an order that all ranks share."""
        return sorted(self.teams.items(), key=lambda item: (item[1].topic, item[0]))

    def refuse_memory(self) -> None:
        """Raises on all ranks of a team that cannot share the memory that the Program shares there:
        of all teams, before some wait for ranks that were refused."""
        for name, team in self.ordered():
            if why := self.plan.shares(name):
                team.refuse_memory(f"{self.plan.program.name} {why}")


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Facts about a Program's caller that CUDA graphs go by."""

    moving: frozenset[str] = frozenset()
    """Inputs that come at any address. The others, as Parameters do, stay where they are."""
    saved: frozenset[int] = frozenset()
    """Results, by number, that the caller keeps beyond the next runs, as for a backward."""
    handed: frozenset[int] = frozenset()
    """Those of `saved` that nobody has but one later run, which may free them."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    plan: Plan
    values: ValueTable
    resources: TeamResources
    options: Options
    device: torch.device
    flight: Flight
    timeout_s: float
    before_op: BeforeOp | None
    inputs: Parameters
    outputs: Parameters
    results: Results
    label: RunLabel
    arena: Arena
    graph_use: GraphUse = field(default_factory=GraphUse)

    def check(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None) -> None:
        """Raises for tensors that are not what a run takes."""
        self.inputs.check(inputs)
        if out is not None:
            self.outputs.check(out)

    def let_go(self) -> None:
        """Lets go of the callers' tensors: a closed engine may wait long for the collector."""
        self.values.sizes.clear()

    def wait(self, index: int, check: Callable[[], None]) -> BoundedWait:
        """Bounded wait of op `index`."""
        return BoundedWait(self.timeout_s, lambda: self.flight.describe(index), check, self.log)

    def wait_for(self, what: str, check: Callable[[], None]) -> BoundedWait:
        """Bounded wait of this rank for something that is no op."""
        name = self.plan.program.name
        return BoundedWait(self.timeout_s, lambda: f"{what} of {name!r}", check, self.log)

    def log(self) -> str:
        """Log of the streams, and of who does not answer in a team that spans hosts: a rank of this
        host may only be late because of them."""
        far: dict[str, None] = {}
        for control, _ in sorted(self.between_hosts(), key=lambda each: -len(each[0].ranks)):
            if not far or control.silent():
                far[control.behind()] = None
        return "\n".join([*far, self.flight.tail()])

    def between_hosts(self) -> list[tuple[HostsControl, Contacts]]:
        """The teams that span hosts, in an order that all ranks share, and whom this rank meets."""
        teams = sorted(self.resources.teams.items(), key=lambda item: item[1].key)
        return [
            (team.control, self.plan.contacts(name))
            for name, team in teams
            if isinstance(team.control, HostsControl)
        ]


def unbound(op: Op, device: str) -> UnsupportedError:
    """The error of a binder for an op that it has no case for."""
    return UnsupportedError(
        f"{device} has no binding for the op {type(op).__name__}"
        f"{f' ({op.loc})' if str(op.loc) else ''}: add a case to the device's binder"
    )


class Engine:
    """A device: the runs of one Program. The Executor asks for nothing else. A device inherits the
    methods that return nothing where it has nothing to do."""

    def __init__(self, context: EngineContext) -> None:
        """Binds every op. Needs no other rank."""
        self.context = context
        self._under_way = False
        """True while a run is being issued."""
        teams = dict.fromkeys(context.resources.teams.values())
        self._teams = [(team, team.resets, team.control) for team in teams]
        self._apart = context.between_hosts()

    @staticmethod
    def share(request: ShareRequest) -> TeamResources:
        """Sets up slots, words and backends; every rank of the teams calls it together."""
        raise NotImplementedError

    def warm_up(self, teams: Sequence[TeamComm]) -> None:
        """Does the work needed once before runs, by all ranks of the teams together."""

    def admit(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None
    ) -> object | None:
        """Returns the `at` of `issue` if a run may begin at once, such as the addresses of the
        tensors; None where the Executor must check the tensors, the device or the teams first."""
        raise NotImplementedError

    def look(self) -> None:
        """Raises where the caller must not run anything now, such as inside of a graph capture."""

    def turn(self, at: Sequence[int]) -> None:
        """Makes the next runs those of these values of the named sizes; raises within a run."""
        if self._under_way:
            raise self.nested()
        self.context.values.sizes.turn(at)

    def issue(
        self,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        at: Any = None,
        boxed: bool = False,
    ) -> Outputs:
        """One run, and its results. The Executor holds the lock, and everything was checked: by
        `admit`, which gave `at`, or (None) by the Executor. With `boxed`, `inputs` is a list, and
        is emptied."""
        raise NotImplementedError

    def nested(self) -> ExecutorError:
        """Error of a run within a run of this engine's own."""
        name = self.context.label.name
        return ExecutorError(f"{name} was called in a run of its own: make another Executor")

    def check_teams(self) -> None:
        """Raises what stopped a rank of a team."""
        for _, _, control in self._teams:
            control.check()

    @property
    def failure(self) -> BaseException | None:
        """Error that made an earlier run fail after it was issued."""

    @property
    def spans(self) -> list[tuple[int, float, float]]:
        """With the option `trace`: op, start and end of each op of the last run, in seconds."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Returns when all runs have ended; raises what made one fail."""

    def settle(self) -> None:
        """Before a reset: ends what is under way."""

    def later(self, end: Callable[[], None]) -> bool:
        """No run begins any more. Whether runs are still under way after a while: `end`, which
        closes this and gives back what they use, is then called behind them."""
        return False

    def close(self) -> None:
        """Ends threads and gives back what the engine holds."""
        raise NotImplementedError


def engine_for(
    device: torch.device | str, graph: bool = False
) -> tuple[type[Engine], torch.device]:
    """The class of the engine of a device, and the device with its index."""
    found = torch.device(device)
    if found.type == "cuda":
        from interlace.runtime.cuda.engine import CudaEngine  # which needs the CUDA driver

        index = torch.cuda.current_device() if found.index is None else found.index
        return CudaEngine, torch.device("cuda", index)
    if found.type != "cpu":
        raise BackendError(
            f"there is no executor for {found.type!r} devices yet: choose device='cpu'"
        )
    if graph:
        raise UnsupportedError(
            "graph=True captures CUDA graphs, and the device is 'cpu': leave the option out there"
        )
    from interlace.runtime.host.engine import CpuEngine  # which imports this file

    return CpuEngine, torch.device("cpu")
