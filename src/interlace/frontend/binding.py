"""From a serial Program to one that runs: lower, agree with the other ranks, bind to storage.

    bound = bind("forward", imported, groups={"tp": group}, options=options)
    outputs = bound.run(args)

With the option `schedules` the overlapped Program is a file's text (schedules.py). Else ranks agree
on what they choose by, and choose once (choosing.py). Where they hold uneven shards their Programs
differ; then the Executor proves the set of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from interlace.comm import team_of
from interlace.cost import Machine, Timeline
from interlace.errors import InterlaceError, SoundnessError
from interlace.frontend.choosing import chosen, facts_of_all
from interlace.frontend.importing.importer import Imported
from interlace.frontend.schedules import path_of, scheduled, unsound
from interlace.ir import Program, Remark
from interlace.ir.call_names import others
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.hosts import on_hosts
from interlace.runtime.machine import machine_for
from interlace.runtime.prepare.agreement import Agreement
from interlace.verify import Report


@dataclass(frozen=True, slots=True)
class Bound:
    """One graph for one signature: its Programs, and what runs them."""

    kind: str
    """`forward`, `backward` or `inference`."""
    imported: Imported
    executor: Executor
    machine: Machine
    """The model that its strategies were chosen by."""
    profiled: list[Timeline] = field(default_factory=list[Timeline])
    """The last timeline that `Compiled.profile` measured of it, if any."""
    about_sizes: list[str] = field(default_factory=list[str])
    """Why it was bound although others of its graph were, and why for one size alone."""
    at: dict[str, int] = field(default_factory=dict[str, int])
    """TorchDynamo's symbols as it was bound, where the graph has some."""
    kept: list[int] = field(default_factory=list[int])
    """Places of results by which `Forwards.note` keeps a pass's number; empty before the first."""

    @property
    def serial(self) -> Program:
        """The Program as it was imported."""
        return self.imported.program

    @property
    def program(self) -> Program:
        """The overlapped Program."""
        return self.executor.program

    @property
    def measured(self) -> Timeline | None:
        """The last run that was recorded: with the option `trace`, or by `Compiled.profile`."""
        if self.executor.options.trace and self.executor.engine is not None:
            timeline = self.executor.timeline()
            return timeline if timeline.spans else None
        return next(iter(self.profiled), None)

    @property
    def report(self) -> Report:
        """The verifier's report of the overlapped Program, with those of the other ranks."""
        return self._agreement.report

    @property
    def programs(self) -> tuple[Program, ...]:
        """The overlapped Program that all ranks run, or each rank's own where these differ."""
        return self._agreement.programs(self.program, self.executor.rank)

    @property
    def _agreement(self) -> Agreement:
        assert self.executor.agreement is not None
        return self.executor.agreement

    def fits(self, values: Mapping[str, int]) -> bool:
        """Returns True if these values of TorchDynamo's symbols are in its class of sizes.

        A Program for one size alone fits where all symbols are unchanged: its peers' Programs may
        name others of them, such as a global size, and all ranks must find theirs, or none.
        """
        sizes = self.executor.sizes
        return dict(values) == self.at if sizes == sizes.alone() else sizes.holds(self._own(values))

    def _own(self, values: Mapping[str, int]) -> dict[str, int]:
        return {name: values[symbol] for name, symbol in self.imported.symbols.items()}

    def run(
        self,
        args: Sequence[Any],
        values: Mapping[str, int] | None = None,
        origin: str | None = None,
    ) -> list[Any]:
        """The graph's outputs for its arguments; `values` has those of TorchDynamo's symbols, if
        there are any; `origin` is as in `Executor.run`, None for no backward."""
        given = self.imported.gather(args)
        sizes = None if values is None else self._own(values)
        results = self.executor.run(given, sizes=sizes, origin=origin)
        return self.imported.scatter(results, args)


def bind(
    kind: str,
    imported: Imported,
    groups: Mapping[str, ProcessGroup],
    options: Options,
    device: str = "cpu",
    layer: Mapping[str, Any] | None = None,
) -> Bound:
    """Lowers and prepares; all ranks of the Program do it together. `layer` has what else must be
    the same on all of them."""
    place = placed(device)
    options, noted = with_regions(options, place)
    plain = imported.program
    imported = dataclasses.replace(imported, program=on_hosts(plain, groups, options.time_out_s))
    agreed = facts_of_all(imported.program, groups, options, _machine(options, place.type), layer)
    spread = [team.name for team in imported.program.teams if team.hosts is not None]
    apart = [team_of(groups[name], name).apart for name in spread]
    noted += [Remark("frontend", f"{text}: {UNSERVED}") for text in apart]
    if options.graph and (why := _uncaptured(imported)):
        options = dataclasses.replace(options, graph=False, static_outputs=False)
        noted.append(Remark("frontend", f"not captured in CUDA graphs: {why}"))
    program = written = scheduled(kind, imported.program, groups, options)
    if program is None:
        program, why = chosen(imported.program if options.overlap else plain, agreed, options)
        noted += why
    else:
        noted.append(Remark("frontend", "its text is a file of the option schedules"))
    executor = Executor(
        program.remarked(noted),
        groups=groups,
        device=place,
        options=options,
        host=imported.host,
        operators=others(imported.program),  # of this process's own graph
    )
    try:
        executor.prepare()
    except SoundnessError as error:
        if written is None:
            raise
        raise unsound(path_of(kind, imported.program, options), written, error, options) from None
    return Bound(kind, imported, executor, agreed.machine)


def _machine(options: Options, device: str) -> Machine | InterlaceError:
    """Returns the Machine that this rank chooses by; or the error, for the other ranks to hear."""
    try:
        return machine_for(options, device)
    except InterlaceError as error:
        return error


UNSERVED = "peer, fused and exchange, which reach into memory of peers, do not serve it"


def _uncaptured(imported: Imported) -> str:
    """Why a graph of it would be wrong, or one of too many; empty: there may be one."""
    if imported.host:
        held = min(imported.host)
        return f"{held} is on the CPU, and a graph would keep the value that it has now"
    if not imported.program.sizes.sizes:
        return ""
    return "its sizes change, and as many of them have graphs as may have"


def placed(device: str) -> torch.device:
    """A device with its index: a GPU that has none named is the current one."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def with_regions(options: Options, device: torch.device) -> tuple[Options, list[Remark]]:
    """The options with `regions` chosen: Inductor on a GPU, where its compiler is there."""
    if options.regions != "auto":
        return options, []
    if device.type == "cpu":
        return dataclasses.replace(options, regions="eager"), []
    if importlib.util.find_spec("triton") is None:
        why = "regions run eager: Inductor needs the package triton on a GPU, and there is none"
        return dataclasses.replace(options, regions="eager"), [Remark("frontend", why)]
    return dataclasses.replace(options, regions="inductor"), []
