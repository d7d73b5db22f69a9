"""Where the results of replays lie: in tensors of the caller's, or in memory of the graphs'.

give = giver(results, outs, kept)     # once for each capture
give(given)                           # the results of a replay
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.comm.cuda.memory import tensor_at
from interlace.runtime.copies import copier

Give = Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


def _is_all_of(item: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a result is a whole tensor: no view with other strides or of another type."""
    alike = item.shape == tensor.shape and item.stride() == tensor.stride()
    return alike and item.dtype == tensor.dtype and item.data_ptr() == tensor.data_ptr()


def giver(
    results: Sequence[Any],
    outs: Sequence[tuple[int, torch.Tensor]],
    kept: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor] | None = None,
) -> Give:
    """What gives the results of a replay: the caller's `outs`, by number; what is `kept`, which is
    registered; and of all else copies that no replay writes again. With `others`, what lies in none
    of these is given as it is."""
    storages = None if others is None else {t.untyped_storage().data_ptr() for t in others}
    held = [_held(item, outs, kept, storages) for item in results]
    places = [item.index for item in held if isinstance(item, _Given)]
    if places and len(places) == len(held):
        if len(places) > 1:
            return operator.itemgetter(*places)
        (place,) = places
        return lambda given: (given[place],)
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

    copy: Callable[[], torch.Tensor]


def _held(
    item: Any,
    outs: Sequence[tuple[int, torch.Tensor]],
    kept: Sequence[torch.Tensor],
    storages: set[int] | None,
) -> Any:
    if isinstance(item, tuple):
        return tuple([_held(part, outs, kept, storages) for part in item])
    if not isinstance(item, torch.Tensor):
        return item
    made = torch.empty(0, dtype=item.dtype, device=item.device)
    if not item.numel():
        return _Copied(copier(made.new_empty_strided(item.shape, item.stride())))
    if any(item is tensor for tensor in kept):
        return item
    for index, tensor in outs:
        if _is_all_of(item, tensor):
            return _Given(index)
    storage = item.untyped_storage()
    if storages is not None and storage.data_ptr() not in storages:
        return item
    raw = tensor_at(storage.data_ptr(), storage.nbytes(), item.device).untyped_storage()
    view = made.set_(raw, item.storage_offset(), item.shape, item.stride())  # pyright: ignore
    return _Copied(copier(view))


def _lasting(item: Any, given: Sequence[torch.Tensor]) -> Any:
    if isinstance(item, _Copied):
        return item.copy()
    if isinstance(item, _Given):
        return given[item.index]
    if isinstance(item, tuple):
        return tuple([_lasting(part, given) for part in item])
    return item
