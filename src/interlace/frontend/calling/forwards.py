"""Which forward pass a backward pass belongs to, on all ranks alike.

    forwards.note(results, args, bound.kept)    # after the run of a forward graph
    forwards.origin(args)                       # in backward: "of forward 3"

Layers alike share one compiled graph, and autograd may go backward through them in another order on
each rank. So the runs of a forward graph are counted, and a backward pass that communicates carries
the number of its own (`origin` of `Executor.run`). AOTAutograd hands nothing on but what is saved,
so the number is kept by the storage of the last tensor that the forward made, if that is saved; or
of all that it hands on. Where hooks pack what is saved (to offload it, say) the number is not
found, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm import num_resets

Storages = tuple[int, ...]


class Forwards:
    """The forward passes of one compilation of which what they saved still lives."""

    def __init__(self) -> None:
        self.saved: int | None = None
        """Number of values that backward takes from a forward; None if backward does not
        communicate, so that no pass need be identified."""
        self._number, self._resets, self._room = 0, 0, 64
        self._names: dict[Storages, tuple[list[StorageWeakRef], str]] = {}
        self._place = 0
        """Place among a backward's arguments of the tensor that identified its forward last."""

    def note(self, results: Sequence[object], args: Sequence[object], kept: list[int]) -> None:
        """A forward pass was run: what is saved are the last of its results. `kept` has the places
        of those that the number is kept by; empty: the first of such passes, which finds them."""
        if (resets := num_resets()) != self._resets:  # ranks may have counted apart until then
            self._resets, self._number = resets, 0
        self._number += 1
        if len(self._names) >= self._room:
            self._names = {
                key: item for key, item in self._names.items() if not any(map(_ended, item[0]))
            }
            self._room = max(64, 2 * len(self._names))
        if not kept:
            kept += self._telling(results, args)
        storages = [r.untyped_storage() for r in (results[i] for i in kept) if _is_plain(r)]
        if storages:
            key = tuple(sorted({storage._cdata for storage in storages}))
            self._names[key] = [*map(StorageWeakRef, storages)], f"of forward {self._number}"

    def _telling(self, results: Sequence[object], args: Sequence[object]) -> list[int]:
        """The place of the last result that was made, if it is saved; or of all handed on."""
        given, found = {_storage(arg) for arg in args}, [*map(_storage, results)]
        made = [place for place, storage in enumerate(found) if storage and storage not in given]
        if made and made[-1] >= len(results) - (self.saved or 0):
            return made[-1:]
        return [place for place, storage in enumerate(found) if storage and storage in given]

    def origin(self, args: Sequence[object]) -> str:
        """The name of the forward pass that saved these arguments; empty where none is known."""
        places = [*range(len(args))]
        for place in [*places[self._place : self._place + 1], *places]:
            item = self._names.get((_storage(args[place]),))
            if item is not None and not any(map(_ended, item[0])):
                self._place = place
                return item[1]
        there = {*map(_storage, args)}
        for key, (refs, name) in reversed(self._names.items()):
            if there.issuperset(key) and not any(map(_ended, refs)):
                return name
        return ""


def _storage(value: object) -> int:
    """The identity of a plain tensor's storage; 0 for what has none."""
    return value.untyped_storage()._cdata if _is_plain(value) else 0


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def _ended(ref: StorageWeakRef) -> bool:
    return ref.expired()
