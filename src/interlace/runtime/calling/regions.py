"""Regions: a group of aten calls that runs as one, eager or compiled by Inductor at bind time.

run, shares = eager(region, device)
run([x, y])                       # one tensor for each of the region's outputs
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch

from interlace.errors import ProgramError, UnsupportedError
from interlace.ir import Arg, Name, Region
from interlace.ir.sizes import Int
from interlace.runtime.calling.effects import apart, may_share
from interlace.runtime.calling.operators import decode, resolve
from interlace.runtime.run_sizes import evaluator

log = logging.getLogger(__name__)

T = TypeVar("T")
Run = Callable[[list[Any]], Sequence[Any]]
"""A function of a list of arguments that it may empty, as Inductor's own are."""


def eager(region: Region, device: torch.device) -> tuple[Run, bool]:
    """The region as a function that runs its calls one after another, freeing as it goes; True if
    an output may share memory with an input or another output."""
    shares = any(may_share(resolve(node.fn)) for node in region.body)
    forward = graph_module(region, device).forward
    return lambda args: forward(*args), shares


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
SizedLayout = tuple[tuple[Int, ...], tuple[Int, ...], torch.dtype]
"""Sizes and strides, which may be named, with the element type."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A region to compile; tasks with the same `key` are equal."""

    key: str
    region: Region = field(compare=False)

    @property
    def divides(self) -> bool:
        """True if it may divide, so that a zero may be no harmless argument."""
        return any(word in self.key for word in ("div", "remainder", "fmod"))


def inductor(region: Region, layouts: tuple[Layout, ...], device: torch.device) -> tuple[Run, bool]:
    """The region compiled by Inductor for arguments of these layouts, as `eager` gives it.

    Note [One compilation for all layers]: the result depends on the body, the layouts, the device
    and Inductor's settings alone, and takes about a second; the layers of a model and its Programs
    share it. The body counts by its text: 2 and 2.0 are equal, but not to an operator.
    """
    from interlace.torch_private.inductor import inductor_config

    key = repr((region.inputs, region.body, region.outputs))
    settings = inductor_config.get_hash(), torch.are_deterministic_algorithms_enabled()
    return _compiled(_Task(key, region), layouts, device, settings)


def inductor_by_size(
    region: Region, names: tuple[str, ...], layouts: tuple[SizedLayout, ...], device: torch.device
) -> Callable[[tuple[int, ...]], Run]:
    """The region compiled by Inductor for named sizes: a function of their values that gives the
    run for these, whose outputs share no memory. Note [One compilation for all layers]; and one
    compilation is for all values that Inductor's own conditions hold for."""
    from interlace.torch_private.inductor import inductor_config

    key = repr((region.inputs, region.body, region.outputs, names, layouts))
    settings = inductor_config.get_hash(), torch.are_deterministic_algorithms_enabled()
    return _by_size(_SizedTask(key, region, names, layouts), device, settings).run_at


def forget() -> None:
    _compiled.cache_clear()
    _by_size.cache_clear()


@dataclass(frozen=True, slots=True)
class _SizedTask(_Task):
    """A region to compile for named sizes, whose layouts are in the `key`, too."""

    names: tuple[str, ...] = field(compare=False)
    layouts: tuple[SizedLayout, ...] = field(compare=False)


