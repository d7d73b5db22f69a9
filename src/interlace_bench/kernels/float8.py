"""FP8 by current scaling: quantising, and a linear layer forward and backward.

    cases = float8_cases(small=False)

Quantising reads a matrix twice, for its maximum and to cast it, and writes it and its transpose. A
linear layer quantises what it multiplies, forward and backward, as torchao's does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interlace.float8 import E4M3, Recipe, convert_to_float8, quantize
from interlace.float8.rule import amax_reference, cast_reference, scale_of
from interlace_bench.kernels.case import (
    BOTH,
    OURS,
    KernelCase,
    checked,
    needed,
    relative,
)
from interlace_bench.race import Run, Variant, worst
from interlace_bench.sites import DTYPES

CAST = "amax+cast+transpose"
TOKENS = 8192
MATRICES = ((8192, 8192), (8192, 28672))
WEIGHTS = ((8192, 7168), (4096, 14336), (8192, 28672))
"""Columns of the input and of the output."""
SMALL, SMALL_TOKENS = ((32, 48),), 64
FAR = 0.1
"""Largest deviation of a product, in the norm, relative to that without FP8: three bits of mantissa
and two are off by 3 and 6 per cent."""


def float8_cases(small: bool) -> list[KernelCase]:
    """The cases of FP8."""
    dtype, tokens = ("f32", SMALL_TOKENS) if small else ("bf16", TOKENS)
    weights = SMALL if small else WEIGHTS
    found: list[KernelCase] = []

    kind = DTYPES[dtype]
    of: Any = functools.partial(KernelCase, op="float8", dtype=dtype)
    for rows, columns in SMALL if small else MATRICES:
        build = functools.partial(cast_variants, rows, columns, kind)
        nbytes = rows * columns * 2 * (kind.itemsize + 1)
        found.append(of(shape=f"{rows}x{columns}", does=CAST, build=build, nbytes=nbytes))
    for inner, outer in weights:
        build = functools.partial(linear_variants, tokens, inner, outer, kind)
        shape, flops = f"{tokens}x{inner}x{outer}", 6 * tokens * inner * outer
        found.append(of(shape=shape, does=BOTH, build=build, flops=flops, ahead=1))
    return found


def cast_variants(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> list[Variant]:
    x = torch.randn(rows, columns, device=device).to(dtype)

    def plain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = scale_of(amax_reference(x), torch.finfo(E4M3).max, Recipe())
        data = cast_reference(x, scale, E4M3)
        return data, data.t().contiguous(), 1 / scale

    data, across, _ = plain(x)

    def off(found: Any) -> float:
        """2 where a bit is another."""
        if not isinstance(found, tuple):
            found = found.data, found.transposed[:, :rows]
        pairs = zip(found, (data, across), strict=False)
        return 2.0 * any(
            not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs
        )

    makers: dict[str, Callable[[], Run]] = {
        OURS: lambda: functools.partial(quantize, kind=E4M3, transpose=True)
    }
    if x.is_cuda:
        makers["torch.compile"] = lambda: torch.compile(plain)
    return checked(makers, off, [(x,)])


def linear_variants(
    tokens: int, inner: int, outer: int, dtype: torch.dtype, device: torch.device
) -> list[Variant]:
    x = torch.randn(tokens, inner, device=device).to(dtype)
    dy = torch.randn(tokens, outer, device=device).to(dtype)
    plain = nn.Linear(inner, outer, bias=False, device=device, dtype=dtype)

    def run(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
        x, weight = x.detach().requires_grad_(), next(layer.parameters())
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    def of(layer: Any) -> Run:
        return functools.partial(run, layer)

    def off(found: list[Tensor]) -> float:
        pairs = zip(found, run(plain, x, dy), strict=True)
        return worst(relative(a.float(), b.float()) for a, b in pairs) / FAR

    def linear() -> nn.Linear:
        layer = nn.Linear(inner, outer, bias=False, device=device, dtype=dtype)
        layer.weight = plain.weight
        return layer

    def torchao() -> Run:
        convert = needed("torchao.float8", "torchao", device).convert_to_float8_training
        return of(torch.compile(convert(nn.Sequential(linear()))))

    def ours() -> Any:
        return convert_to_float8(linear(), Recipe())

    makers: dict[str, Callable[[], Run]] = {
        OURS: lambda: of(ours()),
        "torchao": torchao,
        "torch": lambda: of(plain),
    }
    if x.is_cuda:
        makers[f"{OURS} compiled"] = lambda: of(torch.compile(ours()))
    return checked(makers, off, [(x, dy)])
