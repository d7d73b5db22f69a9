"""Where the results of replays lie: in tensors of the caller's, or in memory of the graphs'.

homes = [home_of(item, outs, kept) for item in results]      # once for each capture
results = tuple(lasting(item, home, given) for item, home in zip(results, homes))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

Home = int | torch.Tensor | tuple["Home", ...] | None
"""The tensor of the caller's that a result is, by number, or registered; None: it is the graph's,
or no tensor."""
Pick = Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


def home_of(
    item: Any, outs: Sequence[tuple[int, torch.Tensor]], kept: Sequence[torch.Tensor]
) -> Home:
    """Where a result of a graph lies: the caller's `outs`, by number, or registered `kept`."""
    if isinstance(item, tuple):
        return tuple([home_of(part, outs, kept) for part in item])
    if not isinstance(item, torch.Tensor) or not item.numel():
        return None
    if any(item is tensor for tensor in kept):
        return item
    return next((index for index, tensor in outs if _is_all_of(item, tensor)), None)


def _is_all_of(item: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a result is a whole tensor: no view with other strides or of another type."""
    alike = item.shape == tensor.shape and item.stride() == tensor.stride()
    return alike and item.dtype == tensor.dtype and item.data_ptr() == tensor.data_ptr()


def picker(homes: Sequence[Home]) -> Pick | None:
    """What gives all results, if they are all the caller's."""
    places = [home for home in homes if isinstance(home, int)]
    if not places or len(places) < len(homes):
        return None
    if len(places) > 1:
        return operator.itemgetter(*places)
    (place,) = places
    return lambda given: (given[place],)


def lasting(item: Any, home: Home, given: Sequence[torch.Tensor]) -> Any:
    """A result in memory that no replay writes again: the caller's own, or a copy."""
    if isinstance(home, int):
        return given[home]
    if isinstance(home, torch.Tensor):
        return home
    if isinstance(home, tuple):
        return tuple([lasting(part, at, given) for part, at in zip(item, home, strict=True)])
    return item.clone() if isinstance(item, torch.Tensor) else item
