"""A concrete view of a symbolic graph: every node's value for the sizes of one call.

A graph traced with dynamic shapes holds symbolic sizes; a Program has numbers. When a call comes
with sizes (or strides) that were not seen before, its fake tensors are pushed through the graph,
and what comes out is imported as a Program of its own:

    key = signature(args)
    values = propagate(gm, args)          # node -> fake tensor with concrete sizes, or number
    imported = import_graph(gm, values=values)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def signature(args: Sequence[Any]) -> Hashable:
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


def has_signature(args: Sequence[Any], key: Hashable) -> bool:
    """Returns True if `signature(args)` is `key`, in half the time and without hashing."""
    assert isinstance(key, tuple)
    if len(args) != len(key):
        return False
    for arg, known in zip(args, key, strict=True):
        if isinstance(arg, torch.Tensor):
            if known.__class__ is not tuple:
                return False
            shape, strides, dtype = known
            if arg.dtype is not dtype or arg.shape != shape:
                return False
            if arg.stride() != strides and strides_of(arg) != strides:
                return False
        elif (arg if isinstance(arg, bool | int | float) else None) != known:
            return False
    return True


def strides_of(arg: torch.Tensor) -> tuple[int, ...]:
    shape, strides = arg.shape, arg.stride()
    if 0 in shape:
        return (0,) * len(shape)
    if 1 in shape:
        return tuple(0 if size == 1 else s for size, s in zip(shape, strides, strict=True))
    return strides


def recorded_signature(gm: fx.GraphModule) -> Hashable | None:
    """The signature that a graph was traced with; None where it is symbolic."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    numbers: list[Any] = []
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
        if isinstance(value, torch.Tensor):
            numbers += [*value.shape, *value.stride()]
    if any(isinstance(number, torch.SymInt) for number in numbers):
        return None
    return signature(values)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, noted."""
        value = self.found[n] = super().run_node(n)
        return value


def complete(gm: fx.GraphModule) -> dict[fx.Node, Any] | None:
    """Every node's value as it was traced, where some have none noted; None where all have."""
    unknown = [n for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta]
    if not unknown:
        return None
    given = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    modes = [value.fake_mode for value in given if isinstance(value, FakeTensor)]
    return _recorded(gm, modes[0] if modes else FakeTensorMode(), given)


def propagate(gm: fx.GraphModule, args: Sequence[Any]) -> dict[fx.Node, Any]:
    """Every node's fake value for these arguments; nothing is computed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    return _recorded(gm, mode, fakes)


def _recorded(gm: fx.GraphModule, mode: FakeTensorMode, given: Sequence[Any]) -> dict[fx.Node, Any]:
    recorder = _Recorder(gm)
    with mode, torch.no_grad():
        recorder.run(*given, enable_io_processing=False)
    return recorder.found
