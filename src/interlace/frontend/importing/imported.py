"""What the import of a graph gives: a Program, and how the graph's calls map to its runs.

    results = executor.run(imported.gather(args))
    outputs = imported.scatter(results, args)

A Program takes tensors; a graph also takes meshes and numbers, and may return them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.ir import Program
from interlace.runtime.copies import resolved


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument of the graph that is no tensor and no number, such as a DeviceMesh."""

    position: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """An output that is no tensor and the same in every call, such as a DTensor's DeviceMesh."""

    value: Any


@dataclass(frozen=True, slots=True)
class Imported:
    """A Program, and how a graph's arguments and outputs map to its parameters and results."""

    program: Program
    inputs: tuple[int, ...]
    """Positions of the graph's arguments that are the Program's first parameters."""
    constants: tuple[torch.Tensor, ...]
    """Tensors of the graph itself: the parameters after those."""
    outputs: tuple[int | Opaque | Fixed, ...]
    """For each output of the graph: the result of that index, or what is handed through."""

    host: frozenset[str] = frozenset()
    """Buffers on the CPU although the Program runs on a GPU: see devices.py."""
    static: frozenset[str] = frozenset()
    """Parameters that have the same addresses in every run, as a rule."""

    direct: bool = False
    """Whether the outputs are the results, one for one and in order."""

    lazy: tuple[int, ...] = ()
    """Inputs that may come conjugated or negated only by a mark, which an Executor refuses."""

    def gather(self, args: Sequence[Any]) -> list[Any]:
        """The Program's inputs, from the graph's arguments."""
        given = [*(args[position] for position in self.inputs), *self.constants]
        for index in self.lazy:
            given[index] = resolved(given[index])
        return given

    def scatter(self, results: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The graph's outputs, from the Program's results and the graph's arguments."""

        if self.direct:
            return list(results)

        def output(place: int | Opaque | Fixed) -> Any:
            match place:
                case Opaque(position):
                    return args[position]
                case Fixed(value):
                    return value
                case _:
                    return results[place]

        return list(map(output, self.outputs))
