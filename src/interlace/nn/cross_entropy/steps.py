"""The cross-entropy of one rank's share of the vocabulary, as steps between which ranks exchange.

    shards = Shards.alone(logits.shape[-1])
    problem = Problem(logits, target, None, Terms(), shards, new_word("cpu"))
    steps = steps_for(logits)
    losses, kept = steps.alone(problem)                     # one rank
    grad = steps.gradient(problem, kept, upstream, None)

Several ranks gather what `steps.pack` makes of the stats, and all finish from the same numbers in
the same order: their losses are the same bits. The steps are Triton kernels on CUDA (launch.py) and
plain torch elsewhere and for float64 (reference.py); both have these functions:

    stats(problem)                  [parts, K, rows]: maximum, sum of exponentials, ... of each row
    pack(problem, stats)            [K, rows]: parts joined, and the target's logit
    losses(problem, packed)         of all ranks' [ranks, K, rows], each row's loss and what
                                    backward needs: [2 to 4, rows]
    alone(problem)                  the same where no other rank has classes
    total(losses, kept, weighted, mean, denominator)
                                    their sum over the divisor, and the divisor
    gradient(problem, kept, upstream, divisor, into)  of the logits: a tensor, or written into one;
                                    by upstream (None: 1) over the divisor (None: 1)
    count(problem)                  of the rows that count: what an unweighted mean is divided by
    scale(tensors, by)              up to three of one type in place, by one number on the device;
                                    by 1 costs nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

FAST = (torch.bfloat16, torch.float16, torch.float32)
"""Element types of logits that the Triton kernels take."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a row's loss."""

    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0


LARGE = 48_000
"""Classes that a rank is taken to have where the host does not know the other ranks'."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Layout of the classes on the ranks: those of one rank alone, or of several, whose `sizes`
    (int64, one for each rank) lie on the device, where kernels read them.
    """

    rank: int
    world: int
    classes: int
    """All classes, where one rank has them; else 0."""
    sizes: torch.Tensor | None = None

    @property
    def each(self) -> int:
        """The classes of a rank as all ranks reckon them alike, whatever they have."""
        return LARGE if self.sizes is not None else self.classes

    @staticmethod
    def alone(classes: int) -> Shards:
        """All classes on this rank."""
        return Shards(0, 1, classes)


@dataclass(frozen=True, slots=True)
class Problem:
    """Logits (..., local classes) with their targets (..., contiguous), class weights, and the
    rest; `word` is where a target out of range is noted (see `new_word`), its row counted from
    `first_row`.
    """

    logits: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None
    terms: Terms
    shards: Shards
    word: torch.Tensor
    first_row: int = 0

    @property
    def num_stats(self) -> int:
        """K: maximum, sum, target's logit; with smoothing sum and mass; the target's weight."""
        return 3 + 2 * (self.terms.smoothing != 0.0) + (self.weight is not None)

    @property
    def num_kept(self) -> int:
        """Numbers a row that backward needs: maximum, log of the sum (inf where a row does not
        count), with smoothing mass; weight.
        """
        return 2 + (self.terms.smoothing != 0.0) + (self.weight is not None)


def new_word(kind: str) -> torch.Tensor:
    """Host memory for a bad target: its row + 1 (0: none), its value, and the number of classes.

    For CUDA it is pinned, and kernels write to it directly: the host looks without waiting.
    """
    return torch.zeros(3, dtype=torch.int64, pin_memory=kind == "cuda")


def steps_for(logits: torch.Tensor) -> ModuleType:
    """The kernels, or their reference."""
    return _steps(logits.is_cuda and logits.dtype in FAST)


@cache
def _steps(fast: bool) -> ModuleType:
    if fast and find_spec("triton") is not None:
        from interlace.nn.cross_entropy import launch as cross_entropy_launch

        return cross_entropy_launch
    from interlace.nn.cross_entropy import reference as cross_entropy_reference

    return cross_entropy_reference
