"""`interlace.compile`: a module on DTensors, overlapped, without TorchDynamo.

Where `torch.compile` reads bytecode and guards it, this runs the module once on fake tensors.
What depends on more than the arguments' sizes, layouts and plain values is fixed by that run. A
new combination of those is compiled anew; the least recently used is dropped beyond `cache_size`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import ExecutorError, OptionError
from interlace.frontend.backend import Compilation, meshes_in, options_from
from interlace.frontend.binding import Bound
from interlace.frontend.caches import BoundedCache
from interlace.frontend.calling.as_module import AsModule
from interlace.frontend.calling.call_key import CallKeys, ModuleCall
from interlace.frontend.calling.direct import Direct, observed
from interlace.frontend.calling.leftovers import none_left
from interlace.frontend.calling.tracing import Watch, lent, refuse_sharded, tracing
from interlace.frontend.compiled_graph import CompiledGraph, Setting
from interlace.frontend.dynamo import name_of
from interlace.frontend.importing.nodes import unwrapped
from interlace.frontend.importing.types import device_of
from interlace.ir import Program
from interlace.options import Options
from interlace.torch_private import pytree
from interlace.torch_private.dynamo import OptimizedModule, aot_module_simplified

_TENSOR = object()
"""Where a tensor stands among outputs."""
_GONE = {
    "dynamic": 'torch.compile(module, backend="interlace", dynamic=True)',
    "overlap": 'options={"overlap": False}',
}
"""Arguments of earlier releases, with what replaces them."""


def compile(
    module: nn.Module,
    *examples: object,
    mesh: DeviceMesh | None = None,
    options: Options | Mapping[str, object] | None = None,
    **others: object,
) -> Compiled:
    """Compiles a module so that its communication runs under its computation.

    Functions, and sizes that change (batch, sequence, a cache that grows) with one Program for a
    class of them, are for `torch.compile(..., backend="interlace")`.

    Args:
        module: a module whose Parameters are DTensors, or which communicates over process groups.
            What `torch.compile` was given before, as `module` or within it, is taken as it was.
        examples: the arguments of a call. With them `module` is compiled at once, on all ranks
            together; without them at the first call, which then raises the errors below.
        mesh: names the teams of process groups that no argument names.
        options: `Options`, or a mapping of them.

    Returns:
        An `nn.Module` with the parameters, the state and the modes of `module` itself. An attribute
        that `Compiled` has too (such as `options`) is that of `module` under `.fn`.

    Raises:
        OptionError: an argument or an option is invalid.
        UnsupportedError: an operator or a sharding cannot be lowered.
        SoundnessError, ScheduleError: one of `Options.schedules` is unsound, or does not fit.
        AgreementError, PeerError, CommTimeoutError: another rank compiles something else, fails, or
            does not come.

    Examples:
        >>> compiled = interlace.compile(model, x, mesh=mesh)
        >>> compiled(x).shape  # as of model(x), and differentiable
        torch.Size([16, 64])
    """
    for name in others:
        instead = f": give {_GONE[name]} instead" if name in _GONE else ""
        raise OptionError(f"interlace.compile has no argument {name!r}{instead}")
    while isinstance(module, OptimizedModule | Compiled):
        module = module._orig_mod if isinstance(module, OptimizedModule) else module.fn
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"interlace.compile takes modules, and was given {module!r}. fix: "
            'torch.compile(fn, backend="interlace") for a function, or make it the forward of an '
            "nn.Module"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):  # pyright: ignore
        raise OptionError(
            f"mesh={mesh!r} is no DeviceMesh: give the mesh itself, as init_device_mesh makes it"
        )
    compiled = Compiled(module, mesh, options_from(options))
    if examples:
        compiled.prepare(*examples)
    return compiled


@dataclass(slots=True)
class Outputs:
    """Structure of outputs: their tree, and the leaves that are no tensors, which tracing fixes."""

    tree: pytree.TreeSpec
    fixed: list[object]

    @classmethod
    def of(cls, result: object) -> tuple[Outputs, tuple[torch.Tensor, ...]]:
        """A result taken apart into what is the same in every call and its tensors."""
        leaves, tree = pytree.tree_flatten(result)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return cls(tree, [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]), tensors

    def join(self, tensors: Sequence[object]) -> object:
        """The result with these tensors."""
        if self.tree.is_leaf():
            return tensors[0] if self.fixed[0] is _TENSOR else self.fixed[0]
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.fixed]
        return pytree.tree_unflatten(leaves, self.tree)


@dataclass(slots=True)
class _Entry:
    """One combination of arguments: the compiled function, its graphs, what its outputs are."""

    call: Callable[..., Sequence[object]]
    compilation: Compilation
    outputs: Outputs
    calls: int = 0
    direct: Direct | None = None

    def run(self, tensors: Sequence[torch.Tensor]) -> object:
        """A call through AOTAutograd; the second one shows whether others need it."""
        if self.direct is not None:  # its Executor was closed
            self.direct, self.calls = None, 0
        graphs = self.compilation.graphs
        if self.calls != 1 or [a.kind for a in graphs] != ["inference"]:
            results = self.call(*tensors)
        else:
            results, self.direct = observed(self.call, graphs[0], tensors, self.outputs.join)
        self.calls += 1
        return self.outputs.join(results)


class Compiled(AsModule):
    """A compiled module: call it as the module; ask it what it does.

    Args:
        fn, mesh, options: the module and the arguments that `interlace.compile` was given.
    """

    def __init__(self, fn: nn.Module, mesh: DeviceMesh | None, options: Options) -> None:
        self.fn = fn
        self.options = options
        self._keys = CallKeys(fn)
        self._mesh = mesh
        self._entries: BoundedCache[_Entry] = BoundedCache(
            name_of(fn), options.cache_size, lambda entry: entry.compilation.close()
        )

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Returns the module's result for these arguments."""
        call = self._keys.of(args, kwargs)
        entry = self._entries.get(call.key) or self._add(call, args, kwargs)
        direct = entry.direct
        if direct is not None and direct.executor.engine is not None:
            return direct(call.tensors)
        return entry.run(call.tensors)

    def prepare(self, *args: object, **kwargs: object) -> Compiled:
        """Compiles for arguments like these and runs nothing. All ranks call it together.

        Args:
            args, kwargs: the arguments of a call; a combination that is known is not compiled anew.

        Returns:
            The compiled module itself.
        """
        call = self._keys.of(args, kwargs)
        if self._entries.get(call.key) is None:
            self._add(call, args, kwargs)
        return self

    @property
    def bound(self) -> tuple[Bound, ...]:
        """The graphs of the arguments met last, forward before backward."""
        if not self._entries.all():
            raise ExecutorError(
                "nothing is compiled yet: call the compiled module, or give "
                "interlace.compile the arguments of a call"
            )
        return tuple(bound for graph in self.graphs for bound in graph.bound[-1:])

    @property
    def graphs(self) -> Sequence[CompiledGraph]:
        """Graphs of the arguments met last, forward before backward; none before the first call."""
        return [graph for entry in self._entries.all()[-1:] for graph in entry.compilation.graphs]

    @property
    def program(self) -> Program:
        """The overlapped Program of the forward pass."""
        if not (programs := self.programs):
            raise ExecutorError(f"there is no Program: the graph {self.graphs[0].unscheduled}")
        return programs[0]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The overlapped Programs: forward, and backward where something needs a gradient."""
        return tuple(bound.program for bound in self.bound)

    def explain(self) -> str:
        """Returns the text of `interlace.explain` for the arguments met last."""
        from interlace.frontend.explain import explain_bound

        return explain_bound(self.bound)

    def close(self) -> None:
        """Frees everything; a later call compiles anew."""
        self._entries.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """The same of a copy of the module, compiled anew when it is called."""
        copied = memo[id(self)] = type(self)(copy.deepcopy(self.fn, memo), self._mesh, self.options)
        return copied

    def __reduce__(self) -> object:
        return type(self), (self.fn, self._mesh, self.options)

    def _add(self, call: ModuleCall, args: tuple[object, ...], kwargs: dict[str, object]) -> _Entry:
        trace: Any = torch.compiler.disable(self._compile)  # within what it compiles too
        entry = trace(call, args, kwargs)
        self._entries.add(call.key, entry)
        return entry

    def _compile(
        self, call: ModuleCall, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> _Entry:
        refuse_sharded(self.fn)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        found: list[Outputs] = []

        def flat(*given: torch.Tensor) -> tuple[object, ...]:
            rest = iter(given[len(call.names) :])
            filled = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            with lent(self.fn, given[: len(call.names)]), Watch():
                result = self.fn(*args, **kwargs)
            outputs, results = Outputs.of(result)
            found.append(outputs)
            return results

        meshes = meshes_in([*call.tensors, self._mesh])
        count = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
        arguments = [f"arg{i}" for i in range(count)] if count > 1 else ["x"] * count
        labels = (*(unwrapped(name).replace(".", "_") for name in call.names), *arguments)
        state, device = frozenset(range(len(call.names))), device_of(call.tensors)
        compilation = Compilation(Setting(self.options, meshes, labels, state, device))
        objects = {f"argument {i}": x for i, x in enumerate(args)} | kwargs
        name = name_of(self.fn)

        def trace(plain: Sequence[object]) -> Callable[..., Sequence[object]]:
            with none_left(objects | {name: self.fn}), tracing(name):
                function: Any = _Function(flat)
                return aot_module_simplified(function, plain, **compilation.compilers())

        call_graphs = compilation.run(trace, call.tensors, name)
        return _Entry(call_graphs, compilation, found[-1])


class _Function(nn.Module):
    """A function as the module without parameters that AOTAutograd wants."""

    def __init__(self, fn: Callable[..., object]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: object) -> object:
        """Returns the function's result."""
        return self.fn(*args)
