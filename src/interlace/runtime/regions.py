"""Regions: a group of aten calls that runs as one, eager or compiled by Inductor at bind time.

run = eager(region, resolve)
run(x, y)                         # a tuple, one tensor for each of the region's outputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.errors import BackendError, ProgramError, UnsupportedError
from interlace.ir import Arg, Name, Region

Resolve = Callable[[str], Callable[..., Any]]
Decode = Callable[[Arg], Any]


def _names(arg: Arg) -> set[str]:
    if isinstance(arg, Name):
        return {arg.name}
    return {name for item in arg for name in _names(item)} if isinstance(arg, tuple) else set()


def eager(region: Region, resolve: Resolve, decode: Decode) -> Callable[..., tuple[Any, ...]]:
    """The region as a function that runs its calls one after another, freeing as it goes."""
    last: dict[str, int] = {}
    for index, node in enumerate(region.body):
        for arg in (*node.args, *(value for _, value in node.kwargs)):
            last.update(dict.fromkeys(_names(arg), index))
    dead: list[list[str]] = [[] for _ in region.body]
    for name, index in last.items():
        if name not in region.outputs:
            dead[index].append(name)
    nodes = [
        (
            resolve(node.fn),
            tuple(_template(arg, decode) for arg in node.args),
            tuple((key, _template(value, decode)) for key, value in node.kwargs),
            node.outs,
            tuple(dead[index]),
        )
        for index, node in enumerate(region.body)
    ]

    def run(*args: Any) -> tuple[Any, ...]:
        values: dict[str, Any] = dict(zip(region.inputs, args, strict=True))
        for fn, given, named, outs, drop in nodes:
            result = fn(
                *[_fill(arg, values) for arg in given],
                **{key: _fill(arg, values) for key, arg in named},
            )
            if len(outs) == 1:
                values[outs[0]] = result
            else:
                values.update(zip(outs, result, strict=True))
            for name in drop:
                values.pop(name, None)
        return tuple(values[name] for name in region.outputs)

    return run


def _template(arg: Arg, decode: Decode) -> Any:
    """An argument with everything decoded but the names of values."""
    if isinstance(arg, Name):
        return arg
    if isinstance(arg, tuple):
        return [_template(item, decode) for item in arg]
    return decode(arg)


def _fill(arg: Any, values: dict[str, Any]) -> Any:
    if isinstance(arg, Name):
        return values[arg.name]
    return [_fill(item, values) for item in arg] if isinstance(arg, list) else arg


def inductor(
    region: Region, resolve: Resolve, decode: Decode, examples: Sequence[torch.Tensor]
) -> Callable[..., tuple[Any, ...]]:
    """The region compiled by Inductor for arguments like `examples`."""
    from torch._inductor import standalone_compile

    module = graph_module(region, resolve, decode)
    try:
        compiled = standalone_compile(module, list(examples), dynamic_shapes="from_example_inputs")
    except Exception as error:
        if _lacks_compiler(error):
            raise BackendError(
                f"Inductor cannot compile region {region.name!r}: there is no working C++ compiler "
                "here. Install one (g++ or clang), or set the option regions='eager'"
            ) from error
        raise UnsupportedError(
            f"Inductor cannot compile region {region.name!r} ({type(error).__name__}: {error}); "
            "set the option regions='eager'"
        ) from error

    def run(*args: Any) -> tuple[Any, ...]:
        result = compiled(*args)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    return run


def _lacks_compiler(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ in ("InvalidCxxCompiler", "FileNotFoundError"):
            return True
        if "InvalidCxxCompiler" in str(error) or "No working C++ compiler" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def graph_module(region: Region, resolve: Resolve, decode: Decode) -> torch.fx.GraphModule:
    """The region as a graph that Inductor takes."""
    graph = torch.fx.Graph()
    values: dict[str, torch.fx.Node] = {name: graph.placeholder(name) for name in region.inputs}

    def given(arg: Any) -> Any:
        return _fill(arg, values)

    for node in region.body:
        fn = resolve(node.fn)
        args = tuple(given(_template(arg, decode)) for arg in node.args)
        kwargs = {key: given(_template(value, decode)) for key, value in node.kwargs}
        made = graph.call_function(fn, args, kwargs)
        if len(node.outs) == 1:
            values[node.outs[0]] = made
        else:
            import operator

            for index, name in enumerate(node.outs):
                values[name] = graph.call_function(operator.getitem, (made, index))
    missing = [name for name in region.outputs if name not in values]
    if missing:
        raise ProgramError(f"region {region.name!r} has no value {missing[0]!r} to return")
    graph.output(tuple(values[name] for name in region.outputs))
    return torch.fx.GraphModule(torch.nn.Module(), graph)
