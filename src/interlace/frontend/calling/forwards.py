"""Which forward pass a backward pass belongs to, on all ranks alike.

    forwards.note(results)      # after the run of a forward graph
    forwards.origin(args)       # in backward: "of forward 3"

Layers alike share one compiled graph, and autograd may go backward through them in another order on
each rank. So the runs of a forward graph are counted, and a backward pass that communicates carries
the number of its own (`origin` of `Executor.run`). AOTAutograd hands nothing on but what is saved,
so a pass is known by the storage of a tensor that it made and saved, or of all where it made none.
Where hooks pack what is saved (to offload it, say) the number is not found, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from interlace.comm import counts

MOST = 4096
"""Forward passes whose backward is still to come; the number of an earlier one is not found."""

Saved = Literal["state", "input", "shown", "handed"]
"""Whose a saved tensor is: a parameter or buffer; another input of forward, which lies elsewhere in
each call; forward's own and the caller's, who has it too; backward's alone."""


class Forwards:
    """The forward passes of one compilation, by what they saved."""

    def __init__(self) -> None:
        self.num_saved = 0
        """Number of values that backward takes from a forward: the last of its results, the first
        of backward's arguments."""
        self.saved: Sequence[Saved] = ()
        """Whose each tensor among these is."""
        self.marks = slice(None)
        """Which of the tensors that backward takes tell one pass from another."""
        self.are_counted = False
        """True if backward communicates; else no pass need be known."""
        self._number = self._resets = 0
        self._numbers: dict[frozenset[StorageWeakRef], int] = {}
        """Numbers of passes. A reference to a storage is equal to one to the same storage alone:
        while there is one, its address does not come again."""

    def note(self, results: Sequence[object]) -> None:
        """A forward pass was run."""
        if not self.are_counted:
            return
        if (resets := sum(counts.values())) != self._resets:  # until then ranks may count apart
            self._resets, self._number, self._numbers = resets, 0, {}
        self._number += 1
        if len(self._numbers) >= 2 * MOST:
            oldest = self._number - MOST
            self._numbers = {key: n for key, n in self._numbers.items() if n > oldest}
        self._numbers[self._key(results[len(results) - self.num_saved :])] = self._number

    def origin(self, args: Sequence[object]) -> str | None:
        """The name of the forward pass that saved these arguments; empty where it is not known,
        None where it need not be."""
        if not self.are_counted:
            return None
        number = self._numbers.get(self._key(args[: self.num_saved]), -MOST)
        return f"of forward {number}" if number > self._number - MOST else ""

    def _key(self, saved: Sequence[object]) -> frozenset[StorageWeakRef]:
        """The storages of plain tensors among those that tell one pass from another."""
        tensors = [v for v in saved if isinstance(v, torch.Tensor)][self.marks]
        plain = [v for v in tensors if type(v) is torch.Tensor or type(v) is Parameter]
        return frozenset([StorageWeakRef(tensor.untyped_storage()) for tensor in plain])
