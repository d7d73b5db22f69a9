"""Values of an FX graph's nodes: tensors, and structures of them, with the steps that made them.

>>> tensors_in([one, (two, 3)]) == [one, two]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from interlace.errors import ProgramError
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
