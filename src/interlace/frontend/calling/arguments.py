"""Arguments of a graph: those of its Program, their signature, and those that torch would take for
what they are not.

    key = signature(args)                       # what a Program depends on
    inputs = [args[position] for position in imported.inputs]
    results = executor.run(imported.completed(inputs))  # the graph's outputs: `Bound.run`

DTensor hands out `AsyncCollectiveTensor`s, which wait when they are first used. AOTAutograd takes
them for a subclass of its own kind and loses their gradient's way back, so they become plain
tensors first, with their gradient passed through:

    example_inputs, wrap = without_waiting(example_inputs)
    compiled = wrap(compile(gm, example_inputs))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.ir import Program
from interlace.runtime.engine import GraphUse
from interlace.runtime.values import resolved
from interlace.torch_private.distributed import AsyncCollectiveTensor, functional


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument of the graph that is no tensor and no number, such as a DeviceMesh."""

    position: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """An output that is no tensor and the same in every call, such as a DTensor's DeviceMesh."""

    value: object


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
    """Buffers on the CPU although the Program runs on a GPU: see types.py."""
    lazy: tuple[int, ...] = ()
    """Inputs that may come conjugated or negated only by a mark, which an Executor refuses."""
    awaited: tuple[int, ...] = ()
    """Inputs that the graph waits for: a caller's collective may be at them."""

    graph_use: GraphUse = field(default_factory=GraphUse)
    """Facts for CUDA graphs."""

    symbols: Mapping[str, str] = field(default_factory=dict[str, str])
    """TorchDynamo's symbol for each named size of the Program."""

    completes: bool = field(init=False, compare=False)
    """True if `completed` does something."""
    others: tuple[Opaque | Fixed, ...] = field(init=False, compare=False)
    """Outputs of the graph that are no results of the Program."""
    places: tuple[int, ...] = field(init=False, compare=False)
    """For each output of the graph: its place in the results with the others behind them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "completes", bool(self.awaited or self.constants or self.lazy))
        others = tuple(each for each in self.outputs if not isinstance(each, int))
        object.__setattr__(self, "others", others)
        behind = iter(range(-len(others), 0))
        places = [each if isinstance(each, int) else next(behind) for each in self.outputs]
        object.__setattr__(self, "places", tuple(places))

    def completed(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """All of the Program's inputs, from those among the graph's arguments."""
        for index in self.awaited:
            functional.wait_tensor.default(inputs[index])
        inputs += self.constants
        for index in self.lazy:
            inputs[index] = resolved(inputs[index])
        return inputs


def signature(args: Sequence[object]) -> Hashable:
    """Facts of arguments that a Program depends on: sizes, strides, element types, numbers.

    The stride of a dimension of size 1, or of a tensor without elements, has no meaning, and may
    differ between calls and ranks.
    """
    return tuple(
        (arg.shape, strides_of(arg), arg.dtype)
        if isinstance(arg, torch.Tensor)
        else (arg if isinstance(arg, bool | int | float) else None)
        for arg in args
    )


def strides_of(arg: torch.Tensor) -> tuple[int, ...]:
    shape, strides = arg.shape, arg.stride()
    if 0 in shape:
        return (0,) * len(shape)
    if 1 in shape:
        return tuple(0 if size == 1 else s for size, s in zip(shape, strides, strict=True))
    return strides


Call = Callable[..., Sequence[object]]
"""A compiled graph with the arguments that TorchDynamo hands it."""
Wrap = Callable[[Call], Call]


class _Wait(torch.autograd.Function):
    """The tensor that the collective gives; its gradient goes to what was waited for."""

    @staticmethod
    def forward(ctx: object, x: AsyncCollectiveTensor) -> torch.Tensor:  # pyright: ignore
        return x.trigger_wait().detach()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return gradient


def without_waiting(example_inputs: Sequence[object]) -> tuple[list[object], Wrap]:
    """The examples as plain tensors, and what makes a function of plain tensors take the others."""
    plain, positions = list(example_inputs), list[int]()
    for i, waiting in enumerate(example_inputs):
        if isinstance(waiting, AsyncCollectiveTensor):
            positions.append(i)
            plain[i] = waiting.elem.detach().requires_grad_(waiting.requires_grad)

    def wrap(compiled: Call) -> Call:
        if not positions:
            return compiled

        def call(*args: object) -> Sequence[object]:
            given = list(args)
            for i in positions:
                if isinstance(given[i], AsyncCollectiveTensor):
                    given[i] = _Wait.apply(given[i])
            return compiled(*given)

        disabled: Any = torch.compiler.disable(call)
        return disabled

    return plain, wrap
