"""Linear layers over a group in FP8, on 1 to 4 real processes: the bits of the same recipe without
overlap, written again from `interlace.float8`'s own functions and c10d's collectives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import Tensor

from interlace.errors import InputError
from interlace.float8 import Float8Data, Recipe, amax_of, matmul, quantize, wgrad
from interlace.float8.data import padded, width
from interlace.float8.products import multiply_into
from interlace.float8.quantization import turn_into
from interlace.nn.functional import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)
from interlace.nn.parallel.serial import LinearLayer, serial

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "copy")
MANY = ("all_gather", "copy")
STRATEGIES = ("auto", "pipeline", "ring", "peer", None)
"""None: without overlap."""
RECIPES = {
    "shard": Recipe(),
    "team": Recipe(scale="team"),
    "powers": Recipe(scale="team", power_of_two=True),
}
Bits = list[bytes]


def bits(tensors: list[Tensor]) -> Bits:
    """A NaN has the same bits whatever its sign."""
    clean = [t.detach().masked_fill(t.isnan(), torch.nan).contiguous() for t in tensors]
    return [bytes(t.flatten().view(torch.uint8).tolist()) for t in clean]


def every(x: Tensor) -> list[Tensor]:
    """All ranks' tensors."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def shards(xs: list[Tensor], kind: torch.dtype, recipe: Recipe) -> list[Float8Data]:
    """Each quantised by its own maximum, or all by that of the team."""
    amax = torch.cat([amax_of(x) for x in xs]).amax() if recipe.scale == "team" else None
    return [quantize(x, kind, recipe, amax=amax, transpose=True) for x in xs]


def total(x: Tensor) -> Tensor:
    """The sum over the ranks, in their order."""
    first, *rest = every(x)
    return sum(rest, start=first)


