"""A grouped linear layer, forward and backward, its weight gradient added to an fp32 main gradient.

    cases = grouped_cases(small=False)

torch's grouped GEMM makes the gradient first, and then it is added. Rows of the result, of the
gradient of x and the main gradient are compared with products in wider numbers, for the first rows
and groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from interlace.nn import GroupedLinear
from interlace.optim import GradAccumulator
from interlace.torch_private import grouped_mm
from interlace_bench.kernels.case import (
    BOTH,
    OURS,
    KernelCase,
    against,
    checked,
)
from interlace_bench.race import Run, Variant
from interlace_bench.sites import DTYPES

LOOSE = 4.0
Layer = tuple[Callable[[Tensor], Tensor], Callable[[], None]]
"""The layer's forward, and a function that adds the gradient of the weight after backward."""
SHAPES = (
    # groups, tokens, in, out, sizes: Mixtral, DeepSeek-V2-Lite and Qwen3-30B, forward and backward
    (8, 16384, 4096, 14336, "even"),
    (64, 32768, 2048, 1408, "even"),
    (64, 32768, 2048, 1408, "skewed"),
    (128, 32768, 2048, 768, "skewed"),
    (128, 4096, 2048, 768, "skewed"),
)
SMALL = ((4, 48, 16, 32, "even"), (8, 64, 16, 32, "skewed"))


def grouped_cases(small: bool) -> list[KernelCase]:
    """The cases of `GroupedLinear`."""
    dtype = "f32" if small else "bf16"
    return [
        KernelCase(
            op="grouped",
            shape=f"{groups}x{tokens}x{inner}x{outer} {how}",
            dtype=dtype,
            does=BOTH,
            build=functools.partial(grouped_variants, groups, tokens, inner, outer, how, dtype),
            flops=3 * 2 * tokens * inner * outer,
            limit=LOOSE,
        )
        for groups, tokens, inner, outer, how in (SMALL if small else SHAPES)
    ]


def group_sizes(groups: int, tokens: int, how: str) -> list[int]:
    """Even sizes, or skewed: the rows of group g go as 1 / (g + 1), and every eighth has none."""
    if how == "even":
        return [tokens * (g + 1) // groups - tokens * g // groups for g in range(groups)]
    shares = [0.0 if g % 8 == 7 else 1 / (g + 1) for g in range(groups)]
    sizes = [int(tokens * share / sum(shares)) for share in shares]
    sizes[0] += tokens - sum(sizes)
    return sizes


def grouped_variants(
    groups: int, tokens: int, inner: int, outer: int, how: str, dtype: str, device: torch.device
) -> list[Variant]:
    kind, sizes = DTYPES[dtype], group_sizes(groups, tokens, how)
    x = torch.randn(tokens, inner, device=device, dtype=kind)
    weight = torch.empty(groups, outer, inner, device=device, dtype=kind)
    weight.normal_(0, inner**-0.5)
    dy = torch.randn(tokens, outer, device=device, dtype=kind)
    main = torch.zeros(groups, outer, inner, device=device)
    on_device = torch.tensor(sizes, device=device, dtype=torch.int32)

    def of(make: Callable[[Tensor, Tensor, Tensor], Layer]) -> Run:
        main.zero_()  # what other variants added does not count
        layer, add = make(weight, main, on_device)

        def run(x: Tensor, dy: Tensor) -> list[Tensor]:
            x = x.detach().requires_grad_()
            y = layer(x)
            y.backward(dy)
            add()
            assert x.grad is not None
            return [y.detach(), x.grad]

        return run

    def plain(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
        """A product for each group; the last result is the gradient of the weight."""
        x, weight = x.requires_grad_(), weight.requires_grad_()
        parts = zip(x.split(sizes), weight, strict=True)
        y = torch.cat([part @ of_group.t() for part, of_group in parts])
        return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    makers = {OURS: lambda: of(grouped_layer), "torch": lambda: of(torch_layer)}
    compare = against(plain, (x, weight, dy))

    def off(found: list[Tensor]) -> float:
        return compare([*found, main])

    return checked(makers, off, [(x, dy)])


def grouped_layer(weight: Tensor, main: Tensor, sizes: Tensor) -> Layer:
    """Ours, on that weight, adding to that main gradient."""
    groups, outer, inner = weight.shape
    layer = GroupedLinear(groups, inner, outer, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    held = GradAccumulator(layer.weight, main)

    def multiply(x: Tensor) -> Tensor:
        assert held.param is layer.weight
        return layer(x, sizes)

    return multiply, lambda: None


def torch_layer(weight: Tensor, main: Tensor, sizes: Tensor) -> Layer:
    """torch's grouped GEMM, whose gradient is added afterwards."""
    param, ends = nn.Parameter(weight), sizes.cumsum(0, dtype=torch.int32)

    def add() -> None:
        assert param.grad is not None
        main.add_(param.grad)
        param.grad = None

    return lambda x: grouped_mm(x, param.transpose(1, 2), offs=ends), add
