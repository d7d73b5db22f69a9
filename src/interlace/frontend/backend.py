"""The torch.compile backend: `torch.compile(model, backend="interlace")`.

    compiled = torch.compile(model, backend="interlace", options={"strategy": "ring"})
    compiled(tokens).sum().backward()

AOTAutograd takes the model apart into a forward and a backward graph of plain operators and
functional collectives; each becomes a Program, is overlapped, proved sound and bound. Both are
prepared when the forward is compiled, so that no rank sets up anything in the middle of a backward
pass.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import CalibrationError, InterlaceError, OptionError
from interlace.frontend.calling.arguments import without_waiting
from interlace.frontend.calling.tracing import symbolic_sizes
from interlace.frontend.compiled_graph import CompiledGraph, Setting
from interlace.frontend.dynamo import (
    GraphOrigin,
    fix_numbers,
    guard_sizes,
    look_for_lost_interrupts,
    source_name,
)
from interlace.frontend.importing.exchanges import KnownPlaces
from interlace.frontend.importing.grouped import equal_groups
from interlace.frontend.importing.nodes import is_state, label, name_groups
from interlace.frontend.importing.types import device_of
from interlace.frontend.partition import Partition
from interlace.frontend.portable import PortableCall, travels
from interlace.ir.program import no_collections
from interlace.options import Options
from interlace.runtime.machine import shared_machine
from interlace.torch_private import FakeTensorMode, TracingContext, tracing
from interlace.torch_private.dynamo import (
    InstructionTranslator,
    ShortenTraceback,
    aot_autograd,
    assume_constant_result,
    functorch_config,
    innermost_backend,
)

log = logging.getLogger(__name__)
"""Off by default: `TORCH_LOGS=interlace.frontend`, or `logging` itself, shows what is compiled."""


class Compilation:
    """The compilers that AOTAutograd calls for one graph, and what they made."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._began = time.perf_counter()
        self.graphs: list[CompiledGraph] = []

    def compilers(self) -> dict[str, Any]:
        """The keyword arguments that AOTAutograd takes."""
        options = self.setting.options
        try:
            machine = shared_machine(options, self.setting.device)
        except CalibrationError:  # all ranks are told as they bind
            machine = None
        cut = Partition(options.memory, machine, options.timeout_s, self.setting.places)
        return {
            "fw_compiler": lambda gm, _: self.compiled_graph("forward", gm),
            "bw_compiler": lambda gm, _: self.compiled_graph("backward", gm),
            "inference_compiler": lambda gm, _: self.compiled_graph("inference", gm),
            "partition_fn": cut,
            "keep_inference_input_mutations": True,
        }

    def run(
        self,
        trace: Callable[[Sequence[object]], Callable[..., Sequence[object]]],
        inputs: Sequence[object],
        name: str,
    ) -> Callable[..., Sequence[object]]:
        """Has AOTAutograd trace for these inputs, and binds what came of it; returns the callable
        for inputs like these. `name` is what the log calls it."""
        plain, wrap = without_waiting(inputs)
        with no_collections():  # torch's graphs are millions of objects, all in use
            with compiling():
                call = trace(plain)
            self.prepare(name)
        return wrap(call)

    def prepare(self, name: str) -> None:
        """Binds the graphs that have concrete sizes, forward and backward together, or none;
        `name` is what the log calls it."""
        try:
            for graph in self.graphs:
                graph.prepare()
        except BaseException:
            self.close()
            raise
        kinds = ", ".join(
            f"{graph.kind} ({graph.unscheduled})" if graph.unscheduled else graph.kind
            for graph in self.graphs
        )
        log.info("compiled %s: %s, in %.3f s", name, kinds, time.perf_counter() - self._began)

    def close(self) -> None:
        """Frees what is bound; a later call binds anew."""
        for graph in self.graphs:
            graph.close()

    def compiled_graph(self, kind: str, gm: fx.GraphModule) -> CompiledGraph:
        """One graph of AOTAutograd, not bound yet."""
        if kind == "inference":
            name_groups(gm.graph)
            equal_groups(gm.graph)  # the others were one graph before
        if kind == "backward":
            keep_saved()
        places = gm.graph.find_nodes(op="placeholder")
        found = meshes_in(node.meta.get("val") for node in places)
        meshes = tuple(dict.fromkeys((*self.setting.meshes, *found)))
        graph = CompiledGraph(kind, gm, replace(self.setting, meshes=meshes))
        self.graphs.append(graph)
        return graph


class NotCompiled(ShortenTraceback):
    """Stands for an error of ours inside TorchDynamo, whose caller gets the error itself.

    TorchDynamo keeps what a backend returns, and nothing of a compilation that raised: so the next
    call compiles anew, when a late peer may have arrived. TorchDynamo wraps other errors in one of
    its own; of this class it calls `remove_dynamo_frames` at the end, and raises the result.
    """

    def __init__(self, error: InterlaceError) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> object:
        """The error that it stands for."""
        return self.error