class _BySize:
    """The runs of a region by the values of its named sizes."""

    MOST = 1024
    """Values whose run is remembered."""

    def __init__(self, task: _SizedTask, device: torch.device) -> None:
        self._task, self._device = task, device
        self._numbers = evaluator(task.names, [(*of[0], *of[1]) for of in task.layouts])
        self._compiled: list[tuple[Callable[..., bool], Run]] = []
        """Results of Inductor, each with the condition on the values that it is for."""
        self._runs: dict[tuple[int, ...], Run] = {}

    def run_at(self, values: tuple[int, ...]) -> Run:
        """The run for these values of the names."""
        found = self._runs.get(values)
        if found is None:
            if len(self._runs) >= self.MOST:
                self._runs.clear()
            found = self._runs[values] = self._made(values)
        return found

    def _made(self, values: tuple[int, ...]) -> Run:
        if min(values) < 2:  # torch's symbols are sizes from 2 on
            run, shares = eager(self._task.region, self._device)
            return (lambda args: apart(run(args), args)) if shares else run
        call = next((call for holds, call in self._compiled if holds(values)), None)
        if call is None:
            with _told(self._task.region):
                holds, call = self._compile(values)
            sizes = dict(zip(self._task.names, values, strict=True))
            log.info("compiled region %s for sizes as of %s", self._task.region.name, sizes)
            self._compiled.append((holds, call))
        return lambda args: call([*values, *args])

    def _compile(self, values: tuple[int, ...]) -> tuple[Callable[..., bool], Run]:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        from interlace.torch_private import FakeTensorMode, unset_fake_temporarily
        from interlace.torch_private.inductor import launched_directly, size_symbol

        task, env = self._task, ShapeEnv()
        module, mode = graph_module(task.region, self._device), FakeTensorMode(shape_env=env)
        count = len(values)
        with unset_fake_temporarily():
            symbols = [size_symbol(mode, *each) for each in zip(task.names, values, strict=True)]
            with mode:
                fakes = [
                    torch.empty_strided(sizes, strides, dtype=dtype, device=self._device)
                    for sizes, strides, dtype in self._layouts(symbols)
                ]
        given = [*symbols, *fakes]
        call = _compiled_by_inductor(lambda *args: module(*args[count:]), given, mode)
        condition = env.produce_guards_expression(symbols, ignore_static=False) or "True"

        def holds(values: Sequence[int]) -> bool:
            return env.evaluate_guards_expression(condition, values)

        if not _shares(call, values, self._layouts(values), self._device, task.divides):
            return holds, launched_directly(call)
        return holds, lambda args: apart(call(list(args)), args[count:])

    def _layouts(self, values: Sequence[Any]) -> list[Layout]:
        numbers = zip(self._numbers(*values), self._task.layouts, strict=True)
        return [(each[: len(of[0])], each[len(of[0]) :], of[2]) for each, of in numbers]


@lru_cache(maxsize=512)
def _by_size(task: _SizedTask, device: torch.device, settings: tuple[Hashable, ...]) -> _BySize:
    return _BySize(task, device)


@contextlib.contextmanager
def _told(region: Region) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnsupportedError(
            f"Inductor cannot compile region {region.name!r} ({type(error).__name__}: {error}). "
            "fix: set the option regions='eager', or install a C++ compiler where there is none"
        ) from error


@lru_cache(maxsize=512)
def _compiled(
    task: _Task, layouts: tuple[Layout, ...], device: torch.device, settings: tuple[Hashable, ...]
) -> tuple[Run, bool]:
    from interlace.torch_private.inductor import launched_directly

    module = graph_module(task.region, device)
    with _told(task.region):
        call = compile_graph(module, layouts, device)
        shares = _shares(call, (), layouts, device, task.divides)
    return launched_directly(call), shares


