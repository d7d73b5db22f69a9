"""FP8 as operators that a schedule names, and that torch.compile traces: importing registers them.

    interlace.float8_amax      the maximum of x, as numbers of which the largest counts
    interlace.float8_rows      x [M, K] as packed rows [M, width(K)]
    interlace.float8_across    the transpose of x as packed rows [K, width(M)]
    interlace.float8_pair      both
    interlace.float8_turn      packed rows [M, width(K)] to those of the transpose, of one scale
    interlace.float8_mm        packed rows times packed rows, which are given transposed

Each has an `.out` form that fills given memory, and takes its element type from there. `float8_mm`
is a matmul for every pass, so all strategies cut it: its rows bring their scales along (Note
[Packed rows] in data.py). `run` calls them with little host work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interlace.float8.data import TAIL, width
from interlace.float8.products import multiply_into
from interlace.float8.quantization import (
    amax_into,
    amax_size,
    kernels,
    quantize_into,
    turn_into,
)
from interlace.float8.recipe import Recipe
from interlace.torch_private import len_torch_dispatch_stack

_library = torch.library.Library("interlace", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)
_makers: dict[str, Callable[..., Any]] = {}


def run(name: str, *args: Any) -> Any:
    """`torch.ops.interlace.float8_<name>(*args)` without a gradient.

    Where nothing looks on, the dispatcher, which takes longer than a kernel's launch, is left out.
    """
    if unseen(args[0]):
        return _makers[name](*args)
    return getattr(torch.ops.interlace, f"float8_{name}")(*args)


def unseen(x: Tensor) -> bool:
    """Returns true where nothing looks on: torch.compile, a mode, or a tensor's own class."""
    seen = torch.compiler.is_compiling() or len_torch_dispatch_stack()
    return not seen and type(x) in _PLAIN


def again(
    form: str, x: Tensor, recipe: Recipe, kind: torch.dtype, place: object
) -> tuple[Tensor, ...] | None:
    """`rows`, `across` or a `pair` by x's own maximum, where the kernels guess its scale by that of
    the last x at this place; None where they do not.
    """
    launch = kernels(x) if recipe.power_of_two and unseen(x) else None
    if launch is None:
        return None
    made = _BLANKS[form](x, None, True, recipe.eps, kind)
    packed, across = made if form == "pair" else (made[0], None)
    if form == "across":
        packed, across = None, made[0]
    slot = hash((place, kind, recipe)) % launch.SLOTS
    launch.quantize_near(_dense(x), recipe, slot, packed, across)
    return made


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

    _makers[name.removeprefix("float8_")] = makes
    _library.impl(f"{name}.out", fills, "CompositeExplicitAutograd")
    _library.impl(name, makes, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"interlace::{name}", lambda *args: unpacked(blank(*args)), lib=_library
    )


# what each makes, and how it is filled; the arguments of a schema that has a default come last


def _blank_amax(x: Tensor) -> Made:
    return (x.new_empty(amax_size(x.device), dtype=torch.float32),)


def _amax(made: Made, x: Tensor) -> None:
    amax_into(made[0], _dense(x))


def _blank_rows(x: Tensor, amax: object, power: bool, eps: float, dtype: torch.dtype) -> Made:
    return (x.new_empty(x.shape[0], width(x.shape[1]), dtype=dtype),)


def _blank_across(x: Tensor, amax: object, power: bool, eps: float, dtype: torch.dtype) -> Made:
    return (x.new_empty(x.shape[1], width(x.shape[0]), dtype=dtype),)


def _blank_pair(*args: Any) -> Made:
    return (*_blank_rows(*args), *_blank_across(*args))


def _fills(rows: int | None, across: int | None) -> Callable[..., None]:
    """A function that quantises into the outputs of these places."""

    def fill(
        made: Made, x: Tensor, amax: Tensor, power: bool, eps: float, dtype: object = None
    ) -> None:
        packed, turned = (None if i is None else made[i] for i in (rows, across))
        quantize_into(_dense(x), _recipe(power, eps), amax, packed, turned)

    return fill


@functools.lru_cache
def _recipe(power: bool, eps: float) -> Recipe:
    return Recipe(scale="team", power_of_two=power, eps=eps)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _blank_turn(rows: Tensor, by: Tensor | None, blocks: int) -> Made:
    return (rows.new_empty(rows.shape[1] - TAIL, width(rows.shape[0])),)


def _turn(made: Made, rows: Tensor, by: Tensor | None, blocks: int) -> None:
    turn_into(made[0], rows, by, blocks)


def _blank_mm(
    a: Tensor, b: Tensor, blocks: int, bias: Tensor | None, fast: bool, dtype: torch.dtype
) -> Made:
    return (a.new_empty(a.shape[0], b.shape[1], dtype=dtype),)


def _mm(
    made: Made, a: Tensor, b: Tensor, blocks: int, bias: Tensor | None, fast: bool,
    dtype: object = None,
) -> None:  # fmt: skip
    multiply_into(made[0], a, b.t(), blocks, bias, fast)


_BLANKS = {"rows": _blank_rows, "across": _blank_across, "pair": _blank_pair}
_QUANTIZE = "Tensor x, Tensor amax, bool power_of_two, float eps, ScalarType? dtype=None"
_register("float8_amax", "Tensor x", _blank_amax, _amax)
_register("float8_rows", _QUANTIZE, _blank_rows, _fills(0, None))
_register("float8_across", _QUANTIZE, _blank_across, _fills(None, 0))
_register("float8_pair", _QUANTIZE, _blank_pair, _fills(0, 1), ("out", "out_t"))
_register("float8_turn", "Tensor rows, Tensor? by, int blocks", _blank_turn, _turn)
_register(
    "float8_mm",
    "Tensor a, Tensor b, int blocks, Tensor? bias, bool fast_accum, ScalarType? dtype=None",
    _blank_mm,
    _mm,
)
