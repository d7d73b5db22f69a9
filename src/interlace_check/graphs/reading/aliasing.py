"""Facts of an operator's schema: arguments that it writes, and storage that its results share.

written_arguments(torch.ops.aten.copy_.default, bound)    # the tensors of `self`
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._ops import OpOverload

from interlace.errors import ProgramError
from interlace_check.graphs.reading.targets import FILLED, VIEWS
from interlace_check.graphs.reading.tensors import TensorRef
from interlace_check.graphs.reading.values import tensors_in

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
