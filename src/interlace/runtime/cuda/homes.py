"""Where the results of replays lie: in tensors of the caller's, or in memory of the graphs'.

homes = [home_of(item, outs, kept) for item in results]      # once for each capture
give = giver(results, homes)
give(given)                                                  # the results of a replay
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def giver(
    results: Sequence[Any], homes: Sequence[Home], others: Sequence[torch.Tensor] | None = None
) -> Give:
    """What gives the results of a replay: the caller's tensors, and of all else copies that no
    replay writes again. With `others`, what lies in none of these is given as it is."""
    places = [home for home in homes if isinstance(home, int)]
    if places and len(places) == len(homes):
        if len(places) > 1:
            return operator.itemgetter(*places)
        (place,) = places
        return lambda given: (given[place],)
    storages = None if others is None else {t.untyped_storage().data_ptr() for t in others}
    held = [_held(item, home, storages) for item, home in zip(results, homes, strict=True)]
    if not any(isinstance(item, tuple | _Copied | _Given) for item in held):
        same = tuple(held)
        return lambda given: same
    return lambda given: tuple([_lasting(item, given) for item in held])


@dataclass(frozen=True, slots=True)
class _Given:
    """A result that is a tensor of the caller's."""

    index: int


@dataclass(frozen=True, slots=True)
class _Copied:
    """A result that is to be copied. It does not own the memory: other graphs of the same pool can
    use it, and so can others where it is the caller's."""

    tensor: torch.Tensor


def _held(item: Any, home: Home, storages: set[int] | None) -> Any:
    if isinstance(home, tuple):
        return tuple([_held(part, at, storages) for part, at in zip(item, home, strict=True)])
    if isinstance(home, int):
        return _Given(home)
    if not isinstance(item, torch.Tensor) or home is not None:
        return item
    made = torch.empty(0, dtype=item.dtype, device=item.device)
    if not item.numel():
        return _Copied(made.new_empty_strided(item.shape, item.stride()))
    storage = item.untyped_storage()
    if storages is not None and storage.data_ptr() not in storages:
        return item
    raw = tensor_at(storage.data_ptr(), storage.nbytes(), item.device).untyped_storage()
    view = made.set_(raw, item.storage_offset(), item.shape, item.stride())  # pyright: ignore
    return _Copied(view)


def _lasting(item: Any, given: Sequence[torch.Tensor]) -> Any:
    if isinstance(item, _Copied):
        return item.tensor.clone()
    if isinstance(item, _Given):
        return given[item.index]
    if isinstance(item, tuple):
        return tuple([_lasting(part, given) for part in item])
    return item
