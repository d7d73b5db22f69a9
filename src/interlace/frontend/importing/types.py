"""Translation of torch's terms to those of a Program: element types, buffers, arguments.

    >>> buffer_like("x", torch.empty(2, 3), "input")
    Buffer(name='x', dtype=<DType.f32: 'f32'>, shape=(2, 3), kind='input', ...)

Values that come from FX are fake tensors; their sizes may be symbolic (symbols.py).

A graph runs on one device. On a GPU a few tensors stay on the CPU even so: scalars that torch mixes
with CUDA tensors, states of a random number generator. They go in and out of torch's own operators
and nowhere else: nothing copies, sends or fuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from interlace.errors import UnsupportedError
from interlace.frontend.importing.symbols import sizes_of
from interlace.ir import Box, Buffer, DType, Where, contiguous_strides
from interlace.ir.sizes import Int
from interlace.runtime.values import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Args = list[Any]
"""A node's arguments by position: nodes, numbers, dtypes, lists of these; see `nodes.bound`."""

NOWHERE = Where(0, {}, {})
"""Who asks for boxes of an imported Program, in which nothing depends on the rank."""


def dtype_of(dtype: torch.dtype) -> DType:
    """The element type's short name."""
    found = _NAMES.get(dtype)
    if found is None:
        raise UnsupportedError(
            f"element type {dtype} has no name in a Program: cast it to one of "
            f"{', '.join(str(known).removeprefix('torch.') for known in _NAMES)}"
        )
    return found


def buffer_like(name: str, tensor: torch.Tensor, kind: str) -> Buffer:
    """A buffer with the sizes, strides and element type of a (fake) tensor."""
    sizes, strides = sizes_of(tensor.shape), sizes_of(tensor.stride())
    return Buffer(
        name,
        dtype_of(tensor.dtype),
        sizes,
        kind,
        strides=None if strides == contiguous_strides(sizes) else strides,
    )


def same_layout(box: Box, tensor: torch.Tensor) -> bool:
    """Returns True if a box has a tensor's sizes, element type and strides."""
    sizes = sizes_of(tensor.shape)
    if box.sizes != sizes or box.dtype != dtype_of(tensor.dtype):
        return False
    return same_strides(box, sizes_of(tensor.stride()))


def same_strides(box: Box, strides: Sequence[Int]) -> bool:
    """Returns True if a box has these strides wherever a stride has a meaning."""
    pairs = zip(box.sizes, box.strides, strides, strict=True)
    return box.numel == 0 or all(size == 1 or own == other for size, own, other in pairs)


def scalar_word(value: object, device: torch.device) -> Any:
    """An argument that is no tensor, as a Program spells it; other values come back unchanged."""
    if isinstance(value, torch.dtype):
        return dtype_of(value)
    if isinstance(value, torch.device):
        return "@device" if value.type == device.type else value.type
    if isinstance(value, torch.layout):
        if value != torch.strided:
            raise UnsupportedError(f"layout {value}: only dense (strided) tensors are supported")
        return "@strided"
    if isinstance(value, torch.memory_format):
        return str(value).replace("torch.", "@")
    return value


def device_of(values: Iterable[object]) -> str:
    """The one device that is no CPU among the tensors, as `torch.device` takes it, else `cpu`."""
    found = {
        str(value.device)
        for value in values
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")
    }
    if len(found) > 1:
        raise UnsupportedError(
            f"tensors are on {' and '.join(sorted(found))}: a compiled function runs on one device "
            "of each process; move them there, or compile the parts apart"
        )
    return found.pop() if found else "cpu"


def on_host(value: torch.Tensor, main: torch.device) -> bool:
    """Returns True if a tensor of a graph on `main` stays on the CPU."""
    return value.device.type == "cpu" != main.type
