"""`interlace.compile`: a module on DTensors, overlapped, whose calls skip TorchDynamo's guards.

    compiled = interlace.compile(block, x, mesh=mesh)
    y = compiled(x)                      # differentiable, like block(x)
    print(compiled.explain())            # every communication, how it is overlapped, and why
    interlace.simulate(compiled.program)      # the predicted timeline; measured: the option `trace`

The module is compiled by `torch.compile`, as one graph. Once a call without gradients has shown
that nothing is done around that graph, calls like it go straight to its Executor (direct.py). What
depends on more than the arguments' sizes, layouts and plain values is then as it was in that call.
A new combination of those is compiled anew; the least recently used is dropped beyond `cache_size`.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import (
    ExecutorError,
    OptionError,
    SizeError,
    TeamError,
    UnsupportedError,
)
from interlace.frontend.backend import Backend, options_from
from interlace.frontend.binding import Bound
from interlace.frontend.caches import BoundedCache
from interlace.frontend.calling.call_key import CallKeys, ModuleCall
from interlace.frontend.calling.direct import Direct, Observer
from interlace.frontend.compiled_graph import Boxed, CompiledGraph, Run
from interlace.frontend.dynamo import name_of
from interlace.frontend.importing.nodes import TORCH
from interlace.ir import Program
from interlace.options import Options
from interlace.torch_private.dynamo import (
    FailOnRecompileLimitHit,
    OptimizedModule,
    TorchRuntimeError,
    Unsupported,
    dynamo_config,
)

_GONE = {
    "dynamic": 'torch.compile(module, backend="interlace", dynamic=True)',
    "overlap": 'options={"overlap": False}',
}
"""Arguments of earlier releases, with what replaces them."""
MOST_COMPILED = 1 << 16
"""Limit of TorchDynamo on what it compiles for one function: ours is the option `cache_size`."""


def compile(
    module: nn.Module,
    *examples: object,
    mesh: DeviceMesh | None = None,
    options: Options | Mapping[str, object] | None = None,
    **others: object,
) -> Compiled:
    """`module`, its communication overlapped with its computation.

    The result is an `nn.Module` with the parameters, the state and the modes of `module` itself. An
    attribute that a `Compiled` has too (such as `options`) is that of `module` under `.fn`.

    With `examples`, the arguments of a call, it is compiled at once, on all ranks together; without
    them at the first call. `mesh` names the teams of process groups that no argument names.

    A module that `torch.compile` was given before is taken as it was before. Functions, code that
    cannot be one graph, and sizes that change (batch, sequence, a cache that grows) with one
    Program for a class of them, are for `torch.compile(..., backend="interlace")`.

    Raises (here with `examples`, else from the first call):
        OptionError: an argument or an option is invalid.
        UnsupportedError: an operator or a sharding cannot be lowered, or it takes several graphs.
        SoundnessError, ScheduleError: one of `Options.schedules` is unsound, or does not fit.
        AgreementError, PeerError, CommTimeoutError: another rank compiles something else, fails, or
            does not come.
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
class _Entry:
    """One combination of arguments: the module compiled for it, and how calls go without torch.

    Each has a backend of its own. TorchDynamo keeps what it compiles by backend, and so takes none
    of it for arguments that differ in what it does not guard, such as which of them overlap.
    """

    name: str
    backend: Backend
    traced: Callable[..., object]
    calls: int = 0
    direct: Direct | None = None

    def run(self, args: tuple[object, ...], kwargs: dict[str, object], observer: Any = None) -> Any:
        """A call through torch; the observer sees the runs of graphs."""
        self.backend.watch.observer = observer
        try:
            return self.traced(*args, **kwargs)
        except TorchRuntimeError as error:
            if "resolve the process group" not in str(error):
                raise
            raise TeamError(
                f"{self.name} communicates in a process group that was destroyed. fix: make the "
                "group, its mesh and the module on it anew"
            ) from error
        except (Unsupported, FailOnRecompileLimitHit, SizeError) as error:
            raise _in_words(self.name, error) from error
        finally:
            self.backend.watch.observer = None


class _Prepared(BaseException):
    """Ends a call as it comes to its graph, which is compiled and bound then."""


def _stop(graph: CompiledGraph, call: Run, args: Boxed) -> Sequence[object]:
    raise _Prepared


