"""Calls of an inference graph without AOTAutograd between, which only takes tensors apart for it.

    results, direct = observed(call, graph, tensors)   # a call, and what it was seen to do
    results = direct(tensors)                             # the same again

AOTAutograd hands a graph what DTensors hold, and makes DTensors of what it gives. It may do more:
write to arguments behind the graph, give out views of them or themselves, merge those that overlap.
One call shows whether it did: here every argument of the graph must be, by identity, an argument or
what one of them holds, every output the graph's own or made of that and no argument, and what else
there is to see (gradient mode, versions of the arguments) as the graph left it. Before the graph it
may have counted versions up, which is done again. All other calls go through AOTAutograd. The call
that compiles shows nothing: what it traced may have left another gradient mode behind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from interlace.frontend.compiled_graph import CompiledGraph


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """An output that is a tensor around others, in the terms of torch's protocol for those."""

    kind: Any
    inner: tuple[str, ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Direct:
    """A graph, where its arguments are found, and what is made of its results."""

    graph: CompiledGraph
    arguments: tuple[tuple[int, str | None], ...]
    """For each of the graph's: the position of the tensor, and the name of what is taken of it."""
    outputs: tuple[_Wrapped | None, ...]
    """None: the result as it is."""
    written: tuple[int, ...]
    """The tensors that AOTAutograd says the graph writes: autograd is told by their versions."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The outputs for these tensors."""
        if torch.is_grad_enabled():  # an argument may want a gradient that no output has
            with torch.no_grad():
                return self(tensors)
        if self.written:
            increment_version([tensors[i] for i in self.written])
        results = iter(
            self.graph(
                [
                    tensors[i] if inner is None else getattr(tensors[i], inner)
                    for i, inner in self.arguments
                ]
            )
        )
        return [
            next(results)
            if made is None
            else made.kind.__tensor_unflatten__(
                {name: next(results) for name in made.inner}, made.context, made.size, made.stride
            )
            for made in self.outputs
        ]


def observed(
    call: Callable[..., Any], graph: CompiledGraph, tensors: Sequence[torch.Tensor]
) -> tuple[Sequence[Any], Direct | None]:
    """The outputs of a call of this inference graph, and how to get them without AOTAutograd."""
    heard: list[tuple[Any, ...]] = []

    def listen(given: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        entered = _versions(tensors)
        return lambda results: heard.append((given, entered, results, _versions(tensors)))

    before, mode = _versions(tensors), torch.is_grad_enabled()
    graph.listener = listen
    try:
        outputs = call(*tensors)
    finally:
        graph.listener = None
    if len(heard) != 1 or torch.is_grad_enabled() != mode:
        return outputs, None
    given, entered, results, left = heard[0]
    own = {id(tensor) for tensor in tensors}
    if _versions(tensors) != left or any(id(output) in own for output in outputs):
        return outputs, None
    arguments, made = _arguments(tensors, given), _outputs(outputs, results)
    if arguments is None or made is None:
        return outputs, None
    written = tuple(i for i, version in enumerate(before) if version != entered[i])
    return outputs, Direct(graph, arguments, made, written)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _arguments(
    tensors: Sequence[torch.Tensor], given: Sequence[Any]
) -> tuple[tuple[int, str | None], ...] | None:
    places: dict[int, tuple[int, str | None]] = {}
    for i, tensor in enumerate(tensors):
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                places.setdefault(id(getattr(tensor, name)), (i, name))
        else:
            places.setdefault(id(tensor), (i, None))
    found = tuple(places.get(id(value)) for value in given)
    return None if None in found else found  # pyright: ignore[reportReturnType]


def _outputs(outputs: Sequence[Any], results: Sequence[Any]) -> tuple[_Wrapped | None, ...] | None:
    made: list[_Wrapped | None] = []
    expected: list[Any] = []
    for output in outputs:
        if is_traceable_wrapper_subclass(output):
            inner, context = output.__tensor_flatten__()
            expected += [getattr(output, name) for name in inner]
            kind, shape = type(output), output.shape
            made.append(_Wrapped(kind, tuple(inner), context, shape, output.stride()))
        else:
            expected.append(output)
            made.append(None)
    same = len(expected) == len(results) and all(map(operator.is_, expected, results))
    return tuple(made) if same else None
