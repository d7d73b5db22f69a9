"""The graphs that Interlace compiles inside a block, by any front door.

with capture() as captured:
    model(x).sum().backward()
print(captured.programs[0])
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

from torch import fx

from interlace.frontend import Bound, CompiledGraph
from interlace.frontend.backend import Compilation
from interlace.frontend.explain import explain_graphs
from interlace.ir import Program


@dataclass
class Captured:
    """The compiled graphs, in the order in which they were compiled."""

    graphs: list[CompiledGraph] = field(default_factory=list)

    @property
    def bound(self) -> list[Bound]:
        """Every bound Program. What runs as traced has none."""
        return [bound for graph in self.graphs for bound in graph.bound]

    @property
    def programs(self) -> list[Program]:
        """The overlapped Programs: forward and backward of each graph."""
        return [bound.program for bound in self.bound]

    def explain(self) -> str:
        """What `interlace.explain` says of these graphs."""
        return explain_graphs(self.graphs)


@contextlib.contextmanager
def capture() -> Iterator[Captured]:
    """Collects graphs; those that torch keeps from before are not seen."""
    captured, compiled_graph = Captured(), Compilation.compiled_graph

    def collected(self: Compilation, kind: str, gm: fx.GraphModule) -> CompiledGraph:
        captured.graphs.append(graph := compiled_graph(self, kind, gm))
        return graph

    with mock.patch.object(Compilation, "compiled_graph", collected):
        yield captured
