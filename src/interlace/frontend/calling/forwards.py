"""Which forward pass a backward pass belongs to, on all ranks alike.

    forwards.note(results)      # after the run of a forward graph
    forwards.origin(args)       # in backward: "of forward 3"

Layers alike share one compiled graph, and autograd may go backward through them in another order on
each rank. So the runs of a forward graph are counted, and a backward pass that communicates carries
the number of its own (`origin` of `Executor.run`). AOTAutograd hands nothing on but what is saved,
so a pass is known by the storages of all that it saved. Where hooks pack what is saved (to offload
it, say) the number is not found, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm import num_resets

MOST = 4096
"""Forward passes whose backward is still to come; the number of an earlier one is not found."""


class Forwards:
    """The forward passes of one compilation, by what they saved."""

    def __init__(self) -> None:
        self.num_saved = 0
        """Number of values that backward takes from a forward: the last of its results, the first
        of backward's arguments."""
        self.saved_inputs: Sequence[bool | None] = ()
        """For each tensor among these that is an input of forward, or a view of one, true if it
        lies elsewhere in each call, and false for parameters and buffers; None for the others."""
        self.are_counted = False
        """True if backward communicates; else no pass need be known."""
        self._number = self._resets = 0
        self._numbers: dict[frozenset[int], tuple[int, list[StorageWeakRef]]] = {}
        """Numbers of passes, with what tells that their storages live: it keeps their addresses
        from coming again."""

    def note(self, results: Sequence[object]) -> None:
        """A forward pass was run."""
        if not self.are_counted:
            return
        if (resets := num_resets()) != self._resets:  # ranks may have counted apart until then
            self._resets, self._number, self._numbers = resets, 0, {}
        self._number += 1
        if len(self._numbers) >= 2 * MOST:
            self._numbers = {k: item for k, item in self._numbers.items() if self._lasts(*item)}
        saved = _storages(results[len(results) - self.num_saved :])
        key = frozenset([storage._cdata for storage in saved])
        self._numbers[key] = self._number, [*map(StorageWeakRef, saved)]

    def origin(self, args: Sequence[object]) -> str | None:
        """The name of the forward pass that saved these arguments; empty where it is not known,
        None where it need not be."""
        if not self.are_counted:
            return None
        key = frozenset([storage._cdata for storage in _storages(args[: self.num_saved])])
        number, storages = self._numbers.get(key, (-MOST, []))
        return f"of forward {number}" if self._lasts(number, storages) else ""

    def _lasts(self, number: int, storages: Sequence[StorageWeakRef]) -> bool:
        recent = self._number - MOST < number <= self._number
        return recent and not any(storage.expired() for storage in storages)


def _storages(values: Sequence[object]) -> list[torch.UntypedStorage]:
    """The storages of plain tensors."""
    plain = [v for v in values if type(v) is torch.Tensor or type(v) is torch.nn.Parameter]
    return [tensor.untyped_storage() for tensor in plain]
