"""Muon: symmetric products, the Newton-Schulz iteration, and steps of the optimizer.

    cases = muon_cases(small=False)

Rates count dense products, whatever a way leaves out, so that they compare. All ways of a step
share parameters and gradients, and each has its own momentum. Ways beside the default one: `gram`,
the Gram variant, and `dense`, without the kernel of symmetric products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import _muon

from interlace.optim import Muon
from interlace.optim.muon.newton_schulz import coefficients, flops, polynomial, product, serves
from interlace.optim.muon.update import batches, orthogonal
from interlace_bench.kernels.adam import state_bytes
from interlace_bench.kernels.case import OURS, BuiltCase, KernelCase
from interlace_bench.kernels.losses import relative, unit
from interlace_bench.race.ways import Opened, Way, worst
from interlace_bench.sites import DTYPES

GRAM, POLYNOMIAL, ITERATION, STEP = "x @ x.mT", "b*g + c*g@g", "newton-schulz", "step"
STEPS, TRIPLE = 5, (3.4445, -4.7750, 2.0315)
FAR = 0.1
"""Largest deviation of an update, relative, in the norm: bfloat16's iteration has 2 to 4 %."""
VARIANTS: dict[str, dict[str, Any]] = {
    OURS: {},
    f"{OURS} gram": {"gram_variant": True},
    f"{OURS} dense": {"symmetric": False},
}
LAYERS, SMALL_ONES = "8 layers of llama3-8b", "80 small matrices"
_LAYER = [*[(4096, 4096)] * 2, *[(1024, 4096)] * 2, *[(14336, 4096)] * 2, (4096, 14336)]
MODELS = {LAYERS: 8 * _LAYER, SMALL_ONES: [*[(768, 2048)] * 64, *[(512, 2048)] * 16]}
STACKS = ((4, 4096, 4096), (3, 14336, 4096), (16, 512, 2048), (64, 768, 2048))
SQUARES = (4096,)
SMALL_MODELS = {"4 tiny matrices": [*[(16, 32)] * 3, (32, 16)]}


def muon_cases(small: bool) -> list[KernelCase]:
    """The cases of `Muon`."""
    dtype = "f32" if small else "bf16"
    found: list[KernelCase] = []

    def add(shape: str, does: str, build: Callable[..., BuiltCase], *given: Any) -> None:
        made = functools.partial(build, *given, DTYPES[dtype])
        found.append(KernelCase(op="muon", shape=shape, dtype=dtype, does=does, build=made))

    for size in (64,) if small else SQUARES:
        add(f"{size}x{size}", GRAM, product_case, size, False)
        add(f"{size}x{size}", POLYNOMIAL, product_case, size, True)
    for name, shapes in (SMALL_MODELS if small else MODELS).items():
        add(name, STEP, step_case, shapes)
    for count, rows, columns in ((3, 48, 16),) if small else STACKS:
        add(f"{count}x{rows}x{columns}", ITERATION, iteration_case, count, rows, columns)
    return found


def product_case(size: int, second: bool, dtype: torch.dtype, device: torch.device) -> BuiltCase:
    x = torch.randn(size, size, device=device).div_(size).to(dtype)
    given = x @ x.mT if second else x
    _, b, c = TRIPLE

    def run(kernel: bool, t: Tensor) -> Tensor:
        if second:
            return polynomial(t, 0.0, b, c, kernel=kernel)
        return product(t, t.mT, kernel=kernel)

    def opened(kernel: bool) -> Opened:
        def off() -> float:
            found, wide = run(kernel, given), given.float()
            wanted = b * wide + c * wide @ wide if second else wide @ wide.mT
            skew = kernel and not torch.equal(found, found.mT)
            return torch.inf if skew else relative(found, wanted) / unit(dtype)

        return Opened(functools.partial(run, kernel), off)

    ways = (Way(OURS, lambda: opened(serves(given))), Way("torch", lambda: opened(False)))
    return BuiltCase(ways=ways, sets=[(given,)], flops=2 * size**3)


def iteration_case(
    count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> BuiltCase:
    updates = [torch.randn(rows, columns, device=device).to(dtype) for _ in range(count)]

    def ours(group: dict[str, Any]) -> list[Tensor]:
        parts = [orthogonal(updates[few], group) for few in batches(updates, group["batched"])]
        return [matrix for part in parts for matrix in (part if part.ndim > 2 else (part,))]

    def torchs() -> list[Tensor]:
        return [_muon._zeropower_via_newtonschulz(u, TRIPLE, STEPS, 1e-7) for u in updates]

    def opened(run: Callable[[], list[Tensor]]) -> Opened:
        def off() -> float:
            found = run()
            ends = ((updates[at], found[at]) for at in (0, -1))
            return worst(relative(its, exact(update)) for update, its in ends) / FAR

        return Opened(run, off)

    def way(name: str, options: dict[str, Any]) -> Way:
        group = Muon([nn.Parameter(updates[0])], **options).param_groups[0]
        return Way(name, lambda: opened(functools.partial(ours, group)))

    ways = [*(way(*item) for item in VARIANTS.items()), Way("torch", lambda: opened(torchs))]
    work = count * flops(rows, columns, STEPS, gram_variant=False, symmetric=False)
    return BuiltCase(ways=ways, flops=int(work))


def exact(update: Tensor) -> Tensor:
    """The iteration in fp32."""
    x = update.float()
    x = x.mT if len(x) > x.shape[1] else x
    x = x / x.norm()
    for a, b, c in coefficients(TRIPLE, STEPS):
        g = x @ x.mT
        x = a * x + (b * g + c * g @ g) @ x
    return x.mT if len(update) > update.shape[1] else x


def step_case(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> BuiltCase:
    empty = functools.partial(torch.empty, dtype=dtype, device=device)
    params = [nn.Parameter(empty(shape).normal_(0, 0.02)) for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param).normal_(0, 0.01)

    def opened(make: Callable[[list[nn.Parameter]], Any]) -> Opened:
        far = step_off(make, device)
        optimizer = make(params)
        return Opened(optimizer.step, lambda: far, lambda: state_bytes(optimizer))

    def way(name: str, options: dict[str, Any]) -> Way:
        return Way(name, lambda: opened(lambda given: Muon(given, **options)))

    ways = [*(way(*item) for item in VARIANTS.items()), Way("torch", lambda: opened(torchs_muon))]
    each = functools.partial(flops, gram_variant=False, symmetric=False)
    work = sum(each(rows, columns, STEPS) for rows, columns in shapes)
    return BuiltCase(ways=ways, flops=int(work))


def torchs_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's, with its defaults, which are ours."""
    return torch.optim.Muon(params)


def step_off(make: Callable[[list[nn.Parameter]], Any], device: torch.device) -> float:
    """The first step of some matrices in fp32 against one by the iteration in fp32."""
    params = [nn.Parameter(torch.randn(s, device=device)) for s in ((64, 192), (192, 64), (64, 64))]
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.randn_like(param)
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
