"""Steps of Muon over the matrices of models.

    cases = muon_cases(small=False)

Rates count dense products, whatever a variant leaves out, so that they compare. All variants of a
step share parameters and gradients, and each has its own momentum. Beside the default: `gram`, the
Gram variant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interlace.optim import Muon
from interlace.optim.muon.newton_schulz import coefficients, flops
from interlace_bench.kernels.adam import Make, filled, opened_optimizer
from interlace_bench.kernels.case import OURS, KernelCase, relative
from interlace_bench.race import Variant, worst
from interlace_bench.sites import DTYPES

STEPS, TRIPLE = 5, (3.4445, -4.7750, 2.0315)
FAR = 0.1
"""Largest deviation of an update, relative, in the norm: bfloat16's iteration has 2 to 4 %."""
LAYERS, SMALL_ONES = "8 layers of llama3-8b", "80 small matrices"
_LAYER = [*[(4096, 4096)] * 2, *[(1024, 4096)] * 2, *[(14336, 4096)] * 2, (4096, 14336)]
MODELS = {LAYERS: 8 * _LAYER, SMALL_ONES: [*[(768, 2048)] * 64, *[(512, 2048)] * 16]}
SMALL_MODELS = {"4 tiny matrices": [*[(16, 32)] * 3, (32, 16)]}


def muon_cases(small: bool) -> list[KernelCase]:
    """The cases of `Muon`."""
    dtype = "f32" if small else "bf16"
    each = functools.partial(flops, gram_variant=False, symmetric=False)
    return [
        KernelCase(
            op="muon",
            shape=name,
            dtype=dtype,
            does="step",
            build=functools.partial(step_variants, shapes, DTYPES[dtype]),
            flops=int(sum(each(rows, columns, STEPS) for rows, columns in shapes)),
        )
        for name, shapes in (SMALL_MODELS if small else MODELS).items()
    ]


def exact(update: Tensor) -> Tensor:
    """The iteration in fp32."""
    x = update.float()
    x = x.mT if len(x) > x.shape[1] else x
    x = x / x.norm()
    for a, b, c in coefficients(TRIPLE, STEPS):
        g = x @ x.mT
        x = a * x + (b * g + c * g @ g) @ x
    return x.mT if len(update) > update.shape[1] else x


def step_variants(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> list[Variant]:
    params = filled(shapes, dtype, device)
    makers: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        OURS: Muon,
        f"{OURS} gram": functools.partial(Muon, gram_variant=True),
        "torch": torch.optim.Muon,  # its defaults are ours
    }
    return [
        Variant(name, functools.partial(opened_optimizer, make, params, step_off))
        for name, make in makers.items()
    ]


def step_off(make: Make, like: nn.Parameter) -> float:
    """The first step of some matrices in fp32 against one by the iteration in fp32."""
    params = filled(((64, 192), (192, 64), (64, 64)), torch.float32, like.device)
    before = [param.detach().clone() for param in params]
    optimizer = make(params)
    (options,) = optimizer.param_groups
    optimizer.step()
    far: list[float] = []
    for param, old in zip(params, before, strict=True):
        assert param.grad is not None
        decayed = old * (1 - options["lr"] * options["weight_decay"])
        ratio = max(1.0, len(old) / old.shape[1]) ** 0.5
        far.append(relative(decayed - param.detach(), options["lr"] * ratio * exact(param.grad)))
    return worst(far) / FAR
