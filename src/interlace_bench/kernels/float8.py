"""FP8 by current scaling: quantising, a linear layer, and a weight gradient over shards.

    cases = float8_cases(small=False)

Quantising reads a matrix twice, for its maximum and to cast it, and writes it and its transpose. A
linear layer quantises what it multiplies, forward and backward, as torchao's does. The gradient of
a weight is that of four shards with a scale each: their transposes are made first, by their scales,
which is a case of its own, and then it is a GEMM, beside one of dense matrices with one scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interlace.float8 import E4M3, E5M2, Float8Data, Recipe, convert_to_float8, quantize
from interlace.float8.data import width
from interlace.float8.products import multiply_into
from interlace.float8.quantization import turn_into
from interlace.float8.rule import amax_twin, cast_twin, scale_of
from interlace_bench.kernels.case import OURS, BuiltCase, KernelCase, needed
from interlace_bench.kernels.losses import BOTH
from interlace_bench.race.ways import Opened, Way, worst
from interlace_bench.sites import DTYPES

CAST, TURN, WGRAD = "amax+cast+transpose", "transpose", "wgrad"
TOKENS, SHARDS = 8192, 4
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

    def add(shape: str, does: str, build: Callable[..., BuiltCase], *sizes: int) -> None:
        made = functools.partial(build, *sizes, DTYPES[dtype])
        found.append(KernelCase(op="float8", shape=shape, dtype=dtype, does=does, build=made))

    for rows, columns in SMALL if small else MATRICES:
        add(f"{rows}x{columns}", CAST, cast_case, rows, columns)
    for rows, columns in SMALL if small else MATRICES:
        add(f"{SHARDS}x{rows // SHARDS}x{columns}", TURN, turn_case, rows, columns)
    for inner, outer in weights:
        add(f"{tokens}x{inner}x{outer}", BOTH, linear_case, tokens, inner, outer)
    for inner, outer in weights:
        add(f"{SHARDS}x{tokens // SHARDS}x{inner}x{outer}", WGRAD, wgrad_case, tokens, inner, outer)
    return found


def cast_case(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> BuiltCase:
    x = torch.randn(rows, columns, device=device).to(dtype)

    def plain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = scale_of(amax_twin(x), torch.finfo(E4M3).max, Recipe())
        data = cast_twin(x, scale, E4M3)
        return data, data.t().contiguous(), 1 / scale

    def opened(run: Callable[[Tensor], Any]) -> Opened:
        def off() -> float:
            made, (data, across, _) = run(x), plain(x)
            if not isinstance(made, tuple):
                assert made.transposed is not None
                made = made.data, made.transposed[:, :rows]
            pairs = zip(made, (data, across), strict=False)
            wrong = [(a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in pairs]
            return 2.0 * float(sum(wrong) > 0)

        return Opened(run, off)

    ways = [Way(OURS, lambda: opened(functools.partial(quantize, kind=E4M3, transpose=True)))]
    if x.is_cuda:
        ways.append(Way("torch.compile", lambda: opened(torch.compile(plain))))
    nbytes = rows * columns * 2 * (x.element_size() + 1)
    return BuiltCase(ways=ways, sets=[(x,)], nbytes=nbytes)


def linear_case(
    tokens: int, inner: int, outer: int, dtype: torch.dtype, device: torch.device
) -> BuiltCase:
    x = torch.randn(tokens, inner, device=device).to(dtype)
    dy = torch.randn(tokens, outer, device=device).to(dtype)
    plain = nn.Linear(inner, outer, bias=False, device=device, dtype=dtype)

    def run(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
        x, weight = x.detach().requires_grad_(), next(layer.parameters())
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    def opened(make: Callable[[], Any]) -> Opened:
        layer = make()

        def off() -> float:
            pairs = zip(run(layer, x, dy), run(plain, x, dy), strict=True)
            far = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
            return worst(far) / FAR

        return Opened(functools.partial(run, layer), off)

    def torchao() -> Any:
        convert = needed("torchao.float8", "torchao", device).convert_to_float8_training
        layer = nn.Linear(inner, outer, bias=False, device=device, dtype=dtype)
        layer.weight = plain.weight
        return torch.compile(convert(nn.Sequential(layer)))

    def ours() -> Any:
        layer = nn.Linear(inner, outer, bias=False, device=device, dtype=dtype)
        layer.weight = plain.weight
        return convert_to_float8(layer, Recipe())

    ways = [
        Way(OURS, lambda: opened(ours)),
        Way("torchao", lambda: opened(torchao)),
        Way("torch", lambda: opened(lambda: plain)),
    ]
    if x.is_cuda:
        ways.append(Way(f"{OURS} compiled", lambda: opened(lambda: torch.compile(ours()))))
    return BuiltCase(ways=ways, sets=[(x, dy)], flops=6 * tokens * inner * outer, ahead=True)


def turn_case(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> BuiltCase:
    x = torch.randn(rows, columns, device=device).to(dtype)
    shards = [quantize(part * 4.0**i, E5M2) for i, part in enumerate(x.chunk(SHARDS))]
    packed = torch.cat([shard.packed for shard in shards])
    across = packed.new_empty(columns, width(rows))

    def ours() -> Tensor:
        turn_into(across, packed, None, SHARDS)
        return across

    def off() -> float:
        made = Float8Data(ours(), rows).dequantize()
        wanted = torch.cat([shard.dequantize() for shard in shards]).t()
        return float((made - wanted).norm() / wanted.norm()) * 2.0**20  # what a shift cut off

    ways = [Way(OURS, lambda: Opened(ours, off))]
    return BuiltCase(ways=ways, nbytes=2 * rows * columns)


def wgrad_case(
    tokens: int, inner: int, outer: int, dtype: torch.dtype, device: torch.device
) -> BuiltCase:
    x = torch.randn(tokens, inner, device=device).to(dtype)
    dy = torch.randn(tokens, outer, device=device).to(dtype)
    shards = torch.cat([quantize(part, E4M3).packed for part in x.chunk(SHARDS)])
    dy8 = quantize(dy, E5M2, transpose=True)
    whole = quantize(x, E4M3, transpose=True)
    x_t, dy_t = shards.new_empty(inner, width(tokens)), dy8.packed.new_empty(outer, width(tokens))

    def turned() -> None:
        turn_into(x_t, shards, None, 0)
        turn_into(dy_t, dy8.packed, shards, SHARDS)

    turned()
    left, right = (made.t().data.contiguous() for made in (dy8, whole))
    out = torch.empty(outer, inner, dtype=dtype, device=device)

    def ours() -> Tensor:
        multiply_into(out, dy_t, x_t, 1, None, False)
        return out

    def with_transposes() -> Tensor:
        turned()
        return ours()

    def one_gemm() -> Tensor:
        scales = dy8.scale_inv[:1], whole.scale_inv[:1]
        return torch._scaled_mm(
            left, right.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype
        )

    def opened(run: Callable[[], Tensor]) -> Opened:
        def off() -> float:
            wanted = dy.float().t() @ x.float()
            return float((run().float() - wanted).norm() / wanted.norm()) / FAR

        return Opened(run, off)

    ways = [
        Way(OURS, lambda: opened(ours)),
        Way(f"{OURS} with transposes", lambda: opened(with_transposes)),
        Way("_scaled_mm", lambda: opened(one_gemm)),
    ]
    return BuiltCase(ways=ways, flops=2 * tokens * inner * outer)
