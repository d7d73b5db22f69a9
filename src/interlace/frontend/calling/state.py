"""The modules and tensors that a function uses without an argument, as arguments.

AOTAutograd sees what it is given: a parameter that is no argument would be a constant. The modules
that a function is, or refers to, are found, and lent other tensors while it is traced:

    state = State.of(fn)                  # fn may be a module, a bound method, a closure
    with state.lent(tensors):
        fn(x)                             # uses `tensors` for state.tensors() and state.held()

`State.reached(fn)` looks further, at every call, where a user's code goes: cells, defaults and
globals of functions, functions within those, what `partial` and bound methods have, attributes and
hooks of modules and of objects that are called, and lists and dictionaries of all these. torch's
own functions are not looked into. That takes longer, so it is for functions that were seen to use a
tensor which `State.of` does not know.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback

from interlace.frontend.importing.nodes import MODULE_KEY

_LIBRARIES = {"torch", "interlace", *sys.stdlib_module_names}
_MODULES_OWN = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that its parameters and buffers are known by."""


@dataclass(frozen=True, slots=True)
class State:
    """The modules behind a function, by the prefix of their parameters' names."""

    modules: tuple[tuple[str, nn.Module], ...]
    root: Callable[..., Any] | None = None
    """The function, where tensors that it reaches by other ways count too."""

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> State:
        """The modules that `fn` is, is bound to, or refers to."""
        if isinstance(fn, nn.Module):
            return cls((("", fn),))
        return cls(_modules(_referred(fn)))

    @classmethod
    def reached(cls, fn: Callable[..., Any]) -> State:
        """The same, and all modules and tensors that a walk from `fn` finds."""
        return cls(_modules((place.name, place.value) for place in places(fn)), fn)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer, by name; one that is shared stands once."""
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self.modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                found[f"{prefix}.{name}" if prefix else name] = tensor
        return found

    def held(self) -> dict[str, torch.Tensor]:
        """Every tensor that is reached by other ways, as things are now."""
        if self.root is None:
            return {}
        found: dict[int, tuple[str, torch.Tensor]] = {}
        names: set[str] = set()
        for place in self._places():
            for tensor in tensors_in(place.value):
                if id(tensor) not in found:
                    name = _unique(re.sub(r"\W+", "_", place.name), names)
                    names.add(name)
                    found[id(tensor)] = name, tensor
        return dict(found.values())

    def _places(self) -> list[Reference]:
        reached = () if self.root is None else places(self.root)
        return [place for place in reached if tensors_in(place.value)]

    @contextlib.contextmanager
    def lent(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Has the function use `tensors`, in the order of `tensors()` and then `held()`, and note
        where nodes are.

        One that stands in several places, as do tied weights, is replaced in all of them.
        """
        own, reached = [*self.tensors().values(), *self.held().values()], self._places()
        given = {id(mine): theirs for mine, theirs in zip(own, tensors, strict=True)}
        members: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (held, name, mine)
            for part in {id(part): part for _, m in self.modules for part in m.modules()}.values()
            for held in (part._parameters, part._buffers)
            for name, mine in held.items()
            if mine is not None
        ]
        with contextlib.ExitStack() as stack:
            for prefix, module in self.modules:
                stack.enter_context(_named_modules(module, f"{prefix}." if prefix else ""))
            try:
                for held, name, mine in members:
                    held[name] = given.get(id(mine), mine)  # one may be hidden from `tensors()`
                for place in reached:
                    place.put(replaced(place.value, lambda mine: given[id(mine)]))
                yield
            finally:
                for place in reached:
                    place.put(place.value)
                for held, name, mine in members:
                    held[name] = mine


def referred(fn: Callable[..., Any]) -> dict[str, Any]:
    """Objects that a function (not a module) is bound to, closes over or names, by name."""
    return {} if isinstance(fn, nn.Module) else dict(_referred(fn))