class Compiled(nn.Module):
    """A compiled module: call it as the module; ask it what it does.

    Note [One dictionary]: its class derives from that of the module, and its `__dict__` is that of
    the module. So parameters, modes, hooks and whatever else is read, set or called on one of them
    is the other's too; what is of the compilation alone lies in slots.
    """

    __slots__ = ("_entries", "_keys", "_mesh", "fn", "options")
    fn: Any
    options: Options
    _entries: BoundedCache[_Entry]
    _keys: CallKeys
    _mesh: DeviceMesh | None

    def __new__(cls, fn: nn.Module, mesh: DeviceMesh | None, options: Options) -> Compiled:
        compiled = object.__new__(type(f"Compiled{type(fn).__name__}", (cls, type(fn)), {}))
        object.__setattr__(compiled, "__dict__", fn.__dict__)
        return compiled

    def __init__(self, fn: nn.Module, mesh: DeviceMesh | None, options: Options) -> None:
        entries = BoundedCache[_Entry](
            name_of(fn), options.cache_size, lambda entry: entry.backend.reset()
        )
        own = {"fn": fn, "options": options, "_mesh": mesh}
        for name, value in {**own, "_keys": CallKeys(fn), "_entries": entries}.items():
            object.__setattr__(self, name, value)  # nn.Module would register `fn` as a child
        weakref.finalize(self, entries.clear)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Returns the module's result for these arguments."""
        call = self._keys.of(args, kwargs)
        entry = self._entries.get(call.key)
        if entry is not None:
            direct = entry.direct
            if direct is not None and direct.executor.engine is not None:
                return direct(call.tensors)
        through_torch: Any = torch.compiler.disable(self._through_torch)  # within others' graphs
        return through_torch(call, args, kwargs)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The compiled call."""
        return self(*args, **kwargs)

    def prepare(self, *args: object, **kwargs: object) -> Compiled:
        """Compiles for arguments like these and runs nothing. All ranks call it together."""
        call = self._keys.of(args, kwargs)
        if self._entries.get(call.key) is None:
            with contextlib.suppress(_Prepared):
                compile_only: Any = torch.compiler.disable(self._compile)
                compile_only(call, args, kwargs, _stop)
        return self

    def _through_torch(
        self, call: ModuleCall, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        """A call through TorchDynamo and AOTAutograd; the one after that which compiles shows
        whether others need them."""
        entry = self._entries.get(call.key)
        if entry is None:
            return self._compile(call, args, kwargs)
        if entry.direct is not None:  # its Executor was closed
            entry.direct, entry.calls = None, 0
        if entry.calls == 1 and [graph.kind for graph in entry.backend.graphs] == ["inference"]:
            observer = Observer(call.tensors)
            result = entry.run(args, kwargs, observer)
            entry.direct = observer.direct(result)
        else:
            result = entry.run(args, kwargs)
        entry.calls += 1
        return result

    def _compile(
        self,
        call: ModuleCall,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        observer: Any = None,
    ) -> Any:
        """The first call with such arguments."""
        backend, options = Backend(() if self._mesh is None else (self._mesh,)), self.options
        how: dict[str, Any] = {"backend": backend, "options": options, "dynamic": False}
        entry = _Entry(name_of(self.fn), backend, torch.compile(self.fn, fullgraph=True, **how))
        limits = {"recompile_limit": MOST_COMPILED, "accumulated_recompile_limit": MOST_COMPILED}
        try:
            with dynamo_config.patch(limits):
                result = entry.run(args, kwargs, observer)
            entry.calls += 1
            return result
        finally:
            if backend.graphs:  # also where the run itself failed
                self._entries.add(call.key, entry)

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
        return [graph for entry in self._entries.all()[-1:] for graph in entry.backend.graphs]

    @property
    def program(self) -> Program:
        """The overlapped Program of the forward pass."""
        if not (programs := self.programs):
            why = "".join(f": the graph {graph.unscheduled}" for graph in self.graphs[:1])
            raise ExecutorError(f"there is no Program{why}")
        return programs[0]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The overlapped Programs: forward, and backward where something needs a gradient."""
        return tuple(bound.program for bound in self.bound)

    def explain(self) -> str:
        """Each communication with its strategy, the reason and what is predicted and measured."""
        from interlace.frontend.explain import explain_bound

        return explain_bound(self.bound)

    def close(self) -> None:
        """Frees everything; a later call compiles anew."""
        self._entries.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """The same of a copy of the module, compiled anew when it is called."""
        copied = memo[id(self)] = Compiled(copy.deepcopy(self.fn, memo), self._mesh, self.options)
        return copied

    def __reduce__(self) -> object:
        return Compiled, (self.fn, self._mesh, self.options)


def _in_words(name: str, error: Exception) -> UnsupportedError:
    """The error for code that TorchDynamo would leave to Python, in words that help."""
    lines = [line.strip() for line in str(error).splitlines()]
    why = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    if isinstance(error, FailOnRecompileLimitHit):
        why = ["it reads a plain value that changes, and is compiled anew for each"]
    frames: list[Any] = [*(getattr(error, "real_stack", None) or ())]
    own = [frame for frame in frames if not frame.filename.startswith(TORCH)] or frames
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return UnsupportedError(
        f"{name} cannot be compiled as a whole{place}: {(why or lines)[0].rstrip('.')}. "
        'fix: compute that outside and pass it, or use torch.compile(..., backend="interlace"), '
        "which leaves such lines to Python"
    )
