"""Grids of the cross-entropy's kernels, and where these find the rows of the logits.

layout = KernelRows(problem)
count, each = layout.cut.parts()
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch

from interlace.nn.cross_entropy.steps import Problem

WARPS = 8
"""Warps of a program, at most: fewer where a row is short."""
UNROLL = 2
"""Loads of 16 bytes that each thread has under way at a time."""
PROGRAMS = 2048
"""Rows are split into parts until there are about so many programs: some four waves of an H200."""
PART_TILES = 2
"""Tiles that a part of a row has at least."""
GRAD_TILES = 8
"""Tiles that a program of the backward pass has at least."""
ALIGNMENT = 16
"""Bytes; the kernels are compiled for pointers that are multiples of it."""

Constants = tuple[tuple[str, Any], ...]
"""The constants that a kernel is compiled for, by name."""


def flags_of(problem: Problem) -> Constants:
    """The options of a problem that kernels are compiled for."""
    shards, terms = problem.shards, problem.terms
    return (
        ("RANK", shards.rank),
        ("WORLD", shards.world),
        ("MEASURED", shards.sizes is not None),
        ("SMOOTH", terms.smoothing != 0.0),
        ("WEIGHTED", problem.weight is not None),
        ("ZLOSS", terms.z_loss != 0.0),
    )


class Cut:
    """A kernel's way through rows of one shape and place; it holds no tensor and no address."""

    def __init__(
        self,
        flags: Constants,
        steps: list[tuple[int, int]],
        shape: torch.Size,
        size: int,
        skew: int,
    ) -> None:
        self.local = local = shape[-1]
        self.rows = prod(shape[:-1])
        (_, outer_step), (inner, step) = [(1, 0), (1, 0), *steps][-2:]
        self.places = inner, outer_step, step, skew
        self.vec = vec = 16 // size
        even = not (skew or local % vec or step % vec or outer_step % vec)
        gaps = (step - local, outer_step - inner * local)[: len(steps)]
        self.alike = not (skew or any(gap % vec for gap in gaps))
        """Rows of a dense gradient begin as far above a 16-byte boundary as those of the logits."""
        unroll, self.warps = UNROLL, WARPS
        while unroll > 1 and unroll * self.warps * 32 * vec >= 2 * local:
            unroll //= 2
        while self.warps > 1 and unroll * self.warps * 32 * vec >= 2 * local:
            self.warps //= 2
        self.tile = unroll * self.warps * 32  # in groups of `vec` elements
        self.dims = max(1, len(steps))
        self.flags: Constants = (*flags, ("DIMS", self.dims))
        lanes = ("U", unroll), ("LANES", 32 * self.warps), ("VEC", vec)
        self.variant: Constants = (*self.flags, ("EVEN", even), *lanes)

    def parts(self) -> tuple[int, int]:
        """The number of parts of a row, and of groups a part, which are whole tiles."""
        tiles = -(-(-(-self.local // self.vec) + 1) // self.tile)
        wanted = min(-(-PROGRAMS // max(self.rows, 1)), -(-tiles // PART_TILES))
        each = -(-tiles // max(wanted, 1))
        return -(-tiles // each), each * self.tile


@lru_cache(maxsize=512)
def cut_of(
    flags: Constants, shape: torch.Size, strides: tuple[int, ...], size: int, skew: int
) -> Cut | None:
    """The cut of logits of that shape, strides, element size and skew; None where classes do not
    lie side by side, or two strides do not say where rows begin.
    """
    if shape[-1] > 1 and strides[-1] != 1:
        return None
    steps: list[tuple[int, int]] = []
    for length, step in zip(shape[:-1], strides[:-1], strict=True):
        if steps and steps[-1][1] == length * step:
            steps[-1] = (steps[-1][0] * length, step)
        elif length != 1:
            steps.append((length, step))
    return Cut(flags, steps, shape, size, skew) if len(steps) <= 2 else None


class KernelRows:
    """The rows of the logits, copied where no cut is for them, and how kernels are cut for them."""

    def __init__(self, problem: Problem) -> None:
        logits, shards = problem.logits, problem.shards
        flags, size = flags_of(problem), logits.element_size()
        skew = logits.data_ptr() % ALIGNMENT // size
        cut = cut_of(flags, logits.shape, logits.stride(), size, skew)
        if cut is None or skew > logits.storage_offset():  # not even memory that torch allocated
            logits, skew = logits.clone(memory_format=torch.contiguous_format), 0
            cut = cut_of(flags, logits.shape, logits.stride(), size, 0)
        assert cut is not None
        if skew:  # the kernels are given the boundary below, and how far above it rows begin
            logits = logits.as_strided((1,), (1,), logits.storage_offset() - skew)
        self.cut, self.rows, self.logits = cut, cut.rows, logits
        self.numbers = (
            cut.rows, cut.local, 0, shards.classes, problem.terms.ignore_index,
            *cut.places, problem.first_row,
        )  # fmt: skip
