"""Questions about FX graphs: arguments by position, what is live, what reaches the output.

>>> bound(node)           # every argument of the operator, defaults filled in
[x, 0, 2, 4, 1]
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

WAIT = "_c10d_functional.wait_tensor.default"

LAZY = {
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    WAIT,
}
"""Operators that import makes views of their argument, beside torch's own views."""

COPIES = {
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten._to_copy.default",
    "aten.cat.default",
}
"""Operators that may become views where nobody could tell."""


def bound(node: fx.Node) -> list[Any]:
    """A node's arguments by position, with the schema's defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    found: list[Any] = list(node.args)
    if schema is None:
        return found
    for argument in schema.arguments[len(node.args) :]:
        default = argument.default_value if argument.has_default_value() else None
        found.append(node.kwargs.get(argument.name, default))
    return found


def made(node: fx.Node, value: Any) -> Any:
    """The results that a node really makes: those that its `output_mask` leaves out are None."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "output_mask" not in names or not isinstance(value, list | tuple):
        return value
    mask = bound(node)[names.index("output_mask")]
    return tuple(item if wanted else None for item, wanted in zip(value, mask, strict=True))


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node reads and advances the random number generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    return "dropout_p" not in names or bound(node)[names.index("dropout_p")] != 0.0


def is_mutable(node: fx.Node) -> bool:
    """Whether a node writes one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def is_view(node: fx.Node) -> bool:
    """Whether a node's results are views of its argument, by torch's own schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return bool(returns) and all(result.alias_info is not None for result in returns)


def is_lazy(node: fx.Node) -> bool:
    """Whether import makes the node a view of its first argument, read only where it is used."""
    return str(node.target) in LAZY or node.target is operator.getitem or is_view(node)


def aliases(node: fx.Node, through_copies: bool = False) -> set[fx.Node]:
    """A node and everything that is a view of it; with `through_copies`, that may become one."""
    found, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            copy = through_copies and str(user.target) in COPIES
            if user not in found and (copy or is_lazy(user)):
                found.add(user)
                todo.append(user)
    return found


def awaited(graph: fx.Graph) -> list[int]:
    """Positions of the arguments that the graph waits for: a caller's collective may be at them.

    It need not have a type of its own that says so: a DTensor is taken apart to what it holds.
    """
    places = [node for node in graph.nodes if node.op == "placeholder"]
    return [i for i, n in enumerate(places) if any(str(a.target) == WAIT for a in aliases(n))]


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the output needs, and those with an effect of their own."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        effect = node.op in ("output", "placeholder") or is_mutable(node)
        if effect or draws_random_numbers(node) or not live.isdisjoint(node.users):
            live.add(node)
    return live


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the graph returns."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return [item for item in flatten(output.args[0]) if isinstance(item, fx.Node)]


def flatten(value: Any) -> Iterator[Any]:
    """The items of nested lists and tuples."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    else:
        yield value
