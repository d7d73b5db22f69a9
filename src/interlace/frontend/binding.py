"""From a serial Program to one that runs: lower, agree with the other ranks, bind to storage.

    bound = bind("forward", imported, groups={"tp": group}, options=options)
    outputs = bound.run(args)

Where the ranks hold uneven shards their Programs differ; then the Executor proves the set of them.
A set whose overlapped Programs do not fit together runs serially, and a remark says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from interlace.cost import Machine, default_machine
from interlace.errors import AgreementError, ProgramError, SoundnessError
from interlace.frontend.imported import Imported
from interlace.ir import Program, Remark
from interlace.options import Options
from interlace.passes import add_remarks, lower
from interlace.runtime import Executor
from interlace.verify import Report, check


@dataclass(frozen=True, slots=True)
class Bound:
    """One graph for one signature: its Programs, and what runs them."""

    kind: str
    """`forward`, `backward` or `inference`."""
    imported: Imported
    executor: Executor

    @property
    def serial(self) -> Program:
        """The Program as it was imported."""
        return self.imported.program

    @property
    def program(self) -> Program:
        """The overlapped Program."""
        return self.executor.program

    @property
    def report(self) -> Report:
        """The verifier's report of the overlapped Program."""
        return check(self.program)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The graph's outputs for its arguments."""
        return self.imported.scatter(self.executor.run(self.imported.gather(args)), args)


def machine_for(options: Options, device: str) -> Machine:
    """The machine model that the options name, or the built-in one of the device."""
    if options.calibration is not None:
        return Machine.load(options.calibration)
    return default_machine(device)


def bind(
    kind: str,
    imported: Imported,
    groups: Mapping[str, ProcessGroup],
    options: Options,
    device: str = "cpu",
) -> Bound:
    """Lowers and prepares; all ranks of the Program do it together."""
    machine = machine_for(options, device)
    if options.regions == "auto":
        chosen = "eager" if device == "cpu" else "inductor"
        options = dataclasses.replace(options, regions=chosen)

    def prepared(options: Options, remarks: Sequence[Remark] = ()) -> Executor:
        program = add_remarks(lower(imported.program, options, machine), remarks)
        executor = Executor(program, groups=groups, device=device, options=options)
        executor.prepare()
        return executor

    try:
        return Bound(kind, imported, prepared(options))
    except AgreementError as error:
        if not (options.overlap and isinstance(error.__cause__, SoundnessError | ProgramError)):
            raise
        why = (
            "the ranks' Programs differ, and overlapped they do not fit together: it runs serially"
        )
        serially = dataclasses.replace(options, overlap=False)
        return Bound(kind, imported, prepared(serially, [Remark("frontend", why)]))