def product(a: Float8Data, b: Float8Data, like: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return matmul(a, b, like.dtype)
    out = like.new_empty(len(a.packed), len(b.packed))
    multiply_into(out, a.packed, b.packed, 1, bias, False)
    return out


def by_hand(kind: str, given: Any, recipe: Recipe) -> list[Tensor]:
    """Outputs, and gradients of x, weights and biases."""
    x, ws, bs, ups = given
    rank = dist.get_rank()
    w8s = [quantize(w, recipe.forward, recipe, transpose=True) for w in ws]
    if kind in MANY:
        xs = every(x) if kind == "all_gather" else [x]
        x8s = shards(xs, recipe.forward, recipe)  # of one, the team's maximum is its own
        ys = [torch.cat([product(x8, w8, x, b) for x8 in x8s])
              for w8, b in zip(w8s, bs, strict=True)]  # fmt: skip
        dys = [quantize(dy, recipe.gradient, recipe, transpose=True) for dy in ups]
        products = [product(dy, w8.t(), x) for dy, w8 in zip(dys, w8s, strict=True)]
        dx = total(sum(products[1:], start=products[0]))
        dx = dx.chunk(len(xs))[rank] if kind == "all_gather" else dx
        if len(xs) == 1:  # one scale each: nothing to bring to a common one
            dws = [matmul(dy.t(), x8s[0].t(), x.dtype) for dy in dys]
        else:
            cut = [[quantize(part, recipe.gradient, recipe, amax=amax_of(dy))
                    for part in dy.chunk(len(xs))] for dy in ups]  # fmt: skip
            dws = [wgrad(parts, x8s, x.dtype) for parts in cut]
        return [*ys, dx, *dws, *(dy.sum(0) for dy, b in zip(ups, bs, strict=True) if b is not None)]
    (w8,), (b,), (up,) = w8s, bs, ups
    x8 = quantize(x, recipe.forward, recipe, transpose=True)
    if dist.get_world_size() == 1:
        y = product(x8, w8, x, b)  # the bias is added before it is rounded
    else:
        y = total(product(x8, w8, x))
        y = y.chunk(dist.get_world_size())[rank] if kind == "reduce_scatter" else y
        y = y if b is None else y + b
    parts = every(up) if kind == "reduce_scatter" else [up]
    dys = shards(parts, recipe.gradient, recipe)
    dx = torch.cat([product(dy, w8.t(), x) for dy in dys])
    rows = torch.cat([dy.packed for dy in dys])
    across = rows.new_empty(dys[0].columns, width(len(rows)))
    turn_into(across, rows, None, len(dys))
    dw = matmul(Float8Data(across, padded(len(rows))), x8.t(), x.dtype)
    db = [] if b is None else [torch.cat(parts).sum(0)]
    if b is not None and len(parts) > 1:
        db = [sum((part.sum(0) for part in parts[1:]), start=parts[0].sum(0))]
    return [y, dx, dw, *db]


def ours(kind: str, given: Any, recipe: Recipe, strategy: str | None) -> list[Tensor]:
    x, ws, bs, ups = given
    leaves = [t.clone().requires_grad_() for t in (x, *ws, *bs) if t is not None]
    rest = iter(leaves)
    others: Any = [t if t is None else next(rest) for t in (x, *ws, *bs)]
    x, ws, bs = others[0], others[1 : 1 + len(ws)], others[1 + len(ws) :]
    options = {"timeout_s": 30, **({"strategy": strategy} if strategy else {"overlap": False})}
    facts: Any = {"group": dist.group.WORLD, "recipe": recipe, "options": options}
    if kind in MANY:
        call = all_gather_linear if kind == "all_gather" else replicated_linear
        ys = list(call(x, ws, bs, **facts))
    else:
        call = linear_reduce_scatter if kind == "reduce_scatter" else linear_all_reduce
        ys = [call(x, ws[0], bs[0], **facts)]
    torch.autograd.backward(ys, ups)
    return [*ys, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def drawn(kind: str, rows: int, biased: bool, seed: int, exact: bool, spoil: str = "") -> Any:
    """x, weights, biases and upstream gradients; `exact`: integers whose sums are all exact."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own, same = (torch.Generator().manual_seed(n) for n in (seed + rank, seed + 100))

    def draw(generator: torch.Generator, *shape: int) -> Tensor:
        if exact:
            return torch.randint(-1, 2, shape, generator=generator).bfloat16()
        return torch.randn(shape, generator=generator).bfloat16()

    inner, outer = 32, (16, 48) if kind in MANY else (48,)
    x = draw(
        same if kind == "copy" else own, rows * ranks if kind == "reduce_scatter" else rows, inner
    )
    ws = [draw(own, n, inner) for n in outer]
    bs = [draw(own if kind in MANY else same, n) if biased else None for n in outer]
    height = rows * ranks if kind == "all_gather" else rows
    ups = [draw(same if kind == "all_reduce" else own, height, n) for n in outer]
    travels = ups[0] if kind == "reduce_scatter" else x
    if (rank == ranks - 1 or kind == "copy") and travels.numel():
        if spoil == "outlier":
            travels[-1, 3] = 1e4
        if spoil == "zeros":
            travels.zero_()
        if spoil in ("inf", "nan"):
            travels[0, 5] = float(spoil)
    return x, ws, bs, ups


Case = tuple[str, str, str | None, int, bool, str]
"""Kind, recipe, strategy, rows, whether there is a bias, what spoils the last shard."""


def compare(cases: list[Case], seed: int) -> list[str]:
    """What differs on this rank.

    On more than two ranks sums over them have another order, and few rows of a GEMM have other
    bits on the CPU than among more: there all sums are exact.
    """
    wrong: list[str] = []
    for case in cases:
        kind, name, strategy, rows, biased, spoil = case
        exact = dist.get_world_size() > 2 or rows < 64
        given = drawn(kind, rows, biased, seed, exact, "" if exact else spoil)
        recipe = RECIPES[name]
        if exact:
            recipe = Recipe(scale=recipe.scale, power_of_two=True)
        found = bits(ours(kind, given, recipe, strategy))
        wanted = bits(by_hand(kind, given, recipe))
        differ = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        if differ:
            wrong.append(f"{case}: results {differ}")
    return wrong


@pytest.mark.strict
@pytest.mark.parametrize(
    "world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]
)
def test_bits_of_the_recipe_without_overlap(pool: Pool, world: int, seed: int) -> None:
    """Of all recipes; with rows that FP8's GEMM adds over, or not, or none."""
    rng = random.Random(seed)
    cases = [
        (kind, name, rng.choice(STRATEGIES), rng.choice([0, 1, 7, 16, 40, 64, 64, 64]),
         rng.random() < 0.5, rng.choice(["", "", "outlier", "zeros", "inf", "nan"]))
        for kind in KINDS for name in RECIPES
    ]  # fmt: skip
    for wrong in pool(world).run(compare, cases, seed, timeout_s=110):
        assert wrong == []


def refusals() -> list[str]:
    x, w = torch.randn(4, 32), torch.randn(16, 32)
    said: list[str] = []
    for given, weight, recipe in (
        (torch.randn(4, 24), torch.randn(16, 24), Recipe()),
        (x, torch.randn(20, 32), Recipe()),
        (x, w, "e4m3"),
        (x.double(), w.double(), Recipe()),
    ):
        facts: Any = {"group": dist.group.WORLD, "recipe": recipe}
        with pytest.raises(InputError) as caught:
            all_gather_linear(given, weight, **facts)
        said.append(str(caught.value))
    return said


def test_what_fp8_cannot_take_is_refused(pool: Pool) -> None:
    for first, second, third, fourth in pool(2).run(refusals):
        assert "`weight` has shape [16, 24]: FP8's GEMM takes multiples of 16" in first
        assert "`weight` has shape [20, 32]" in second
        assert "`recipe` is 'e4m3': give an interlace.float8.Recipe" in third
        assert "torch.float64: take one of" in fourth


def test_half_the_bytes_travel() -> None:
    """What is gathered is packed rows, scales included; sums over ranks stay bf16."""
    layer = LinearLayer("all_gather", "bf16", 4096, (1024,), (False,), recipe=Recipe())
    text = str(serial(layer, (0, 1), 2048))
    assert "full = empty(f8e4m3[2 * S, 4224])" in text
    assert "all_reduce" not in text
    team = LinearLayer("all_gather", "bf16", 4096, (1024,), (False,), recipe=Recipe(scale="team"))
    assert 'all_reduce(x_amax, reduced, reduce="max", team=tp)' in str(serial(team, (0, 1), 2048))
