"""Calls of an inference graph without AOTAutograd between, which only takes tensors apart for it.

    outputs, direct = observed(call, graph, tensors, join)  # a call, and what it was seen to do
    result = direct(tensors)                                # the same again, with outputs joined

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from interlace.frontend.compiled_graph import Boxed, CompiledGraph, Run
from interlace.runtime import Executor
from interlace.torch_private import (
    DisableAutocast,
    is_any_autocast_enabled,
    is_traceable_wrapper_subclass,
)


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """An output that is a tensor around others, in the terms of torch's protocol for those."""

    kind: Any
    inner: tuple[tuple[str, int], ...]
    """Attributes with inner tensors, each with its place among the results."""
    fixed: dict[str, object]
    """Attributes that are the same in every call, such as a DeviceMesh."""
    context: object
    size: torch.Size
    stride: tuple[int, ...]

    def around(self, results: Sequence[object]) -> object:
        """The output made of these results."""
        inner = self.fixed | {name: results[i] for name, i in self.inner}
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Direct:
    """An Executor, where its inputs are found, and what is made of its results."""

    executor: Executor
    inputs: tuple[tuple[int, str | None], ...]
    """For each: the position of the tensor, and the name of what is taken of it."""
    completed: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    """Further treatment of the inputs."""
    outputs: tuple[int | _Wrapped, ...]
    """Results by place, or what is made of them."""
    join: Callable[[Sequence[object]], object]
    """Makes what the function gives of the outputs."""
    written: tuple[int, ...]
    """The tensors that AOTAutograd says the graph writes: autograd is told by their versions."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> object:
        """Returns the function's result for these tensors."""
        # An argument may want a gradient that no output has; and Note [Autocast is in the graph].
        if torch.is_grad_enabled() or is_any_autocast_enabled():
            with torch.no_grad(), DisableAutocast():
                return self(tensors)
        if self.written:
            increment_version([tensors[i] for i in self.written])
        given = [
            tensors[i] if inner is None else getattr(tensors[i], inner) for i, inner in self.inputs
        ]
        results = self.executor.run(self.completed(given))
        return self.join(
            [results[each] if type(each) is int else each.around(results) for each in self.outputs]  # pyright: ignore
        )


def observed(
    call: Callable[..., Sequence[object]],
    graph: CompiledGraph,
    tensors: Sequence[torch.Tensor],
    join: Callable[[Sequence[object]], object],
) -> tuple[Sequence[object], Direct | None]:
    """The outputs of a call of this inference graph, and how to get them without AOTAutograd."""
    calls: list[tuple[Boxed, list[int | None], Sequence[object], list[int | None]]] = []
    """Arguments and results of the graph, each with the tensors' versions then."""

    def observe(run: Run, args: Boxed) -> Sequence[object]:
        given, entered = list(args), _versions(tensors)
        results = run(args)
        calls.append((given, entered, results, _versions(tensors)))
        return results

    before, mode = _versions(tensors), torch.is_grad_enabled()
    graph.observer = observe
    try:
        outputs = call(*tensors)
    finally:
        graph.observer = None
    if len(calls) != 1 or torch.is_grad_enabled() != mode or graph.unscheduled or graph.counted:
        return outputs, None
    given, entered, results, left = calls[0]
    own = {id(tensor) for tensor in tensors}
    if _versions(tensors) != left or any(id(output) in own for output in outputs):
        return outputs, None
    bound = graph.bound[-1]
    imported = bound.imported
    inputs = _inputs(tensors, [given[i] for i in imported.inputs])
    wrapped = _outputs(outputs, results, imported.outputs)
    if inputs is None or wrapped is None:
        return outputs, None
    written = tuple(i for i, version in enumerate(before) if version != entered[i])
    return outputs, Direct(bound.executor, inputs, imported.completed, wrapped, join, written)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _inputs(
    tensors: Sequence[torch.Tensor], given: Sequence[object]
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


def _outputs(
    outputs: Sequence[object], results: Sequence[object], places: Sequence[Any]
) -> tuple[int | _Wrapped, ...] | None:
    """Outputs by place among the Program's results, or wrapped; None if `results` has others."""
    parts = [
        output.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(output) else ()
        for output in outputs
    ]
    expected = [
        value
        for output, names in zip(outputs, parts, strict=True)
        for value in ([getattr(output, name) for name in names] if names else [output])
    ]
    if len(expected) != len(results) or not all(map(operator.is_, expected, results)):
        return None
    rest = iter(places)
    return tuple(
        _wrapped(output, dict(zip(names, rest, strict=False))) if names else next(rest)
        for output, names in zip(outputs, parts, strict=True)
    )


def _wrapped(output: Any, places: Mapping[str, object]) -> _Wrapped:
    inner = tuple((name, place) for name, place in places.items() if type(place) is int)
    fixed = {name: getattr(output, name) for name, at in places.items() if type(at) is not int}
    context = output.__tensor_flatten__()[1]
    return _Wrapped(type(output), inner, fixed, context, output.shape, output.stride())