def _modules(values: Iterable[tuple[str, Any]]) -> tuple[tuple[str, nn.Module], ...]:
    """The modules among these, each once and under a name of its own."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in values:
        if isinstance(value, nn.Module) and id(value) not in found:
            found[id(value)] = _unique(name, {name for name, _ in found.values()}), value
    if len(found) == 1:
        return tuple(("", module) for _, module in found.values())
    return tuple(found.values())


def _unique(name: str, others: Collection[str]) -> str:
    return _unique(f"{name}_", others) if name in others else name


def _referred(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the objects that a function is bound to, closes over, has as defaults or names."""
    bound = getattr(fn, "__self__", None)
    if bound is not None:
        yield "self", bound
    plain = getattr(fn, "__func__", getattr(fn, "func", fn))
    for value in getattr(fn, "args", ()) if hasattr(fn, "func") else ():
        yield type(value).__name__.lower(), value
    if isinstance(plain, FunctionType):
        code, defaults = plain.__code__, plain.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from zip(names, defaults, strict=True)
        yield from ((place.name, place.value) for place in _of_function(plain))


@contextlib.contextmanager
def _named_modules(module: nn.Module, prefix: str) -> Iterator[None]:
    """Notes on traced nodes which submodule they come from, as TorchDynamo would."""
    open_contexts: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            context = fx_traceback.annotate({MODULE_KEY: name})
            context.__enter__()
            open_contexts.append(context)

        return hook

    def leave(*_: Any) -> None:
        open_contexts.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as stack:
        for name, child in module.named_modules():
            if prefix or name:
                path = f"{prefix}{name}".rstrip(".")
                before = child.register_forward_pre_hook(enter(path), prepend=True)
                after = child.register_forward_hook(leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


# -- what a function reaches by other ways ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """Where something is held: what it is, and how another is put there."""

    name: str
    value: Any
    put: Callable[[Any], object]


def places(fn: Callable[..., Any]) -> Iterator[Reference]:
    """Where `fn` finds modules, and tensors or tuples with tensors in them; each once."""
    seen: set[int] = set()
    todo = [Reference("", fn, lambda _: None)]
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


def _within(value: Any, name: str) -> Iterator[Reference]:
    """The places of one thing."""
    if isinstance(value, FunctionType):
        yield from () if _of_library(value.__module__) else _of_function(value)
    elif isinstance(value, MethodType):
        yield Reference("self", value.__self__, lambda _: None)
        yield Reference(name, value.__func__, lambda _: None)
        yield from _attributes(value.__self__, "")
    elif isinstance(value, functools.partial):
        yield Reference(name, value.func, lambda _: None)
        yield Reference("arg", value.args, functools.partial(_put_arguments, value))
        yield from _items(value.keywords, "")
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules(prefix=name):
            yield from _attributes(module, path)
    elif isinstance(value, dict):
        yield from _items(value, name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield Reference(_joined(name, i), item, functools.partial(value.__setitem__, i))
    elif type(value) is tuple:  # its tensors are put there by whoever holds it
        for i, item in enumerate(value):
            if not isinstance(item, torch.Tensor):
                yield Reference(_joined(name, i), item, lambda _: None)
    elif callable(value) and not isinstance(value, type):
        yield from _attributes(value, name)


def _of_function(function: FunctionType) -> Iterator[Reference]:
    """Yields what a function closes over, has as defaults, or names in its module."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            put = functools.partial(setattr, cell, "cell_contents")
            yield Reference(name, cell.cell_contents, put)
    if function.__defaults__:
        put = functools.partial(setattr, function, "__defaults__")
        yield Reference("default", function.__defaults__, put)
    yield from _items(function.__kwdefaults__ or {}, "")
    for name in sorted(_names(code) & function.__globals__.keys()):
        put = functools.partial(function.__globals__.__setitem__, name)
        yield Reference(name, function.__globals__[name], put)


def _names(code: CodeType) -> set[str]:
    """Global and attribute names used by a function's code and by the functions within it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _attributes(value: Any, name: str) -> Iterator[Reference]:
    """Yields the attributes of an object, and the functions of its class."""
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
                    yield Reference(name, member, lambda _: None)


def _items(values: dict[Any, Any], name: str, holder: Any = None) -> Iterator[Reference]:
    holder = values if holder is None else holder
    for key, value in values.items():
        yield Reference(_joined(name, key), value, functools.partial(holder.__setitem__, key))


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _put_arguments(partial: Any, args: tuple[Any, ...]) -> None:
    partial.__setstate__((partial.func, args, partial.keywords, partial.__dict__))


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
