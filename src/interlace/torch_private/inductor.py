"""Private names of Inductor, by which a region is compiled without the wrapper that
`standalone_compile` puts around it (20 microseconds a call).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes as joint_graph_passes
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import ALIGNMENT
from torch._inductor.utils import BoxedBool as BoxedBool
from torch._inductor.virtualized import V as V

inductor_config = inductor_config


def size_symbol(mode: Any, name: str, value: int) -> torch.SymInt:
    """A size of any value from 2 on, of which `value` is one, for the fake tensors of a mode."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    how = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    one = torch.empty(value, device="meta")
    return mode.from_tensor(one, symbolic_context=how, source=ConstantSource(name)).shape[0]


class _Launch:
    """A kernel as the code that Inductor writes calls it, without the tuner around its launcher."""

    def __init__(self, kernel: CachingAutotuner) -> None:
        (self.run,) = kernel.launchers


def launched_directly(compiled: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """The function that Inductor wrote for a graph, of a list that it empties, once it has run.

    It launches each kernel itself, and compares no sizes: callers know theirs. What torch puts
    around function and kernels costs more of the host than the launch does. For an input that lies
    where its kernels cannot read, it is torch's own call, which copies it.
    """
    call: Any = compiled.current_callable
    if cells := getattr(call, "__closure__", None):  # a copy of inputs may stand before it
        call = dict(zip(call.__code__.co_freevars, cells, strict=True)).get("model")
        call = getattr(call, "cell_contents", None)
    function = getattr(call, "__func__", call)
    if not isinstance(function, FunctionType) or function.__closure__:
        return compiled  # such as code in C++
    names = function.__globals__
    changed: dict[str, Any] = {
        name: _Launch(kernel)
        for name, kernel in names.items()
        if type(kernel) is CachingAutotuner and len(kernel.launchers) == 1
    }
    changed |= {name: lambda *_: None for name in names if name.startswith("assert_")}
    own = FunctionType(function.__code__, names | changed)
    run = own if function is call else MethodType(own, call.__self__)
    places = tuple(compiled.inputs_to_check)

    def run_aligned(args: list[Any]) -> Sequence[Any]:
        for place in places:
            if args[place].data_ptr() % ALIGNMENT:
                return compiled(args)
        return run(args)

    return run_aligned if places else run
