"""How the kernels of the cross-entropy are cut, and how they find rows of any strides.

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
UNROLL = GRAD_UNROLL = 2
"""Loads of 16 bytes that each thread has under way at a time, forward and backward."""
PROGRAMS = 2048
"""Rows are split into parts until there are about so many programs: some four waves of an H200."""
PART_TILES = 2
"""Tiles that a part of a row has at least."""
GRAD_TILES = 8
"""Tiles that a program of the backward pass has at least."""
ALIGNMENT = 16
"""Bytes; the kernels are compiled for pointers that are multiples of it."""
MAX_DIMS = 3
"""Batch dimensions that no single stride describes, at most; more are copied."""

Constants = tuple[tuple[str, Any], ...]
"""What a kernel is compiled for, by name."""


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
        ("CAP", terms.softcap != 0.0),
    )


class Cut:
    """How kernels go through rows of one shape and place; it holds no tensor and no address."""

    def __init__(
        self, flags: Constants, groups: list[tuple[int, int, int]], shape: tuple[int, ...],
        stride: int, size: int, skew: int, unroll: int,
    ) -> None:  # fmt: skip
        self.local = local = shape[-1]
        self.rows = prod(shape[:-1])
        self.dims = len(groups)
        (_, s0, t0), (n1, s1, t1), (n2, s2, t2) = [(1, 0, 0)] * (MAX_DIMS - self.dims) + groups
        stride = stride if local > 1 else 1
        strided = stride != 1
        self.vec = vec = 16 // size
        even = not (skew or local % vec or s0 % vec or s1 % vec or s2 % vec)
        apart = (s2 - local, s1 - n2 * local, s0 - n1 * n2 * local)
        self.alike = not (skew or strided or any(step % vec for step in apart[: self.dims]))
        self.places = n1, n2, s0, s1, s2, stride, t0, t1, t2, skew
        self.warps = WARPS
        while unroll > 1 and unroll * self.warps * 32 * vec >= 2 * local:
            unroll //= 2
        while self.warps > 1 and unroll * self.warps * 32 * vec >= 2 * local:
            self.warps //= 2
        self.tile = unroll * self.warps * 32  # in groups of `vec` elements
        self.flags: Constants = (*flags, ("DIMS", self.dims))
        self.ways: Constants = (
            *self.flags, ("STRIDED", strided), ("EVEN", even), ("U", unroll),
            ("LANES", 32 * self.warps), ("VEC", vec),
        )  # fmt: skip

    def parts(self) -> tuple[int, int]:
        """How many parts the rows are split into, and groups a part: a whole number of tiles."""
        tiles = -(-(-(-self.local // self.vec) + 1) // self.tile)
        wanted = min(-(-PROGRAMS // max(self.rows, 1)), -(-tiles // PART_TILES))
        each = -(-tiles // max(wanted, 1))
        return -(-tiles // each), each * self.tile


@lru_cache(maxsize=512)
def cut_of(
    flags: Constants, shape: tuple[int, ...], steps: tuple[int, ...],
    places: tuple[int, ...], size: int, skew: int, unroll: int,
) -> Cut | None:  # fmt: skip
    """The cut of logits of that shape, strides, element size and skew, and of a target with strides
    `places`; None: there are more dimensions than `MAX_DIMS`.
    """
    groups = collapse(shape[:-1], steps[:-1], places)
    if len(groups) > MAX_DIMS:
        return None
    return Cut(flags, groups, shape, steps[-1], size, skew, unroll)


class KernelRows:
    """Where the rows of the logits and of the target lie, and how kernels are cut for them."""

    def __init__(self, problem: Problem, unroll: int = UNROLL) -> None:
        logits, target = problem.logits, problem.target
        flags, size = flags_of(problem), logits.element_size()
        skew = logits.data_ptr() % ALIGNMENT // size
        if skew > logits.storage_offset():  # not even memory that torch allocated
            logits, skew = logits.clone(memory_format=torch.contiguous_format), 0
        cut = cut_of(flags, logits.shape, logits.stride(), target.stride(), size, skew, unroll)
        if cut is None:
            target = target.contiguous()
            cut = cut_of(flags, logits.shape, logits.stride(), target.stride(), size, skew, unroll)
        if cut is None:  # the last resort
            logits, target = logits.reshape(-1, logits.shape[-1]).contiguous(), target.view(-1)
            skew = 0
            cut = cut_of(flags, logits.shape, logits.stride(), target.stride(), size, skew, unroll)
        assert cut is not None
        if skew:  # the kernels are given the boundary below, and how far above it rows begin
            logits = logits.as_strided((1,), (1,), logits.storage_offset() - skew)
        self.cut, self.rows, self.logits, self.target = cut, cut.rows, logits, target
        shards = problem.shards
        self.numbers = (
            cut.rows, cut.local, shards.offset, shards.classes, problem.terms.ignore_index,
            *cut.places, problem.first_row,
        )  # fmt: skip


def collapse(
    shape: tuple[int, ...], one: tuple[int, ...], two: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """The dimensions (size, stride of one, of two), joined where one stride does for both."""
    found: list[tuple[int, int, int]] = []
    for size, a, b in zip(shape, one, two, strict=True):
        if size == 1:
            continue
        before, step, other = found[-1] if found else (1, -1, -1)
        if found and step == size * a and other == size * b:
            found[-1] = (before * size, a, b)
        else:
            found.append((size, a, b))
    return found or [(1, 0, 0)]