class Backend:
    """The backend's function, with the graphs that `torch.compiler.reset()` frees."""

    __name__ = "interlace"

    def __init__(self) -> None:
        self._graphs: weakref.WeakValueDictionary[int, CompiledGraph]
        self._graphs = weakref.WeakValueDictionary()
        self._places = KnownPlaces()
        self._count = itertools.count()
        self._first = 0
        """The number of the first graph since the last reset."""

    @property
    def graphs(self) -> list[CompiledGraph]:
        """Graphs that torch still keeps, in the order in which they were compiled."""
        return [graph for number, graph in self._graphs.items() if number >= self._first]

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        *,
        options: Options | Mapping[str, object] | None = None,
        **others: object,
    ) -> Callable[..., object]:
        """Compiles one graph of TorchDynamo."""
        try:
            for name, value in others.items():  # such as `mode`
                if value is not None:
                    raise OptionError(
                        f"torch.compile({name}={value!r}) is for other backends: give this one "
                        'options, such as options={"graph": True} for CUDA graphs'
                    )
            return self.compiled(gm, example_inputs, options_from(options))
        except InterlaceError as error:
            if travels():  # TorchDynamo is done
                raise
            raise NotCompiled(error) from error.with_traceback(None)  # without frames of ours

    def __reduce__(self) -> str:
        """There is one for the process, and copies of a compiled model share it."""
        return "backend"

    def reset(self) -> None:
        """Frees every Executor; `torch.compiler.reset()` calls it."""
        self._places.clear()
        self._first = next(self._count)
        for graph in list(self._graphs.values()):
            graph.close()

    def compiled(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        options: Options,
    ) -> Callable[..., object]:
        """Returns the callable that runs one graph."""
        look_for_lost_interrupts()
        places = gm.graph.find_nodes(op="placeholder")
        sources = list(map(source_name, places))
        guard_sizes(places)
        fix_numbers(places)
        labels = tuple(label(source) if source else "" for source in sources)
        state = frozenset(i for i, source in enumerate(sources) if source and is_state(source))
        if travels():
            return PortableCall(gm, options, labels, state, torch.is_grad_enabled())
        return self.compiled_as(gm, example_inputs, options, labels, state)

    def compiled_as(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        options: Options,
        labels: tuple[str, ...],
        state: frozenset[int],
    ) -> Callable[..., object]:
        """Returns the callable that runs one graph, whose arguments have these names, and these
        positions where they are parameters and buffers."""
        origin = GraphOrigin.of(gm)
        setting = Setting(
            options,
            meshes_in(example_inputs),
            labels,
            state,
            device_of(example_inputs),
            origin=origin,
            places=self._places,
        )
        compilation = Compilation(setting)
        trace: Any = aot_autograd(**compilation.compilers())
        call = compilation.run(lambda plain: trace(gm, plain), example_inputs, origin.name)
        self._graphs.update(zip(self._count, compilation.graphs, strict=False))
        return call


backend = Backend()
"""Backend of `torch.compile(backend="interlace")`; see Note [Backward is compiled with forward]."""


@assume_constant_result
def compiles_here() -> bool:
    """Returns True if TorchDynamo, which traces the caller, compiles for this backend."""
    asked: Any = InstructionTranslator.current_tx().output.compiler_fn
    asked = innermost_backend(asked)
    return getattr(asked, "compiler_fn", asked) is backend


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context with the settings that AOTAutograd needs to compile for this backend.

    Note [Backward is compiled with forward]: AOTAutograd leaves it until the first backward pass,
    where a rank that sets up would meet others that do not.

    Note [Generator states are tensors]: on CUDA torch saves the state of recomputed dropout in
    generators that it hands in as arguments, for its own CUDA graphs. A Program saves it as a small
    tensor, on every device alike (`interlace.frontend.importing.normalise`).
    """
    settings = functorch_config.patch(
        force_non_lazy_backward_lowering=True, graphsafe_rng_functionalization=False
    )
    context = TracingContext.try_get()  # TorchDynamo's; `keep_saved` asks it
    own = TracingContext(FakeTensorMode()) if context is None else None
    try:
        with settings, symbolic_sizes(), tracing(own) if own else contextlib.nullcontext():
            yield
    finally:
        forget_tensors(own)


def forget_tensors(context: TracingContext | None) -> None:
    """Drops torch's weak references to the tensors of a trace that has ended: `Module.to` cannot
    convert a DTensor parameter that has one. TorchDynamo does this for registered backends."""
    if context is not None and context.fake_mode is not None:
        context.tensor_to_context.clear()
        describer = context.fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def keep_saved() -> None:
    """Tells AOTAutograd that a backward may run again: it then reuses no memory of what was saved.

    It reckons that a backward which is compiled before the first one ran does, and would refuse
    `retain_graph=True`.
    """
    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    if donated := getattr(metadata, "bw_donated_idxs", None):
        donated.clear()


def options_from(options: Options | Mapping[str, object] | None) -> Options:
    """Options from what `torch.compile(options=...)` was given."""
    if isinstance(options, Options):
        return options
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options must be a mapping or Options, not {type(options).__name__}")
    return Options.from_dict(dict(options or {}))


def meshes_in(values: Iterable[object]) -> tuple[DeviceMesh, ...]:
    """The device meshes among arguments: themselves, and those of DTensors."""
    found = [getattr(value, "device_mesh", value) for value in values]
    real = [getattr(value, "real_obj", value) for value in found]
    return tuple(dict.fromkeys(mesh for mesh in real if isinstance(mesh, DeviceMesh)))
