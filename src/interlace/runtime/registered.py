"""The tensors that a caller registers with an Executor, checked before they are shared.

wanted, problem = collect(plan, {"w": w}, device)     # what is wrong, every rank will raise
wanted["tp"]["w"]                                     # the tensor, and its bytes
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from interlace.errors import ExecutorError, InterlaceError
from interlace.ir import Buffer, Program
from interlace.runtime.inputs import Given
from interlace.runtime.plan import Plan
from interlace.runtime.values import nbytes

Wanted = dict[str, dict[str, tuple[torch.Tensor, int]]]
"""By team and name: the tensor, and its bytes from the first element to the end of the last."""


def collect(
    plan: Plan, given: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[Wanted, InterlaceError | None]:
    """What a Program registers, by team; and what is wrong with what was given, if anything is."""
    buffers = [buffer for buffer in plan.program.params if buffer.registered]
    wanted: Wanted = {}
    for buffer in buffers:
        assert buffer.team is not None
        of_team = wanted.setdefault(buffer.team, {})
        if buffer.name in given:
            of_team[buffer.name] = given[buffer.name], nbytes(buffer)
    try:
        _check(plan.program, buffers, given, device)
    except InterlaceError as error:
        return wanted, error
    return wanted, None


def written(program: Program) -> frozenset[str]:
    """The registered parameters that a Program writes, of its own rank or of peers."""
    names = {buffer.name for buffer in program.params if buffer.registered}
    return frozenset(names & {a.view.buffer for op in program.ops for a in op.writes()})


def _check(
    program: Program,
    buffers: list[Buffer],
    given: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    names = [buffer.name for buffer in buffers]
    for name in names:
        if name not in given:
            raise ExecutorError(
                f"{program.name} has the registered parameter {name!r}, and the Executor was given "
                f"no tensor for it: make it with registered={{{name!r}: tensor}}"
            )
    for name in given:
        if name not in names:
            raise ExecutorError(
                f"{program.name} has no registered parameter {name!r}: it has {names or 'none'}; "
                f"declare one as {name}: f32[8, 4].registered(tp)"
            )
    wanted = Given(program.name, "registered parameter", buffers, device)
    wanted.check([given[n] for n in names])
    extents = [
        (tensor.data_ptr(), tensor.data_ptr() + nbytes(buffer), buffer.name)
        for buffer in buffers
        if (tensor := given[buffer.name]).numel()
    ]
    changed = written(program)
    for start, end, name in extents:
        for other_start, other_end, other in extents:
            if name < other and start < other_end and other_start < end:
                if {name, other} & changed:
                    raise ExecutorError(
                        f"the registered parameters {name!r} and {other!r} of {program.name} "
                        "overlap, and one of them is written: give each memory of its own"
                    )
