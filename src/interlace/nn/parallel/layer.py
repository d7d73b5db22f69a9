"""A linear layer over a group, forward and backward: the only place that spells its operators.

    outputs = forward(operations, x, [w], [None], keeps=True)         # x [rows, K]
    dx, dw, db = backward(operations, (True,) * 3, [dy], x, [w])      # None for what is not wanted

`Operations` says what the operators are: of torch (traced.py), or of a Program (serial.py).

Note [FP8 layers]
    Where a layer has a recipe, what a matmul takes is quantised before it is gathered, and travels
    as packed rows (Note [Packed rows] in float8/data.py). Forward takes weights as packed rows, and
    also returns x for backward: as packed rows where they are gathered again, elsewhere as those of
    the transpose. The gradient of a weight is one matmul of transposes (Note [One scale for a sum
    over shards] in float8/quantization.py). Sums over ranks are of the layer's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar

import torch

from interlace.float8.recipe import Recipe


class Matrix(Protocol):
    """A matrix or a vector: a tensor, or a handle of a Program's buffer."""

    def t(self) -> Self:
        """The transpose of a matrix, which costs nothing."""
        ...


T = TypeVar("T", bound=Matrix)


class Operations(Protocol[T]):
    """The operators of a layer, of values of one kind."""

    collective: str
    """`all_gather` of the rows before the matmuls; `reduce_scatter` or `all_reduce` after; `copy`:
    nothing, and backward all-reduces the gradient of x."""
    recipe: Recipe | None
    """The FP8 recipe; None: the matmuls are of the layer's dtype."""
    ranks: int
    """Ranks of the group."""

    def mm(self, a: T, b: T, bias: T | None = None) -> T:
        """`a @ b + bias`."""
        ...

    def add(self, a: T, b: T) -> T: ...
    def sum_of_rows(self, dy: T) -> T: ...
    def all_gather(self, rows: T) -> T: ...
    def reduce(self, collective: str, x: T, op: str = "sum") -> T:
        """`reduce_scatter` or `all_reduce` over the ranks."""
        ...

    def amax(self, x: T) -> T:
        """Numbers of which the largest is the maximum of |x|."""
        ...

    def pack(self, form: str, x: T, amax: T, recipe: Recipe, kind: torch.dtype) -> Any:
        """x as packed `rows`, as those of its transpose (`across`), or both: a `pair`."""
        ...

    def pack_across(self, weight: T) -> T:
        """The transpose of a weight as packed rows, from what backward was given."""
        ...

    def turn(self, rows: T, by: T | None, blocks: int) -> T:
        """Packed rows as those of the transpose, of one scale."""
        ...

    def packed_mm(self, a: T, b: T, blocks: int, bias: T | None, fast: bool) -> T:
        """`a @ b + bias` of packed a and transposed packed b: float8/products.py."""
        ...


REDUCES_BACK = {"all_gather": "reduce_scatter", "copy": "all_reduce"}
"""The collective that sums the gradient of x over the ranks."""


def forward(
    ops: Operations[T], x: T, weights: Sequence[T], biases: Sequence[T | None], keeps: bool
) -> list[T]:
    """An output for each weight; then x in FP8, where backward will want that (`keeps`)."""
    recipe, gathers = ops.recipe, ops.collective == "all_gather"
    sums = ops.collective in ("reduce_scatter", "all_reduce")
    keeps = keeps and recipe is not None
    rows = saved = x
    if recipe is not None and keeps and not gathers:
        rows, saved = packed(ops, x, recipe, recipe.forward, "pair")
    elif recipe is not None:
        rows = saved = packed(ops, x, recipe, recipe.forward, "rows", team=gathers)
    if gathers:
        rows = ops.all_gather(rows)
    blocks = ops.ranks if gathers else 1
    outputs: list[T] = []
    for weight, bias in zip(weights, biases, strict=True):
        within = None if sums else bias
        if recipe is None:
            y = ops.mm(rows, weight.t(), within)
        else:
            y = ops.packed_mm(rows, weight.t(), blocks, within, True)
        if sums:
            y = ops.reduce(ops.collective, y)
            y = y if bias is None else ops.add(y, bias)
        outputs.append(y)
    return [*outputs, saved] if keeps else outputs


