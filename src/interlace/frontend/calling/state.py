"""The modules and tensors that a function uses without an argument, as arguments.

AOTAutograd sees what it is given: a parameter that is no argument would be a constant. The modules
that a function is, or refers to, are found, and lent other tensors while it is traced:

    state = State.of(fn)                  # fn may be a module, a bound method, a closure
    with state.lent(tensors):
        fn(x)                             # uses `tensors` for state.tensors() and state.held()

`State.reached(fn)` looks further, at every call: into what held.py lists. That takes longer, so it
is for functions that were seen to use a tensor which `State.of` does not know.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback

from interlace.frontend.calling.held import Place, places, replaced, tensors_in
from interlace.frontend.importing.locs import MODULE_KEY


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
        found: dict[int, tuple[str, torch.Tensor]] = {}
        names: set[str] = set()
        for place in self._places():
            for tensor in tensors_in(place.value):
                if id(tensor) not in found:
                    name = _unique(re.sub(r"\W+", "_", place.name), names)
                    names.add(name)
                    found[id(tensor)] = name, tensor
        return dict(found.values())

    def _places(self) -> list[Place]:
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
    """What a function is bound to, closes over, has as defaults, or names in its module."""
    bound = getattr(fn, "__self__", None)
    if bound is not None:
        yield "self", bound
    plain = getattr(fn, "__func__", getattr(fn, "func", fn))
    for value in getattr(fn, "args", ()) if hasattr(fn, "func") else ():
        yield type(value).__name__.lower(), value
    code = getattr(plain, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            yield name, cell.cell_contents
    names = code.co_varnames[: code.co_argcount][-len(plain.__defaults__ or ()) :]
    yield from zip(names, plain.__defaults__ or (), strict=False)
    yield from (plain.__kwdefaults__ or {}).items()
    for name in code.co_names:
        if name in plain.__globals__:
            yield name, plain.__globals__[name]


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
