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
    before = list(_holders(roots))
    own = {id(value) for _, _, items in before for value in items.values()}
    left = ""
    try:
        yield
    finally:
        for _, name, items in _holders(roots):
            keys = [key for key, x in items.items() if id(x) not in own and _of_a_trace(x)]
            left = left or (f"{name}.{keys[0]}" if keys else "")
        for holder, _, items in before if left else ():
            if isinstance(holder, list | deque):
                holder.clear()
                holder.extend(items.values())
            elif not isinstance(holder, tuple):
                held = holder if isinstance(holder, dict) else holder.__dict__
                held.clear()
                held.update(items)
    if left:
        raise UnsupportedError(
            f"the compiled code keeps a tensor in {left}, as a cache that grows does; "
            "interlace.compile runs it once to trace it, and later calls would not write there. "
            'fix: use torch.compile(model, backend="interlace"), which repeats such writes, or '
            "return the tensor"
        )


def _holders(roots: Mapping[str, object]) -> Iterator[tuple[Any, str, dict[Any, Any]]]:
    """The lists, dictionaries and objects that can be reached, each once, with a name, and what
    they hold by index, key or attribute."""
    seen: set[int] = set()
    todo: list[tuple[Any, str]] = [(value, name) for name, value in roots.items()]
    while todo:
        value, name = todo.pop()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        plain = isinstance(value, dict)
        items = dict(value if plain else getattr(value, "__dict__", ()))
        if isinstance(value, list | tuple | deque):
            items = dict(enumerate(value))
        if plain or items or isinstance(value, list | deque):
            yield value, name, items
        todo += [(item, f"{name}.{key}") for key, item in items.items()]


def _of_a_trace(value: object) -> bool:
    """Returns True for a tensor that has no memory."""
    if isinstance(value, FakeTensor | FunctionalTensor):
        return True
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return False
    return any(_of_a_trace(getattr(value, name)) for name in value.__tensor_flatten__()[0])
