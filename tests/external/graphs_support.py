"""Graphs to check: made by hand as Dynamo and AOTAutograd spell them, or traced.

Streams are traced without a GPU: Dynamo asks only whether there is an accelerator and what its
current stream is.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_leaves

AOT = torch.ops.aten
C10D = torch.ops._c10d_functional
STREAMS = torch.ops.streams


class Maker:
    """A graph under construction. Nodes have metadata as AOTAutograd gives them."""

    def __init__(self) -> None:
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.lines = 0

    def input(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.zeros(shape or (8,))
        return node

    def call(self, op: Any, *args: Any, stream: int | None = None, **kwargs: Any) -> fx.Node:
        """A call of an operator, on a stream; its metadata come from a call with real tensors."""
        name = op._schema.name.partition("::")[2]  # AOTAutograd leaves the overload out
        node = self.graph.create_node("call_function", op, args, kwargs, name=name)
        self._annotate(node, stream)
        if op.namespace == "streams":
            return node
        given = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
        if op.namespace in ("_c10d_functional", "_dtensor"):
            node.meta["val"] = _communicated(op, *given[0])
        else:
            node.meta["val"] = op(*given[0], **given[1])
        return node

    def sync(self, name: str, *args: int, stream: int | None = None) -> fx.Node:
        """A stream op that hangs on no data."""
        return self.call(getattr(STREAMS, name).default, *args, stream=stream)

    def control(
        self, name: str, args: tuple[int, ...], deps: tuple[fx.Node, ...], *passed: fx.Node
    ) -> tuple[fx.Node, ...]:
        """A stream op in `control_deps`: the node, and the tensors that go through it."""
        inner = fx.Graph()
        held = [inner.placeholder(f"dep_{i}") for i in range(len(passed))]
        done = inner.call_function(getattr(STREAMS, name).default, args)
        self._annotate(done, None)
        inner.output((done, *held))
        attribute = f"subgraph_{name}_{self.lines}"
        setattr(self.root, attribute, _LazyGraphModule(self.root, inner))
        subgraph = self.graph.get_attr(attribute)
        node = self.graph.call_function(control_deps, (deps, subgraph, *passed))
        found = [node]
        for index, tensor in enumerate(passed):
            item = self.graph.call_function(operator.getitem, (node, index + 1))
            item.meta.update(tensor.meta)
            found.append(item)
        return tuple(found)

    def done(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        self.graph.lint()
        return _LazyGraphModule(self.root, self.graph)  # nobody runs it

    def _annotate(self, node: fx.Node, stream: int | None) -> None:
        self.lines += 1
        node.meta["stack_trace"] = f'  File "model.py", line {self.lines}, in forward\n    code\n'
        if stream is not None:
            node.meta["custom"] = {"stream": stream}


def _communicated(op: Any, source: Any, *args: Any) -> Any:
    name = op._schema.name
    if isinstance(source, list):
        return [_communicated(op, each, *args) for each in source]
    if "all_gather" in name:
        return torch.zeros(source.shape[0] * args[0], *source.shape[1:])
    if "reduce_scatter" in name:
        return torch.zeros(source.shape[0] // args[1], *source.shape[1:])
    return source if name.endswith(("wait_tensor", "_")) else torch.zeros_like(source)


def traced(
    function: Callable[..., Any],
    *args: Any,
    backward: bool = False,
    into: list[fx.GraphModule] | None = None,
) -> list[fx.GraphModule]:
    """The graphs that AOTAutograd makes of a function: the forward one, and the backward one."""
    graphs: list[fx.GraphModule] = [] if into is None else into

    def keep(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        graphs.append(gm)
        return gm

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=keep)

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*args)
    if backward:
        leaves = [leaf for leaf in tree_leaves(result) if leaf.requires_grad]
        torch.stack([leaf.sum() for leaf in leaves]).sum().backward()
    torch._dynamo.reset()
    return graphs


def _constant(value: Any) -> Callable[..., Any]:
    return lambda device=None: value


@contextlib.contextmanager
def streams_on_cpu() -> Iterator[torch.Stream]:
    """Dynamo traces streams as on a machine with an accelerator; gives the current stream."""
    current = torch.Stream(device="cpu")
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_stream", new=_constant(current)),
    ):
        yield current


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group of `size` ranks that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert funcol is not None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
