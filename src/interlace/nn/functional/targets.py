"""Targets that are no class: noted by the device, raised by the host when it next looks.

    loss = cross_entropy(logits, target)     # NaN in the rows whose target is no class
    raise_pending()                          # TargetError, once the device has come that far

The kernels write what they found to host memory that the device sees, so that nothing is copied
and nobody waits; every call of a loss looks there first.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from interlace.errors import TargetError
from interlace.nn.cross_entropy.steps import new_word


class Notes:
    """The word of one kind of device, and the host's view of it."""

    def __init__(self, kind: str) -> None:
        self.word = new_word(kind)
        self._seen = (ctypes.c_int64 * 3).from_address(self.word.data_ptr())

    def check(self) -> None:
        """Raises what was noted, once."""
        if self._seen[0]:
            row, target, classes = self._seen[0] - 1, self._seen[1], self._seen[2]
            self._seen[0] = 0
            raise TargetError(describe(row, target, classes) + "; its loss and gradient were NaN")


@lru_cache(maxsize=2)
def notes_of(kind: str) -> Notes:
    """The notes of "cpu" or of "cuda"."""
    return Notes(kind)


def raise_pending() -> None:
    """Raises `TargetError` if a loss met a target that is no class since this was last asked.

    Each call of a loss asks as well. On CUDA what has not run yet is not known: to be sure that
    all is, call `torch.cuda.synchronize()` before.
    """
    notes_of("cpu").check()
    if torch.cuda.is_initialized():
        notes_of("cuda").check()


def describe(row: int, target: int, classes: int) -> str:
    """Where a target is no class."""
    return (
        f"the target of row {row} is {target}, where there are classes 0 to {classes - 1}; "
        "mark rows that do not count with `ignore_index`"
    )


def check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Raises `TargetError` if one is no class; the host waits for the device."""
    flat = target.reshape(-1)
    wrong = ((flat < 0) | (flat >= classes)) & (flat != ignore_index)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise TargetError(describe(row, int(flat[row]), classes))
