"""Copies of tensors that have the strides of what they are copies of.

copy = copier(tensor)        # once
copy()                       # what it holds now, whatever is written to the tensor later
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with what is expanded only once: torch writes nothing that stands there twice."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    sizes = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides)]  # noqa: B905
    return tensor.as_strided(sizes, strides)


def copier(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What copies a tensor with its strides, which other Programs are made for: those of a view
    with gaps, such as one part of a product that is split, are not those of its clone."""
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor.clone
    facts = {"dtype": tensor.dtype, "device": tensor.device}
    sizes, strides, source = tensor.shape, tensor.stride(), once(tensor)

    def copy() -> torch.Tensor:
        made = torch.empty_strided(sizes, strides, **facts)
        once(made).copy_(source)
        return made

    return copy


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that torch has conjugated or negated only by a mark."""
    return copier(tensor)() if tensor.is_conj() or tensor.is_neg() else tensor
