"""FP8 as operators that a schedule names: importing this file registers them.

    interlace.float8_amax.out     the maximum of x, as numbers of which the largest counts
    interlace.float8_rows.out     x [M, K] as packed rows [M, width(K)], of the format of `out`
    interlace.float8_rows.out_t   the same, with those of the transpose [K, width(M)]
    interlace.float8_mm.out       packed rows times packed rows, which are given transposed
    interlace.float8_wgrad.out    dy.T @ x over the blocks of rows that have one scale each

`float8_mm` is a matmul for every pass, so all strategies cut it: its rows bring their scales along
(Note [Packed rows] in data.py). All of them fill memory that is given, so none has another form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace.float8.products import multiply_into, wgrad_into
from interlace.float8.quantization import amax_of, quantize_into
from interlace.float8.recipe import Recipe

_library = torch.library.Library("interlace", "FRAGMENT")
_RECIPE = "Tensor x, Tensor? amax, bool power_of_two, float eps"
_SCHEMAS = (
    "float8_amax.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    f"float8_rows.out({_RECIPE}, *, Tensor(a!) out) -> Tensor(a!)",
    f"float8_rows.out_t({_RECIPE}, *, Tensor(a!) out, Tensor(b!) out_t)"
    " -> (Tensor(a!), Tensor(b!))",
    "float8_mm.out(Tensor a, Tensor b, int blocks, Tensor? bias, bool fast_accum, *,"
    " Tensor(a!) out) -> Tensor(a!)",
    "float8_wgrad.out(Tensor dy, Tensor x, int blocks, Tensor? dy_t, *, Tensor(a!) out)"
    " -> Tensor(a!)",
)


def _amax(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(amax_of(x))


def _rows(x: Tensor, amax: Tensor | None, power_of_two: bool, eps: float, *, out: Tensor) -> Tensor:
    _fill(x, amax, power_of_two, eps, out, None)
    return out


def _rows_and_transpose(
    x: Tensor,
    amax: Tensor | None,
    power_of_two: bool,
    eps: float,
    *,
    out: Tensor,
    out_t: Tensor,
) -> tuple[Tensor, Tensor]:
    _fill(x, amax, power_of_two, eps, out, out_t)
    return out, out_t


def _fill(
    x: Tensor,
    amax: Tensor | None,
    power_of_two: bool,
    eps: float,
    packed: Tensor,
    across: Tensor | None,
) -> None:
    quantize_into(x, Recipe(power_of_two=power_of_two, eps=eps), amax, packed, across)


def _mm(
    a: Tensor, b: Tensor, blocks: int, bias: Tensor | None, fast_accum: bool, *, out: Tensor
) -> Tensor:
    multiply_into(out, a, b.t(), blocks, bias, fast_accum)
    return out


def _wgrad(dy: Tensor, x: Tensor, blocks: int, dy_t: Tensor | None, *, out: Tensor) -> Tensor:
    wgrad_into(out, dy, x, blocks, dy_t)
    return out


for _schema, _function in zip(
    _SCHEMAS, (_amax, _rows, _rows_and_transpose, _mm, _wgrad), strict=True
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