def compile_graph(
    module: torch.fx.GraphModule, layouts: Sequence[Layout], device: torch.device
) -> Run:
    """Inductor's own function of a list: `standalone_compile` adds 20 microseconds a call."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from interlace.torch_private import FakeTensorMode, unset_fake_temporarily

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with unset_fake_temporarily(), mode:
        fakes = [
            torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            for sizes, strides, dtype in layouts
        ]
    return _compiled_by_inductor(module, fakes, mode)


def compile_symbolic(module: torch.fx.GraphModule, inference: bool) -> Run:
    """The same for a graph as it was traced, with its symbols, while TorchDynamo takes guards.
    Of an inference graph Inductor is told all that torch.compile tells it."""
    from interlace.torch_private import TracingContext, detect_fake_mode
    from interlace.torch_private.inductor import joint_graph_passes

    given = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    metadata = getattr(TracingContext.try_get(), "fw_metadata", None) if inference else None
    lasting = getattr(metadata, "static_input_indices", None) or ()  # parameters: looked at once
    more = [joint_graph_passes] if inference else []
    return _compiled_by_inductor(module, given, detect_fake_mode(given), more, lasting)


def _compiled_by_inductor(
    module: Callable[..., Any],
    given: Sequence[Any],
    mode: Any,
    passes: Sequence[Callable[[torch.fx.GraphModule], torch.fx.GraphModule]] = (),
    lasting: Sequence[int] = (),
) -> Run:
    from torch.fx.experimental.proxy_tensor import make_fx

    from interlace.torch_private import (
        DisableAutocast,
        TracingContext,
        enable_python_dispatcher,
        tracing,
        unset_fake_temporarily,
    )
    from interlace.torch_private.inductor import BoxedBool, V, compile_fx_inner, select_decomp_table

    contexts = tracing(TracingContext(mode)), torch.no_grad(), V.set_fake_mode(mode)
    with unset_fake_temporarily(), DisableAutocast(), contexts[0], contexts[1], contexts[2]:
        with mode, enable_python_dispatcher():
            graph = make_fx(module, decomposition_table=select_decomp_table())(*given)
        for each in passes:
            graph = each(graph)
        output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
        # Every output has the strides that it would have eager: the Program counts on them.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        off = BoxedBool(False)  # whole Programs are captured in CUDA graphs, or nothing is
        facts = {"is_inference": True, "cudagraphs": off, "static_input_idxs": list(lasting)}
        return compile_fx_inner(graph, list(given), **facts)


def _shares(
    call: Run,
    values: Sequence[int],
    layouts: Sequence[Layout],
    device: torch.device,
    divides: bool,
) -> bool:
    """True if an output shares memory with another tensor; the run, for these values of symbols,
    also tunes and loads kernels, and is the one in which Inductor's own checks of sizes are made
    (`launched_directly`)."""
    given = [_harmless(layout, device, divides) for layout in layouts]
    results = call([*values, *given])
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return any(one is not other for one, other in zip(results, apart(results, given), strict=True))


def _harmless(layout: Layout, device: torch.device, divides: bool) -> torch.Tensor:
    """Zeros, which index anything; ones where integers may divide."""
    sizes, strides, dtype = layout
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    count = 0 if 0 in sizes else last + 1
    fill = 1 if divides and not dtype.is_floating_point else 0
    return torch.full((count,), fill, dtype=dtype, device=device).as_strided(sizes, strides)


def unpack(results: Sequence[T], count: int, fn: str) -> Sequence[T]:
    """The results of an operator that gives several, as many as the region has names for."""
    if len(results) != count:
        raise ProgramError(f"{fn} gives {len(results)} results, and the region names {count}")
    return results


def graph_module(region: Region, device: torch.device) -> torch.fx.GraphModule:
    """The region as a graph with names of our own: FX runs its text, so names could be code."""
    graph = torch.fx.Graph()
    values: dict[str, torch.fx.Node] = {
        name: graph.placeholder(f"input_{place}") for place, name in enumerate(region.inputs)
    }

    def given(arg: Arg) -> Any:
        if isinstance(arg, Name):
            return values[arg.name]
        return [given(item) for item in arg] if isinstance(arg, tuple) else decode(arg, device)

    for node in region.body:
        args = tuple(given(arg) for arg in node.args)
        kwargs = {key: given(value) for key, value in node.kwargs}
        made = graph.call_function(resolve(node.fn), args, kwargs)
        if len(node.outs) == 1:
            values[node.outs[0]] = made
            continue
        made = graph.call_function(unpack, (made, len(node.outs), node.fn))
        for index, name in enumerate(node.outs):
            values[name] = graph.call_function(operator.getitem, (made, index))
    for name in (name for name in region.outputs if name not in values):
        raise ProgramError(f"region {region.name!r} has no value {name!r} to return")
    graph.output(tuple(values[name] for name in region.outputs))
    return torch.fx.GraphModule(torch.nn.Module(), graph)
