"""Tensors of a trace that traced code leaves in Python objects, such as a cache that grows.

    with none_left({"cache": cache}):
        trace(fn)                    # cache.keys.append(k): UnsupportedError, and no k in it

`interlace.compile` runs a module once on fake tensors. What that run assigns to an attribute or
puts into a list would stay there, and no later call would do it again. TorchDynamo, which reads
the code, repeats such writes in every call.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from interlace.errors import UnsupportedError
from interlace.torch_private import FakeTensor, FunctionalTensor, is_traceable_wrapper_subclass

_LEAVES = (torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str)
"""Nothing is put into these, or only what a class or a module of Python holds."""


@contextlib.contextmanager
def none_left(roots: Mapping[str, object]) -> Iterator[None]:
    """Puts back what these objects held, where a trace has left a tensor of its own in them.

    Raises UnsupportedError then, or what the trace itself raises.
    """
    known = list(_containers(roots))
    before = [(holder, name, _items(holder)) for holder, name in known]
    own = {id(value) for _, _, items in before for value in items.values()}
    problem = ""
    try:
        yield
    finally:
        for holder, name in _containers(roots):
            left = [key for key, x in _items(holder).items() if id(x) not in own and _of_a_trace(x)]
            if left:
                problem = problem or f"{name}.{left[0]}"
        if problem:
            for holder, _, items in before:
                if {key: id(x) for key, x in _items(holder).items()} != {
                    key: id(x) for key, x in items.items()
                }:
                    _put_back(holder, items)
    if problem:
        raise UnsupportedError(
            f"the compiled code keeps a tensor in {problem}, as a cache that grows does; "
            "interlace.compile runs it once to trace it, and later calls would not write there. "
            'fix: use torch.compile(model, backend="interlace"), which repeats such writes, or '
            "return the tensor"
        )


def path_to(value: object, roots: Mapping[str, object]) -> str:
    """The name of a value that these objects hold, such as `Net.layer.scale`; else nothing."""
    for holder, name in _containers(roots):
        for key, item in _items(holder).items():
            if item is value:
                return f"{name}.{key}".replace("._modules.", ".")
    return ""


def _containers(roots: Mapping[str, object]) -> Iterator[tuple[Any, str]]:
    """The lists, dictionaries and objects that can be reached, each once, with a name."""
    seen: set[int] = set()
    todo = [(value, name) for name, value in roots.items()]
    while todo:
        value, name = todo.pop()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        items = _items(value)
        if items and not isinstance(value, tuple):
            yield value, name
        elif isinstance(value, list | deque | dict):
            yield value, name
        todo += [(item, f"{name}.{key}") for key, item in items.items()]


def _items(holder: object) -> dict[Any, Any]:
    """Items of a container or attributes of an object, by index, key or name."""
    if isinstance(holder, list | tuple | deque):
        return dict(enumerate(holder))
    if isinstance(holder, dict):
        return dict(holder)
    return dict(getattr(holder, "__dict__", ()))


def _put_back(holder: object, items: dict[Any, Any]) -> None:
    if isinstance(holder, list | deque):
        holder.clear()
        holder.extend(items.values())
        return
    held = holder if isinstance(holder, dict) else holder.__dict__
    held.clear()
    held.update(items)


def _of_a_trace(value: object) -> bool:
    """Returns True for a tensor that has no memory."""
    if isinstance(value, FakeTensor | FunctionalTensor):
        return True
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return False
    return any(_of_a_trace(getattr(value, name)) for name in value.__tensor_flatten__()[0])
