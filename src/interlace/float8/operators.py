"""FP8 as operators that a schedule names, and that torch.compile traces: importing registers them.

    interlace.float8_amax     the maximum of x, as numbers of which the largest counts
    interlace.float8_rows     x [M, K] as packed rows [M, width(K)]
    interlace.float8_pair     the same, with those of the transpose [K, width(M)]
    interlace.float8_mm       packed rows times packed rows, which are given transposed
    interlace.float8_wgrad    dy.T @ x over the blocks of rows that have one scale each

Each has an `.out` form that fills given memory, and takes its element type from there. `float8_mm`
is a matmul for every pass, so all strategies cut it: its rows bring their scales along (Note
[Packed rows] in data.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interlace.float8.data import TAIL, width
from interlace.float8.products import multiply_into, wgrad_into
from interlace.float8.quantization import amax_of, amax_size, quantize_into
from interlace.float8.recipe import Recipe

_library = torch.library.Library("interlace", "FRAGMENT")


Made = tuple[Tensor, ...]


def _register(
    name: str,
    takes: str,
    blank: Callable[..., Made],
    fill: Callable[..., None],
    outs: tuple[str, ...] = ("out",),
) -> None:
    """An operator in both forms: `blank` makes what `fill` fills, both from the same arguments."""
    given = ", ".join(f"Tensor({mark}!) {out}" for mark, out in zip("ab", outs, strict=False))
    results = ", ".join(f"Tensor({mark}!)" for mark, _ in zip("ab", outs, strict=False))
    several = len(outs) > 1
    _library.define(f"{name}.out({takes}, *, {given}) -> {f'({results})' if several else results}")
    takes = takes.replace("ScalarType? dtype=None", "ScalarType dtype")
    _library.define(f"{name}({takes}) -> {'(Tensor, Tensor)' if several else 'Tensor'}")

    def unpacked(made: Made) -> Any:
        return made if several else made[0]

    def fills(*args: Any, **into: Tensor) -> Any:
        made = tuple([into[out] for out in outs])
        fill(made, *args)
        return unpacked(made)

    def makes(*args: Any) -> Any:
        made = blank(*args)
        fill(made, *args)
        return unpacked(made)

    _library.impl(f"{name}.out", fills, "CompositeExplicitAutograd")
    _library.impl(name, makes, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"interlace::{name}", lambda *args: unpacked(blank(*args)), lib=_library
    )


# what each makes, and how it is filled; the arguments of a schema that has a default come last


def _blank_amax(x: Tensor) -> Made:
    return (x.new_empty(amax_size(x.device), dtype=torch.float32),)


def _amax(made: Made, x: Tensor) -> None:
    made[0].copy_(amax_of(x))


def _blank_rows(x: Tensor, amax: Tensor | None, power: bool, eps: float, dtype: Any) -> Made:
    return (x.new_empty(x.shape[0], width(x.shape[1]), dtype=dtype),)


def _blank_pair(x: Tensor, amax: Tensor | None, power: bool, eps: float, dtype: Any) -> Made:
    across = x.new_empty(x.shape[1], width(x.shape[0]), dtype=dtype)
    return (*_blank_rows(x, amax, power, eps, dtype), across)


def _rows(
    made: Made, x: Tensor, amax: Tensor | None, power: bool, eps: float, dtype: Any = None
) -> None:
    packed, across = (*made, None)[:2]
    assert packed is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    quantize_into(x, Recipe(power_of_two=power, eps=eps), amax, packed, across)


def _blank_mm(
    a: Tensor, b: Tensor, blocks: int, bias: Tensor | None, fast: bool, dtype: Any
) -> Made:
    return (a.new_empty(a.shape[0], b.shape[1], dtype=dtype),)


def _mm(
    made: Made, a: Tensor, b: Tensor, blocks: int, bias: Tensor | None, fast: bool,
    dtype: Any = None,
) -> None:  # fmt: skip
    multiply_into(made[0], a, b.t(), blocks, bias, fast)


def _blank_wgrad(dy: Tensor, x: Tensor, blocks: int, dy_t: Tensor | None, dtype: Any) -> Made:
    return (x.new_empty(dy.shape[1] - TAIL, x.shape[1] - TAIL, dtype=dtype),)


def _wgrad(
    made: Made, dy: Tensor, x: Tensor, blocks: int, dy_t: Tensor | None, dtype: Any = None
) -> None:
    wgrad_into(made[0], dy, x, blocks, dy_t)


_ROWS = "Tensor x, Tensor? amax, bool power_of_two, float eps, ScalarType? dtype=None"
_register("float8_amax", "Tensor x", _blank_amax, _amax)
_register("float8_rows", _ROWS, _blank_rows, _rows)
_register("float8_pair", _ROWS, _blank_pair, _rows, ("out", "out_t"))
_register(
    "float8_mm",
    "Tensor a, Tensor b, int blocks, Tensor? bias, bool fast_accum, ScalarType? dtype=None",
    _blank_mm,
    _mm,
)
_register(
    "float8_wgrad",
    "Tensor dy, Tensor x, int blocks, Tensor? dy_t, ScalarType? dtype=None",
    _blank_wgrad,
    _wgrad,
)
