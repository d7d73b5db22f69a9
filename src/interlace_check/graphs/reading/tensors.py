"""Storages and the tensors in them, as buffers and views of `interlace.ir`.

A storage is a flat buffer of bytes, and a tensor of it the box that its sizes, strides and offset
span. Where a box cannot be written as steps of a view, its hull stands for it; where sizes are
unknown or symbolic, the whole storage does. Either way no access is missed.

    >>> str(box_view("b0", 64, (4, 2), (4, 1), 0, 4))   # the left half of a 4 x 4 matrix of f32
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.ir.types import MAX_BYTES
from interlace.ir.view import View

MAX_RANK = 32
"""Dimensions of a tensor beyond which the hull stands for its box."""


@dataclass(slots=True)
class Storage:
    """Memory that a node allocates, or that the caller passes."""

    number: int
    maker: str
    """The node that makes it."""
    num_bytes: int | None
    """None where it is unknown."""
    origin: str
    """`input`, `constant` or `made`."""
    stream: str
    """The stream on which it is allocated, and on which its memory is used again."""
    is_host: bool = False
    written: bool = False
    """True if a node writes it after it was made."""
    last_use: int = -1
    """The place of the last node that holds a tensor of it; the host lets go of it then."""
    kept: bool = False
    """True if it outlives the graph."""
    recorded: set[str] = field(default_factory=set[str])
    """Streams that `record_stream` named: its memory is not used again before they are done."""

    @property
    def name(self) -> str:
        """Its buffer's name."""
        return f"b{self.number}"


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The sizes of a tensor as its node's metadata gives them, all integers, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int
    storage_bytes: int | None
    is_host: bool


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor: a view of a storage."""

    storage: Storage
    view: View
    facts: TensorFacts | None = None


def facts_of(value: Any) -> TensorFacts | None:
    """Facts of a (fake) tensor; None where it is no tensor, or its sizes are symbolic."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        if value.layout is not torch.strided:
            return None
        sizes = tuple(value.shape)
        strides = tuple(value.stride())
        offset = value.storage_offset()
        storage_bytes = value.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
        return None  # a subclass without a storage, or a tensor in an odd state
    if not isinstance(offset, int) or any(type(size) is not int for size in (*sizes, *strides)):
        return None
    known = storage_bytes if type(storage_bytes) is int and storage_bytes <= MAX_BYTES else None
    host = value.device.type == "cpu"
    return TensorFacts(sizes, strides, offset, value.itemsize, known, host)


def made_bytes(facts: TensorFacts | None) -> int | None:
    """Bytes of the storage that a new tensor of these facts has."""
    if facts is None:
        return None
    end = _end(facts.sizes, facts.strides, facts.offset) * facts.itemsize
    known = facts.storage_bytes
    number = end if known is None else max(end, known)
    return number if number <= MAX_BYTES else None


def tensor_view(storage: Storage, facts: TensorFacts | None) -> View:
    """The view of a storage that a tensor is."""
    if facts is None or storage.num_bytes is None:
        return View(storage.name)
    return box_view(
        storage.name, storage.num_bytes, facts.sizes, facts.strides, facts.offset, facts.itemsize
    )


def box_view(
    name: str,
    num_bytes: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int,
    itemsize: int,
) -> View:
    """The bytes of a box of elements: exact where steps can say it, else its hull or all."""
    whole = View(name)
    if 0 in sizes:
        return whole.slice(0, 0, 0)
    end = _end(sizes, strides, offset) * itemsize
    if end > num_bytes:
        return whole  # the metadata does not fit the storage
    hull = whole.slice(0, offset * itemsize, end)
    if len(sizes) > MAX_RANK:
        return hull
    dims = [
        (stride * itemsize, size)
        for size, stride in zip(sizes, strides, strict=True)
        if size != 1 and stride
    ]
    dims.sort(reverse=True)
    merged = _merged([*dims, (1, itemsize)])
    if len(merged) == 1:
        return hull
    return _steps(whole, merged, num_bytes, offset * itemsize) or hull


def _end(sizes: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """The element after the last."""
    if 0 in sizes:
        return offset
    return offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Dimensions, each as (stride, size) in bytes, with those that step evenly made one."""
    merged = [dims[0]]
    for stride, size in dims[1:]:
        last_stride, last_size = merged[-1]
        if last_stride == stride * size:
            merged[-1] = (stride, last_size * size)
        else:
            merged.append((stride, size))
    return merged


def _steps(whole: View, dims: list[tuple[int, int]], num_bytes: int, start: int) -> View | None:
    """The box as a reshape of the storage and a slice of each dimension, if it is one."""
    first = dims[0][0]
    if num_bytes % first:
        return None
    extents = [num_bytes // first]
    for (outer, _), (inner, _) in itertools.pairwise(dims):
        if outer % inner:
            return None
        extents.append(outer // inner)
    view, rest = whole.view(*extents), start
    for dim, ((stride, size), extent) in enumerate(zip(dims, extents, strict=True)):
        at, rest = divmod(rest, stride)
        if at + size > extent:
            return None
        view = view.slice(dim, at, at + size)
    return view
