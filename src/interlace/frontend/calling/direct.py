"""Calls of an inference graph without TorchDynamo and AOTAutograd between.

    observer = Observer(tensors)                 # sees the runs of graphs in one call
    direct = observer.direct(result)             # how to do the same again; None: not without torch
    result = direct(tensors)

TorchDynamo checks guards, AOTAutograd hands a graph what DTensors hold, and makes DTensors of what
it gives. Both may do more: write Python objects, write to arguments behind the graph, give out
views of them or themselves, merge those that overlap. One call shows whether they did: it runs one
graph, of code that writes no objects; every argument of the graph must be, by identity, an argument
or what one of them holds, every output the graph's own or made of that and no argument, and what
else there is to see (gradient mode, versions of the arguments) as the graph left it. Before the
graph AOTAutograd may have counted versions up, which is done again. All other calls go through
torch. The call that compiles shows nothing: what it traced may have left another gradient mode
behind.
"""

from __future__ import annotations

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
    pytree,
)

Versions = list[int | None]


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
    tree: pytree.TreeSpec
    """Nesting of the leaves of what the function gives."""
    leaves: tuple[object, ...]
    """Leaves that are no tensors and the same in every call; None where there are tensors."""
    tensors: tuple[tuple[int, int | _Wrapped], ...]
    """For each leaf that is a tensor, the result by its place, or what is made of some."""
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
        leaves = list(self.leaves)
        for leaf, made in self.tensors:
            leaves[leaf] = made.around(results) if isinstance(made, _Wrapped) else results[made]
        return leaves[0] if self.tree.is_leaf() else pytree.tree_unflatten(leaves, self.tree)


class Observer:
    """Sees what becomes of these tensors in the graphs of one call."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before, self._mode = _versions(tensors), torch.is_grad_enabled()
        self._runs: list[tuple[CompiledGraph, Boxed, Versions, Sequence[object], Versions]] = []
        """Graphs with arguments and results, each with the tensors' versions then."""

    def __call__(self, graph: CompiledGraph, run: Run, args: Boxed) -> Sequence[object]:
        given, entered = list(args), _versions(self._tensors)
        results = run(args)
        self._runs.append((graph, given, entered, results, _versions(self._tensors)))
        return results

    def direct(self, result: object) -> Direct | None:
        """The way to the result without torch, once the call has returned; None: there is none."""
        if len(self._runs) != 1 or torch.is_grad_enabled() != self._mode:
            return None
        ((graph, given, entered, results, left),) = self._runs
        if graph.unscheduled or graph.setting.origin.has_effects:
            return None
        bound, (leaves, tree) = graph.bound[-1], pytree.tree_flatten(result)
        own = {id(tensor) for tensor in self._tensors}
        if _versions(self._tensors) != left or any(id(leaf) in own for leaf in leaves):
            return None
        imported = bound.imported
        inputs = _inputs(self._tensors, [given[i] for i in imported.inputs])
        places = dict(zip(map(id, results), imported.outputs, strict=True))
        tensors = [
            (i, _made(leaf, places))
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        outputs = tuple((i, made) for i, made in tensors if made is not None)
        if inputs is None or len(outputs) < len(tensors):
            return None
        fixed = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        written = tuple(i for i, old in enumerate(self._before) if old != entered[i])
        return Direct(bound.executor, inputs, imported.completed, tree, fixed, outputs, written)


def _versions(tensors: Sequence[torch.Tensor]) -> Versions:
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


def _made(output: Any, places: Mapping[int, object]) -> int | _Wrapped | None:
    """An output by its place among the results, or wrapped around some; None if it is neither."""
    if not is_traceable_wrapper_subclass(output):
        place = places.get(id(output))
        return place if isinstance(place, int) else None
    names, context = output.__tensor_flatten__()
    values = {name: getattr(output, name) for name in names}
    inner = {name: places.get(id(x)) for name, x in values.items() if isinstance(x, torch.Tensor)}
    if not all(isinstance(place, int) for place in inner.values()):
        return None
    fixed = {name: x for name, x in values.items() if name not in inner}
    pairs: Any = tuple(inner.items())
    return _Wrapped(type(output), pairs, fixed, context, output.shape, output.stride())