def backward(
    ops: Operations[T],
    wanted: Sequence[bool],
    dys: Sequence[T],
    x: T | None,
    weights: Sequence[T],
) -> list[T | None]:
    """The gradients of x, of weights and of biases, as `wanted` says.

    `x` is what forward kept; None where no gradient of a weight is wanted.
    """
    if ops.collective == "reduce_scatter":
        return _backward_of_scatter(ops, wanted, dys[0], x, weights)
    count, recipe, gathers = len(dys), ops.recipe, ops.collective == "all_gather"
    for_x, for_w, for_b = wanted[0], wanted[1 : 1 + count], wanted[1 + count :]
    if gathers and x is not None:
        x = ops.all_gather(x)
    rows, across = [*dys], [*dys]
    if recipe is not None:
        for i, dy in enumerate(dys):
            if for_w[i] and for_x and not gathers:
                rows[i], across[i] = packed(ops, dy, recipe, recipe.gradient, "pair")
            elif for_w[i] and not gathers:
                across[i] = packed(ops, dy, recipe, recipe.gradient, "across")
            elif for_w[i] or for_x:
                rows[i] = packed(ops, dy, recipe, recipe.gradient, "rows")
    dx = None
    if for_x:
        dx = _input_gradient(ops, rows, weights, 1)
        if ops.collective in REDUCES_BACK:
            dx = ops.reduce(REDUCES_BACK[ops.collective], dx)
    if recipe is not None and gathers and x is not None:
        scales, x = x, ops.turn(x, None, 0)
        for i, want in enumerate(for_w):
            if want:
                across[i] = ops.turn(rows[i], scales, ops.ranks)
    dws: list[T | None] = [None] * count
    for i, want in enumerate(for_w):
        if want and x is not None:
            dws[i] = _weight_gradient(ops, across[i], x)
    dbs = [ops.sum_of_rows(dy) if want else None for dy, want in zip(dys, for_b, strict=True)]
    return [dx, *dws, *dbs]


def _backward_of_scatter(
    ops: Operations[T], wanted: Sequence[bool], dy: T, x: T | None, weights: Sequence[T]
) -> list[T | None]:
    """Where the outputs were scattered: the rows of dy are gathered, for all gradients."""
    for_x, _, for_b = wanted
    recipe, dx, dw, db = ops.recipe, None, None, None
    if recipe is not None:
        if for_b:
            db = ops.reduce("all_reduce", ops.sum_of_rows(dy))
            if not for_x and x is None:
                return [None, None, db]
        dy = packed(ops, dy, recipe, recipe.gradient, "rows", team=True)
    dy = ops.all_gather(dy)
    if for_x:
        dx = _input_gradient(ops, [dy], weights, ops.ranks)
    if x is not None:
        dw = _weight_gradient(ops, dy if recipe is None else ops.turn(dy, None, ops.ranks), x)
    if for_b and db is None:
        db = ops.sum_of_rows(dy)
    return [dx, dw, db]


def packed(
    ops: Operations[T], x: T, recipe: Recipe, kind: torch.dtype, form: str, team: bool = False
) -> Any:
    """x in FP8 by its own maximum; `team`: by that of all ranks, where the recipe says so."""
    amax = ops.amax(x)
    if team and recipe.scale == "team":
        amax = ops.reduce("all_reduce", amax, "max")
    return ops.pack(form, x, amax, recipe, kind)


def _input_gradient(ops: Operations[T], rows: Sequence[T], weights: Sequence[T], ranks: int) -> T:
    """The sum of `dy @ w` over the weights; `ranks` says whose rows these are."""
    total: T | None = None
    for dy, weight in zip(rows, weights, strict=True):
        if ops.recipe is None:
            part = ops.mm(dy, weight)
        else:
            across = ops.pack_across(weight)
            part = ops.packed_mm(dy, across.t(), ranks, None, False)
        total = part if total is None else ops.add(total, part)
    assert total is not None
    return total


def _weight_gradient(ops: Operations[T], dy: T, x: T) -> T:
    """The gradient of a weight, from dy and x, or in FP8 from the transposes of both."""
    return ops.mm(dy.t(), x) if ops.recipe is None else ops.packed_mm(dy, x.t(), 1, None, False)
