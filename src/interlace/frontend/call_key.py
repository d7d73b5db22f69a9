"""What a call of a compiled function is known by, found in a few microseconds.

    keys = CallKeys(State.of(fn))
    call = keys.of(args, kwargs)
    entry = entries.get(call.key)         # compiled for calls like this one, or None

A key has all that a compilation rests on: how the arguments nest, their plain values, and of every
tensor (the modules' parameters and buffers too) sizes, strides, element type, device, layout and
whether it shares memory with another; training, gradient and autocast modes.

Note [A module that has not changed]
    To walk a module and describe its parameters takes ten times longer than all else here. So what
    was found is kept as a `Snapshot`, with what shows that it still holds: every submodule has the
    very children, parameters and buffers that it had, and each of these lies where it lay, in the
    same layout. References are weak, so that a parameter that was replaced is freed at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from interlace.frontend.specialise import signature
from interlace.frontend.state import State

_LEAVES = {torch.Tensor, nn.Parameter, DTensor, int, float, bool, str, type(None)}
"""Types of most arguments, which nest nothing."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, taken apart, and what it is known by."""

    key: Hashable
    leaves: list[Any]
    spec: pytree.TreeSpec
    names: tuple[str, ...]
    """Of the modules' tensors, which come first among `tensors`."""
    tensors: list[torch.Tensor]


class CallKeys:
    """The keys of one function's calls."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._snapshot: Snapshot | None = None
        self._flat: dict[tuple[Any, ...], Known] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with these arguments, in the modes of now."""
        snapshot = self._snapshot
        held = snapshot.tensors() if snapshot is not None else None
        if snapshot is None or held is None:
            snapshot = self._snapshot = Snapshot(self._state)
            held = list(self._state.tensors().values())
        leaves, spec = self._flatten(args, kwargs)
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        fixed = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *_autocast())
        tensors = [*held, *given]
        shared = None if snapshot.apart_from(given) else _sharing(tensors)
        kinds = tuple(map(_kind, given))
        key = (spec, _hashable(fixed), snapshot.known, kinds, shared, modes)
        return Call(key, leaves, spec.value, snapshot.names, tensors)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Known]:
        """The leaves and how they nest, which is remembered where none does."""
        leaves = [*args, *kwargs.values()]
        if not all(type(leaf) in _LEAVES for leaf in leaves):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            return leaves, Known(spec)
        names = len(args), *kwargs
        spec = self._flat.get(names)
        if spec is None:
            spec = self._flat[names] = Known(pytree.tree_structure((args, kwargs)))
        return leaves, spec


class Snapshot:
    """The modules' tensors and modes as they were: Note [A module that has not changed]."""

    def __init__(self, state: State) -> None:
        named = state.tensors()
        tensors = list(named.values())
        modules = [m for _, root in state.modules for m in root.modules()]
        self.names = tuple(named)
        self.known = Known((tuple(map(_kind, tensors)), tuple(m.training for m in modules)))
        storages = [_local(tensor).untyped_storage()._cdata for tensor in tensors]
        self._storages = frozenset(storages)
        self._apart = len(self._storages) == len(storages)
        self._modules = [(weakref.ref(m), m.training) for m in modules]
        self._parts = _parts(modules)
        self._tensors = [(weakref.ref(t), _spec(t)) for t in tensors]
        self._marks = _marks(tensors)
        plain = (torch.Tensor, nn.Parameter)
        self._lasts = all(type(t) in plain or type(t) is DTensor for t in tensors) and all(
            type(_local(t)) in plain for t in tensors
        )

    def tensors(self) -> list[torch.Tensor] | None:
        """The modules' tensors, if all is as it was."""
        modules: list[nn.Module] = []
        for of_module, training in self._modules:
            module = of_module()
            if module is None or module.training is not training:
                return None
            modules.append(module)
        found: list[torch.Tensor] = []
        for of_tensor, spec in self._tensors:
            tensor = of_tensor()
            if tensor is None or _spec(tensor) is not spec:
                return None
            found.append(tensor)
        same = self._lasts and _parts(modules) == self._parts and _marks(found) == self._marks
        return found if same else None

    def apart_from(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no two tensors of the modules and these share memory."""
        storages = {_local(tensor).untyped_storage()._cdata for tensor in tensors}
        return self._apart and len(storages) == len(tensors) and self._storages.isdisjoint(storages)


class Known:
    """A part of keys that is hashed once, and as a rule compared with itself."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Known) and self.value == other.value)


def _parts(modules: Sequence[nn.Module]) -> list[int]:
    """Which children, parameters and buffers each has: unique while all of them live."""
    found: list[int] = []
    for module in modules:
        for values in (module._modules, module._parameters, module._buffers):
            if values:
                found += map(id, values.values())
            found.append(0)
    return found


def _spec(tensor: torch.Tensor) -> Any:
    return tensor._spec if type(tensor) is DTensor else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _marks(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Of each where it lies and how, and whether it wants a gradient."""
    found: list[Any] = []
    for tensor in tensors:
        local: Any = tensor._local_tensor if type(tensor) is DTensor else tensor
        found += local.data_ptr(), local.shape, local.stride(), local.dtype, local.device
        found.append(tensor.requires_grad)
    return found


def _kind(tensor: torch.Tensor) -> Hashable:
    spec = getattr(tensor, "_spec", None)
    types = type(tensor), type(getattr(tensor, "_local_tensor", None))  # which may still be awaited
    return signature([tensor]), tensor.requires_grad, tensor.device, types, spec


def _sharing(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Which arguments share memory, and where in it: a graph that writes one counts on that."""
    plain = [_local(tensor) for tensor in tensors]
    storages = [tensor.untyped_storage()._cdata for tensor in plain]
    if len(set(storages)) == len(storages):
        return None
    return tuple(
        (storages.index(storage), tensor.storage_offset())
        for storage, tensor in zip(storages, plain, strict=True)
    )


def _autocast() -> tuple[Hashable, ...]:
    """What autocast is on, by device."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    types = [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    return tuple((name, torch.get_autocast_dtype(name)) for name in types)


def _hashable(fixed: Sequence[Any]) -> Hashable:
    """Plain arguments as part of a key; one that has no hash counts as itself alone."""
    found: list[Hashable] = []
    for value in fixed:
        try:
            hash(value)
            found.append((type(value), value))
        except TypeError:
            found.append((type(value), id(value)))
    return tuple(found)
