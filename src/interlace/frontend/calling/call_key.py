"""Keys that identify calls of a compiled module, without a walk through its modules.

    keys = CallKeys(module)
    call = keys.of(args, kwargs)
    entry = entries.get(call.key)         # compiled for calls like this one, or None

A key has all that a compilation rests on: how the arguments nest, their plain values, and of every
tensor (the module's parameters and buffers too) sizes, strides, element type, device, layout and
whether it shares memory with another; types of modules; training, gradient and autocast modes.

Note [A module that has not changed]
    To walk a module and describe its parameters takes many times longer than all else here. So
    what was found is kept as a `Snapshot`, with what shows that it still holds: every submodule has
    the very children that it had, its parameters and buffers are of the same kinds and lie where
    they lay, and the same of them are one tensor. No tensor is kept alive, nor referred to weakly,
    which `torch.utils.swap_tensors` would refuse.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from interlace.frontend.calling.arguments import strides_of
from interlace.torch_private import is_any_autocast_enabled, is_traceable_wrapper_subclass, pytree

_PLAIN = (torch.Tensor, nn.Parameter)
_VALUES = {int, float, bool, str, type(None)}
"""Types of most arguments that are no tensors."""


class ModuleCall(NamedTuple):
    """Key of a call, and its tensors."""

    key: Hashable
    names: tuple[str, ...]
    """Names of the module's tensors, which come first among `tensors`."""
    tensors: list[torch.Tensor]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of a module and its parts, by name; one that is shared stands
    once."""
    named: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in known:
                    known.add(id(tensor))
                    named[f"{path}.{name}" if path else name] = tensor
    return named


class CallKeys:
    """The keys of one module's calls."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._snapshot: Snapshot | None = None

    def of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> ModuleCall:
        """The call with these arguments, in the modes of now."""
        snapshot = self._snapshot
        own = snapshot.tensors() if snapshot is not None else None
        if snapshot is None or own is None:
            snapshot = self._snapshot = Snapshot(self._module)
            own = [*tensors_of(self._module).values()]
        given: list[torch.Tensor] = []
        described = _described(args, given), _described(kwargs, given)
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *_autocast())
        tensors = own + given
        shared = None if snapshot.apart_from(given) else _sharing(tensors)
        return ModuleCall((described, snapshot.known, shared, modes), snapshot.names, tensors)


def _described(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """An argument as part of a key; its tensors are added to `tensors`, in the order of pytree.

    What is neither nested nor a tensor counts by its value; as itself alone where it has no hash.
    """
    kind = type(value)
    if kind in _VALUES:
        return kind, value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _kind(value)
    if kind is tuple or kind is list:
        return kind, *[_described(item, tensors) for item in value]
    if kind is dict:
        return kind, *value, *[_described(item, tensors) for item in value.values()]
    leaves, spec = pytree.tree_flatten(value)
    if not spec.is_leaf():
        return spec, *[_described(leaf, tensors) for leaf in leaves]
    try:
        hash(value)
    except TypeError:
        return kind, id(value)
    return kind, value


class Snapshot:
    """The modules' tensors and modes as they were: Note [A module that has not changed]."""

    def __init__(self, module: nn.Module) -> None:
        named = tensors_of(module)
        modules = list(module.modules())
        self.names = tuple(named)
        kinds = tuple((type(module), module.training) for module in modules)
        self.known = Hashed((self.names, tuple(map(_kind, named.values())), kinds))
        starts = [_start(tensor) for tensor in named.values()]
        self._starts = {start for start in starts if start}
        self._lasts = None not in starts
        self._apart = self._lasts and _sharing(list(named.values())) is None
        self._modules = [weakref.ref(module) for module in modules]
        self._facts = _facts(modules)[0] if self._lasts else []

    def tensors(self) -> list[torch.Tensor] | None:
        """The modules' tensors as they are now, if a new look would find the same."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        if not self._lasts or len(modules) < len(self._modules):
            return None
        facts, tensors = _facts(modules)
        return tensors if facts == self._facts else None

    def apart_from(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns True if no two tensors of the modules and these can share memory."""
        starts = {_start(tensor) for tensor in tensors}
        return (
            self._apart
            and len(starts) == len(tensors)
            and starts.isdisjoint((None, 0))
            and self._starts.isdisjoint(starts)
        )


class Hashed:
    """A part of keys that is hashed once, and as a rule compared with itself."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: object) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Hashed) and self.value == other.value)


def _facts(modules: Sequence[nn.Module]) -> tuple[list[object], list[torch.Tensor]]:
    """All that a compilation rests on of these modules, in a row: their modes and children (by
    identity, unique while they live), and of each tensor its name, which of the modules' tensors it
    is, type, address, layout, dtype, device and `requires_grad`; and the tensors, as `tensors_of`
    has them."""
    facts: list[object] = []
    places: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    for module in modules:
        facts.append(module.training)
        facts += module._modules
        facts += map(id, module._modules.values())
        for held in (module._parameters, module._buffers):
            facts += held
            for tensor in held.values():
                kind = type(tensor)
                facts.append(kind)
                if tensor is None:
                    continue
                place = places.setdefault(id(tensor), len(tensors))
                facts.append(place)
                if place < len(tensors):
                    continue
                tensors.append(tensor)
                local: Any = tensor
                if kind is DTensor:
                    local = tensor._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
                    facts += tensor._spec, type(local)  # pyright: ignore
                facts += local.untyped_storage().data_ptr(), local.data_ptr(), local.shape
                facts += local.stride(), local.dtype, local.device, tensor.requires_grad
    return facts, tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _start(tensor: torch.Tensor) -> int | None:
    """Where a tensor's storage begins, 0 if it is empty; None of one that is not like most."""
    if type(tensor) not in _PLAIN and type(tensor) is not DTensor:
        return None
    local = _local(tensor)
    return local.untyped_storage().data_ptr() if type(local) in _PLAIN else None


def _kind(tensor: torch.Tensor) -> Hashable:
    """A tensor as part of a key, with the tensors that it is a wrapper of."""
    kind = type(tensor)
    own = kind, tensor.shape, strides_of(tensor), tensor.dtype, tensor.device, tensor.requires_grad
    if kind in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return own
    held = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    inner = [_kind(item) for item in held if isinstance(item, torch.Tensor)]
    return *own, getattr(tensor, "_spec", None), *inner


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
    """Device types for which autocast is on, each with its dtype."""
    if not is_any_autocast_enabled():
        return ()
    types = [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    return tuple((name, torch.get_autocast_dtype(name)) for name in types)
