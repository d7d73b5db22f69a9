"""Values of an FX graph's nodes: tensors, and structures of them, with the steps that made them;
which of them an operator writes, and which its results are views of.

>>> tensors_in([one, (two, 3)]) == [one, two]
>>> written_arguments(torch.ops.aten.copy_.default, bound)    # the tensors of `self`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from interlace.errors import ProgramError
from interlace.torch_private import OpOverload
from interlace_check.graphs.reading.targets import FILLED, VIEWS
from interlace_check.graphs.reading.tensors import TensorRef

MAX_DEPTH = 50
"""Structures within structures, and subgraphs within subgraphs."""


@dataclass(frozen=True, slots=True)
class NodeValue:
    """Result of a node: a tensor, a structure of values, a subgraph, or anything opaque."""

    data: Any
    after: frozenset[int] = frozenset()
    """The steps that have to run before it is there (what is before these goes without saying)."""
    parts: tuple[NodeValue, ...] | None = None
    """Items that a subgraph returns, each with the steps behind it; None for other values."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """A result of which only the storage is known: every item of it is a tensor there."""

    tensor: TensorRef


def example(node: fx.Node) -> Any:
    """The example of what a node gives, if it has one."""
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def flatten(data: Any, depth: int = 0) -> Iterator[Any]:
    """The leaves of a structure of tuples, lists, dictionaries and slices."""
    if depth > MAX_DEPTH:
        raise ProgramError(f"an argument is nested more than {MAX_DEPTH} deep; fix: flatten it")
    if isinstance(data, tuple | list):
        for item in data:
            yield from flatten(item, depth + 1)
    elif isinstance(data, dict):
        for item in data.values():
            yield from flatten(item, depth + 1)
    elif isinstance(data, slice):
        yield from (data.start, data.stop, data.step)
    else:
        yield data


def tensors_in(data: Any) -> list[TensorRef]:
    """The tensors in a structure."""
    found = (item.tensor if isinstance(item, Lasting) else item for item in flatten(data))
    return [item for item in found if isinstance(item, TensorRef)]


def mapped(data: Any, change: Callable[[fx.Node], Any], depth: int = 0) -> Any:
    """A node's argument with every node in it replaced."""
    if depth > MAX_DEPTH:
        raise ProgramError(f"an argument is nested more than {MAX_DEPTH} deep; fix: flatten it")
    if isinstance(data, fx.Node):
        return change(data)
    if isinstance(data, tuple):
        return tuple([mapped(item, change, depth + 1) for item in data])
    if isinstance(data, list):
        return [mapped(item, change, depth + 1) for item in data]
    if isinstance(data, dict):
        return {key: mapped(item, change, depth + 1) for key, item in data.items()}
    return data


def item_of(data: Any, key: Any, node: fx.Node) -> Any:
    """Result of `getitem`. Raises ProgramError where there is no such item."""
    if isinstance(data, Lasting):
        return data
    try:
        return data[key]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ProgramError(
            f"node {node.name!r} takes item {key!r} of a value that has none; fix: the graph's "
            f"nodes do not fit each other, lint it with `graph.lint()`"
        ) from error


# Arguments of operators: which they write, and which their results share storage with

Bound = dict[str, Any]
"""Arguments by the name that the schema has for them."""


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node) -> Bound:
    """A node's arguments by name, with the schema's defaults."""
    names = [argument.name for argument in op._schema.arguments]
    positional = [each.name for each in op._schema.arguments if not each.kwarg_only]
    if len(args) > len(positional) or any(name not in names for name in kwargs):
        raise ProgramError(
            f"node {node.name!r} has other arguments than {op._schema.name} takes; fix: call it as "
            f"its schema says: {op._schema}"
        )
    bound = {
        each.name: each.default_value for each in op._schema.arguments if each.has_default_value()
    }
    bound.update(zip(positional, args, strict=False))
    bound.update(kwargs)
    missing = [name for name in names if name not in bound]
    if missing:
        raise ProgramError(
            f"node {node.name!r} does not give {missing[0]!r}, which {op._schema.name} needs; "
            f"fix: call it as its schema says: {op._schema}"
        )
    return bound


def written_arguments(op: OpOverload, bound: Bound) -> list[TensorRef]:
    """The tensors that the operator writes."""
    if op._schema.name in FILLED:
        return tensors_in(bound[FILLED[op._schema.name]])
    return [
        tensor
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(bound[argument.name])
    ]


def aliases(op: OpOverload, bound: Bound) -> list[list[TensorRef]]:
    """For each result, the tensors of which it may be a view; none where it is new."""
    schema = op._schema
    if schema.name in VIEWS:
        return [tensors_in(bound[schema.arguments[0].name])]
    if schema.name in FILLED:
        return [tensors_in(bound[FILLED[schema.name]]) for _ in schema.returns]
    found: list[list[TensorRef]] = []
    for result in schema.returns:
        if result.alias_info is None:
            found.append([])
            continue
        wanted = result.alias_info.before_set
        found.append(
            [
                tensor
                for argument in schema.arguments
                if argument.alias_info is not None
                and (not wanted or wanted & argument.alias_info.before_set)
                for tensor in tensors_in(bound[argument.name])
            ]
        )
    return found
