"""The products of a grouped linear layer in FP8, with a scale for each row of both factors.

    y = multiply(x, weight, bias, groups, ROW_WISE)        # as products.multiply

Torch's grouped GEMM of FP8 takes E4M3 and scales of rows alone, on Hopper: elsewhere each group is
a product of interlace.float8. The gradient of a weight sums over the rows, whose scales differ: it
stays in the layer's own type (products.weight_gradient).
"""

from __future__ import annotations

from functools import cache

import torch

from interlace.errors import InputError
from interlace.float8 import E4M3, Float8Data, Recipe, matmul, quantize
from interlace.float8.data import ALIGNMENT
from interlace.nn.grouped import products
from interlace.nn.grouped.products import Groups

CAPABILITY = (9, 0)
"""Capability of the GPUs that have the grouped GEMM of FP8 with scales of rows."""
_capability = cache(torch.cuda.get_device_capability)


def check(recipe: object, in_features: int, out_features: int) -> None:
    """`InputError` for a recipe, or sizes, that the grouped GEMM of FP8 does not take."""
    if not isinstance(recipe, Recipe):
        raise InputError(f"`recipe` is {recipe!r}: give an interlace.float8.Recipe, or None")
    if recipe.scaling != "row" or recipe.gradient != E4M3:
        raise InputError(
            f"`recipe` has scaling={recipe.scaling!r} and gradient={recipe.gradient}: Hopper's "
            f"grouped GEMM takes a scale for each row, and {E4M3}; give interlace.float8.ROW_WISE"
        )
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size % ALIGNMENT:
            raise InputError(
                f"`{name}` is {size}: FP8's GEMM takes multiples of {ALIGNMENT}; pad it, or leave "
                "`recipe` out"
            )


def refuse(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> str | None:
    """As products.refuse, for the grouped GEMM of FP8."""
    why = products.refuse(x, weight, dtype)
    if why is None and _capability(x.device) != CAPABILITY:
        why = f"the GPU is none of capability {CAPABILITY}, which have the grouped GEMM of FP8"
    return why


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    recipe: Recipe,
) -> torch.Tensor:
    """As products.multiply, of quantised x and weight."""
    return _product(x, weight, bias, groups, recipe, fast_accum=True)


def input_gradient(
    dy: torch.Tensor, weight: torch.Tensor, groups: Groups, recipe: Recipe
) -> torch.Tensor:
    """As products.input_gradient, of quantised dy and weight: a scale for each column of it."""
    return _product(dy, weight.transpose(1, 2), None, groups, recipe, fast_accum=False)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    recipe: Recipe,
    fast_accum: bool,
) -> torch.Tensor:
    x8, w8 = quantize(x, E4M3, recipe), quantize(weight, E4M3, recipe)
    num, height, inner = weight.shape
    if groups.ends is not None:
        made = torch._scaled_grouped_mm(
            x8.data,
            w8.data.unflatten(0, (num, height)).transpose(1, 2),
            x8.scale_inv.flatten().contiguous(),
            w8.scale_inv.contiguous().view(num, height),
            offs=groups.ends,
            out_dtype=x.dtype,
            use_fast_accum=fast_accum,
        )
        return products.finish(made, bias, groups)
    y = x.new_empty(groups.tokens, height)
    for group, start, end in groups.spans():
        rows = Float8Data(x8.packed[start:end], inner, by_row=True)
        mine = Float8Data(w8.packed[group * height :][:height], inner, by_row=True)
        if bias is None:
            y[start:end] = matmul(rows, mine, y.dtype, fast_accum=fast_accum)
        else:  # rounded once
            y[start:end] = matmul(rows, mine, torch.float32, fast_accum=fast_accum) + bias[group]
    y[groups.total :].zero_()
    return y
