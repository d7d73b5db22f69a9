"""`interlace.compile(fn, dynamic=True)`: TorchDynamo traces `fn` with symbolic sizes.

    step = interlace.compile(block, x, mesh=mesh, dynamic=True)
    step(longer)                         # another size of the same class: nothing is compiled
    print(step.explain())                # says which sizes each Program is for

One graph serves every size that torch's guards allow, and one Program of it a class of sizes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import ExecutorError, InterlaceError
from interlace.frontend.backend import NotCompiled, backend
from interlace.frontend.binding import Bound
from interlace.frontend.compile import Compiled, CompiledModule
from interlace.frontend.compiled_graph import CompiledGraph
from interlace.frontend.explain import capture, explain_graphs
from interlace.options import Options


class Prepared(BaseException):
    """Ends a call that was to compile alone."""


def _stop(args: Sequence[Any]) -> Any:
    raise Prepared


class Tracer:
    """The backend of one function: keeps what it compiles. TorchDynamo keeps it for long."""

    __name__ = backend.__name__
    """For TorchDynamo: a registered backend, whose traces' weak references to tensors it drops, so
    that `Module.to` can convert DTensor parameters."""

    def __init__(self, options: Options, mesh: DeviceMesh | None) -> None:
        self._options, self._mesh = options, mesh
        self.graphs: list[list[CompiledGraph]] = []
        """Graphs of each call of the backend, those that ran last at the end."""
        self.preparing = False

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph of TorchDynamo; returns the callable that runs it."""
        try:
            with capture() as captured:
                compiled = backend.compiled(gm, examples, self._options, self._mesh)
        except InterlaceError as error:
            raise NotCompiled(error) from error
        graphs = captured.graphs

        def call(*args: Any) -> Any:
            self.graphs = [*(each for each in self.graphs if each is not graphs), graphs]
            for graph in graphs:
                graph.listener = _stop if self.preparing else None
            return compiled(*args)

        return call

    def reset(self) -> None:
        """Frees what is bound; `torch.compiler.reset()` calls it."""
        graphs, self.graphs = self.graphs, []
        for graph in (graph for each in graphs for graph in each):
            graph.close()


class Dynamic(Compiled):
    """A function compiled for sizes that change: as `Compiled`, traced by TorchDynamo."""

    def __init__(self, fn: Callable[..., Any], mesh: DeviceMesh | None, options: Options) -> None:
        super().__init__(fn, mesh, options)
        self._tracer = Tracer(options, mesh)

        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        # TorchDynamo keeps what it compiled by code object, and counts it: so this has its own.
        own = types.FunctionType(
            call.__code__.replace(), globals(), "call", closure=call.__closure__
        )
        self._call: Any = torch.compile(own, backend=self._tracer, dynamic=True, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `fn` for these arguments."""
        self._given[0] = args, kwargs
        return self._call(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles for arguments like these and runs nothing, but for the backward pass, which is
        bound when it first runs. All ranks call it together."""
        self._tracer.preparing = True
        try:
            self(*args, **kwargs)
        except Prepared:
            pass
        finally:
            self._tracer.preparing = False
        return self

    @property
    def bound(self) -> tuple[Bound, ...]:
        """The graphs of the arguments met last, forward before backward."""
        graphs = self._called()
        found = tuple(bound for graph in graphs for bound in graph.bound[-1:])
        if not found:
            why = "\n".join(f"{graph.kind}: {graph.unscheduled}" for graph in graphs)
            raise ExecutorError(f"there is no Program of these arguments, see explain(). {why}")
        return found

    @property
    def graphs(self) -> Sequence[CompiledGraph]:
        """Graphs that ran last, forward before backward; none before the first call."""
        return self._tracer.graphs[-1] if self._tracer.graphs else ()

    def _called(self) -> Sequence[CompiledGraph]:
        if not self.graphs:
            raise ExecutorError(
                "nothing is compiled yet: call the compiled function, or give "
                "interlace.compile the arguments of a call"
            )
        return self.graphs

    def explain(self) -> str:
        """Each communication with its strategy, the reason and what is predicted and measured; or
        why there is no Program."""
        return explain_graphs(self._called())

    def close(self) -> None:
        """Frees everything; a later call binds anew."""
        for graph in (graph for each in self._tracer.graphs for graph in each):
            graph.close()


class DynamicModule(Dynamic, CompiledModule):
    """The same of a module: a module itself, with the parameters and the state of `fn`."""
