"""Graphs for the tests of the import, and the slow twin that runs an imported Program.

forward, backward = graphs(model, x)         # what AOTAutograd hands to a backend
outputs = run(import_graph(forward.gm), forward.args)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.support.interpreter import run_ranks
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition

from interlace.frontend import Imported, Opaque, import_graph
from interlace.frontend.calling.arguments import signature
from interlace.frontend.compiled_graph import recorded_signature
from interlace.frontend.importing.nodes import propagate


@dataclass
class Graph:
    """A graph as a backend's compiler gets it, and what torch itself made of one call."""

    kind: str
    gm: fx.GraphModule
    args: list[Any]
    """Copies of the arguments as they were before the call,"""
    args_after: list[Any]
    """and after it."""
    outputs: list[Any]
    rng_state: torch.Tensor
    """The generator's state before the call."""


def graphs(
    fn: Callable[..., Any], *args: Any, gradient: bool = True, partition: Any = None
) -> list[Graph]:
    """The graphs of one call of `fn` (and its backward), each run once by torch itself."""
    found: list[Graph] = []

    def compiler(kind: str) -> Callable[..., Any]:
        def compile_graph(gm: fx.GraphModule, example: Any) -> Callable[..., Any]:
            def run_boxed(given: list[Any]) -> Any:
                before, state = copies(given), torch.get_rng_state()
                outputs = list(gm(*given))
                found.append(Graph(kind, gm, before, copies(given), copies(outputs), state))
                given.clear()
                return outputs

            run_boxed._boxed_call = True  # pyright: ignore
            return run_boxed

        return compile_graph

    compiled = aot_function(
        fn,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition or min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    result = compiled(*args)
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    total = sum(t.double().sum() for t in tensors if t.requires_grad and gradient)
    if isinstance(total, torch.Tensor):
        total.backward()
    return found


def copies(values: Sequence[Any]) -> list[Any]:
    """The values, tensors copied with their strides."""
    return [
        v.detach().clone(memory_format=torch.preserve_format) if isinstance(v, torch.Tensor) else v
        for v in values
    ]


def imported(graph: Graph) -> Imported:
    """The Program for the call that was made: of its own strides, where they were not traced."""
    known = recorded_signature(graph.gm) == signature(graph.args)
    values = None if known else propagate(graph.gm, graph.args)
    return import_graph(graph.gm, name=graph.kind, values=values)


def run(of: Imported, args: Sequence[Any]) -> list[Any]:
    """The graph's outputs, computed from the Program op by op."""
    inputs = of.completed([args[place] for place in of.inputs])
    (results,) = run_ranks(of.program, [inputs], in_order=True)
    others = [args[o.position] if isinstance(o, Opaque) else o.value for o in of.others]
    return [[*results, *others][place] for place in of.places]


def agrees(graph: Graph, by: Imported, exact: bool = True) -> None:
    """Asserts that the Program gives what the graph gave, bit for bit, and writes what it wrote."""
    args = copies(graph.args)
    torch.set_rng_state(graph.rng_state)
    outputs = run(by, args)
    assert len(outputs) == len(graph.outputs)
    for i, (mine, theirs) in enumerate(zip(outputs, graph.outputs, strict=True)):
        same(mine, theirs, f"output {i} of {graph.kind}\n{by.program}", exact)
    for i, (mine, theirs) in enumerate(zip(args, graph.args_after, strict=True)):
        same(mine, theirs, f"argument {i} of {graph.kind}\n{by.program}")


def same(mine: Any, theirs: Any, what: str, exact: bool = True) -> None:
    """Asserts that two values are equal: tensors in sizes, element type and every bit."""
    if not isinstance(theirs, torch.Tensor):
        assert mine == theirs, what
        return
    assert isinstance(mine, torch.Tensor), what
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), what
    if not exact:
        torch.testing.assert_close(mine, theirs, msg=lambda text: f"{what}\n{text}")
        return
    assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs)), what
    assert torch.equal(torch.isnan(mine), torch.isnan(theirs)), what
