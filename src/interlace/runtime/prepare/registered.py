"""The tensors that a caller registers with an Executor, checked before they are shared.

found = collect(program, rank, {"w": w}, device)
found.wanted["tp"]["w"]          # the tensor, and its bytes
found.problem                    # what is wrong: told to all ranks that agree on the Program

Note [Verdicts that all share]
    What is wrong on one rank must stop all, and before anything is allocated. So each tells what it
    found while the ranks agree on the Program.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from interlace.errors import ExecutorError, InterlaceError
from interlace.ir import Buffer, Program
from interlace.runtime.inputs import Parameters
from interlace.runtime.values import nbytes

Wanted = dict[str, dict[str, tuple[torch.Tensor, int]]]
"""Tensor by team and name, with its bytes from the first element to the end of the last."""


@dataclass(frozen=True, slots=True)
class Registration:
    wanted: Wanted = field(default_factory=dict[str, dict[str, tuple[torch.Tensor, int]]])
    problem: InterlaceError | None = None


def collect(
    program: Program, rank: int, given: Mapping[str, torch.Tensor], device: torch.device
) -> Registration:
    """Tensors that a Program registers, by team; and the fault of the given ones, if any."""
    if not given and not any(buffer.registered for buffer in program.params):
        return Registration()
    program = program.instantiate(rank) if program.rank is None else program
    buffers = [buffer for buffer in program.params if buffer.registered]
    wanted: Wanted = {}
    try:
        _check(program, buffers, given, device)
    except InterlaceError as error:
        return Registration(problem=error)
    for buffer in buffers:
        assert buffer.team is not None
        wanted.setdefault(buffer.team, {})[buffer.name] = given[buffer.name], nbytes(buffer)
    return Registration(wanted)


def written(program: Program) -> frozenset[str]:
    """The registered parameters that a Program writes, of its own rank or of peers."""
    names = {buffer.name for buffer in program.params if buffer.registered}
    return frozenset(names & {a.view.buffer for op in program.ops for a in op.writes()})


def _check(
    program: Program, buffers: list[Buffer], given: Mapping[str, torch.Tensor], device: torch.device
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
    for name in names:
        if isinstance(given[name], torch.Tensor):  # else the next check refuses it
            _check_memory(program, name, given[name], name in written(program))
    Parameters(program.name, "registered parameter", buffers, device).check(
        [given[n] for n in names]
    )
    extents = sorted((given[b.name].data_ptr(), nbytes(b), b.name) for b in buffers if nbytes(b))
    for (start, size, one), (after, _, other) in itertools.pairwise(extents):
        if start + size > after:
            raise ExecutorError(
                f"the registered parameters {one!r} and {other!r} of {program.name} overlap: give "
                "each memory of its own"
            )


def _check_memory(program: Program, name: str, tensor: torch.Tensor, changed: bool) -> None:
    """Raises ExecutorError unless it is a plain tensor with memory of its own, which may change."""
    what = f"the registered parameter {name!r} of {program.name}"
    if type(tensor.detach()) is not torch.Tensor:  # a Parameter on its way arrives by that
        raise ExecutorError(
            f"{what} is a {type(tensor).__name__}, whose memory is not its own: register the plain "
            "tensor inside (of a DTensor: .to_local())"
        )
    if changed and tensor.is_inference():
        raise ExecutorError(
            f"{what} is written, and was made in inference mode: make it outside, or clone it there"
        )
