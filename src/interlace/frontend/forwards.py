"""Which forward pass a backward pass belongs to, on all ranks alike.

    forwards.note(results, args)         # after the run of a forward graph
    forwards.origin(args)                # in backward: "of forward 3"

Layers alike share one compiled graph, and autograd may go backward through them in another order on
each rank. So the runs of a forward graph are counted, and a backward pass carries the number of its
own (`Executor.run_for`). AOTAutograd hands nothing on but what is saved, so the number is kept by
the storage of the last tensor that the forward made; or of all that it hands on, if it saves none.
Where hooks pack what is saved (to offload it, say) the number is not found, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm import num_resets

Storages = tuple[int, ...]


class Forwards:
    """The forward passes of one compilation of which what they saved still lives."""

    def __init__(self) -> None:
        self._number, self._resets, self._room = 0, 0, 64
        self._names: dict[Storages, tuple[list[StorageWeakRef], str]] = {}
        self._place = 0
        """Of what told it last, among a backward's arguments."""

    def note(self, results: Sequence[Any], args: Sequence[Any]) -> None:
        """A forward pass was run: saved tensors are the last of its results."""
        if (resets := num_resets()) != self._resets:  # ranks may have counted apart until then
            self._resets, self._number = resets, 0
        self._number += 1
        if len(self._names) >= self._room:
            self._names = {
                key: item for key, item in self._names.items() if not any(map(_ended, item[0]))
            }
            self._room = max(64, 2 * len(self._names))
        given = {_storage(arg) for arg in args}
        made = next((r for r in reversed(results) if _storage(r) not in given), None)
        handed_on = [r for r in results if _storage(r) and _storage(r) in given]
        for kept in ([] if made is None else [made], handed_on):
            if kept:
                refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in kept]
                key = tuple(sorted({*map(_storage, kept)}))
                self._names[key] = refs, f"of forward {self._number}"

    def origin(self, args: Sequence[Any]) -> str:
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


def _storage(value: Any) -> int:
    """The identity of a plain tensor's storage; 0 for what has none."""
    plain = type(value) is torch.Tensor or type(value) is torch.nn.Parameter
    return value.untyped_storage()._cdata if plain else 0


def _ended(ref: StorageWeakRef) -> bool:
    return ref.expired()
