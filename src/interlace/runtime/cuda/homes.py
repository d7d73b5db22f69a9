"""Where the results of replays lie: in tensors of the caller's, or in memory of the graphs'.

homes = [home_of(item, outs, kept) for item in results]      # once for each capture
give = giver(results, homes, static=False)
give(given)                                                  # the results of a replay
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.comm.cuda.memory import tensor_at

Home = int | torch.Tensor | tuple["Home", ...] | None
"""The tensor of the caller's that a result is, by number, or registered; None: it is the graph's,
or no tensor."""
Give = Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


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


def giver(results: Sequence[Any], homes: Sequence[Home], static: bool) -> Give:
    """What gives the results of a replay: the caller's tensors, and of the graph's own copies that
    no replay writes again, or, if `static`, these themselves."""
    places = [home for home in homes if isinstance(home, int)]
    if places and len(places) == len(homes):
        if len(places) > 1:
            return operator.itemgetter(*places)
        (place,) = places
        return lambda given: (given[place],)
    if static and all(home is None for home in homes):
        same = tuple(results)
        return lambda given: same
    pairs = [(_own(item, home, static), home) for item, home in zip(results, homes, strict=True)]
    return lambda given: tuple([_lasting(item, home, given, static) for item, home in pairs])


def _own(item: Any, home: Home, static: bool) -> Any:
    """What is kept of a result: nothing of the caller's; unless `static` gives it away, a graph's
    own is not owned either, so that other graphs of its pool can use the same memory."""
    if isinstance(home, tuple):
        return tuple([_own(part, at, static) for part, at in zip(item, home, strict=True)])
    if home is not None:
        return None
    if static or not isinstance(item, torch.Tensor) or not item.numel():
        return item
    held = item.untyped_storage()
    storage = tensor_at(held.data_ptr(), held.nbytes(), item.device).untyped_storage()
    empty = torch.empty(0, dtype=item.dtype, device=item.device)
    return empty.set_(storage, item.storage_offset(), item.shape, item.stride())  # pyright: ignore


def _lasting(item: Any, home: Home, given: Sequence[torch.Tensor], static: bool) -> Any:
    """A result in memory that no replay writes again: the caller's own, or a copy."""
    if isinstance(home, int):
        return given[home]
    if isinstance(home, torch.Tensor):
        return home
    if isinstance(home, tuple):
        return tuple([_lasting(*pair, given, static) for pair in zip(item, home, strict=True)])
    return item if static or not isinstance(item, torch.Tensor) else item.clone()
