"""Tensors and modules that a function reaches without an argument, as Python would.

    for place in places(fn):
        place.name, place.value           # "w", a tensor (or a tuple with tensors in it)
        place.put(other)                  # what `fn` uses from then on

It goes where a user's code goes: cells, defaults and globals of functions, functions within those,
what `partial` and bound methods have, attributes and hooks of modules and of objects that are
called, and lists and dictionaries of all these. torch's own functions are not looked into.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_LIBRARIES = {"torch", "interlace", *sys.stdlib_module_names}
_MODULES_OWN = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that its parameters and buffers are known by."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is held: what it is, and how another is put there."""

    name: str
    value: Any
    put: Callable[[Any], object]


def places(fn: Callable[..., Any]) -> Iterator[Place]:
    """Where `fn` finds modules, and tensors or tuples with tensors in them; each once."""
    seen: set[int] = set()
    todo = [Place("", fn, lambda _: None)]
    while todo:
        place = todo.pop()
        tensor = isinstance(place.value, torch.Tensor)
        if not tensor and id(place.value) in seen:
            continue
        seen.add(id(place.value))
        if tensor or isinstance(place.value, nn.Module) or tensors_in(place.value):
            yield place
        if not tensor:
            todo += reversed([*_within(place.value, place.name)])


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensor that this is, or those of a tuple; nothing of what can be changed by itself."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for item in value for x in tensors_in(item)] if type(value) is tuple else []


def replaced(value: Any, other: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with other tensors."""
    if isinstance(value, torch.Tensor):
        return other(value)
    return tuple(replaced(item, other) for item in value) if type(value) is tuple else value


def _within(value: Any, name: str) -> Iterator[Place]:
    """The places of one thing."""
    if isinstance(value, FunctionType):
        yield from () if _of_library(value.__module__) else _of_function(value)
    elif isinstance(value, MethodType):
        yield Place("self", value.__self__, lambda _: None)
        yield Place(name, value.__func__, lambda _: None)
        yield from _attributes(value.__self__, "")
    elif isinstance(value, functools.partial):
        yield Place(name, value.func, lambda _: None)
        yield Place("arg", value.args, functools.partial(_put_arguments, value))
        yield from _items(value.keywords, "")
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules(prefix=name):
            yield from _attributes(module, path)
    elif isinstance(value, dict):
        yield from _items(value, name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield Place(_joined(name, i), item, functools.partial(value.__setitem__, i))
    elif type(value) is tuple:  # its tensors are put there by whoever holds it
        for i, item in enumerate(value):
            if not isinstance(item, torch.Tensor):
                yield Place(_joined(name, i), item, lambda _: None)
    elif callable(value) and not isinstance(value, type):
        yield from _attributes(value, name)


def _of_function(function: FunctionType) -> Iterator[Place]:
    """What a function closes over, has as defaults, or names in its module."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            put = functools.partial(setattr, cell, "cell_contents")
            yield Place(name, cell.cell_contents, put)
    if function.__defaults__:
        put = functools.partial(setattr, function, "__defaults__")
        yield Place("default", function.__defaults__, put)
    yield from _items(function.__kwdefaults__ or {}, "")
    for name in sorted(_names(code) & function.__globals__.keys()):
        put = functools.partial(function.__globals__.__setitem__, name)
        yield Place(name, function.__globals__[name], put)


def _names(code: CodeType) -> set[str]:
    """What a function's code names, and that of functions within it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _attributes(value: Any, name: str) -> Iterator[Place]:
    """What an object holds, and the functions of its class."""
    module = isinstance(value, nn.Module)
    if _of_library(type(value).__module__) and not module:
        return
    held = getattr(value, "__dict__", {})
    left = _MODULES_OWN if module else ()
    yield from _items({key: x for key, x in held.items() if key not in left}, name, held)
    for cls in type(value).__mro__:
        if not _of_library(cls.__module__):
            for member in vars(cls).values():
                if isinstance(member, FunctionType):
                    yield Place(name, member, lambda _: None)


def _items(values: dict[Any, Any], name: str, holder: Any = None) -> Iterator[Place]:
    holder = values if holder is None else holder
    for key, value in values.items():
        yield Place(_joined(name, key), value, functools.partial(holder.__setitem__, key))


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _put_arguments(partial: Any, args: tuple[Any, ...]) -> None:
    partial.__setstate__((partial.func, args, partial.keywords, partial.__dict__))


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
