"""GroupedLinear in FP8: the bits of the row-wise recipe by hand, a group at a time.

The CPU runs the loop here; tests/gpu/test_grouped.py compares the grouped GEMM with it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from interlace.errors import InputError, InterlaceError
from interlace.float8 import E4M3, E5M2, ROW_WISE, Recipe, quantize
from interlace.nn import GroupedLinear
from interlace.optim import GradAccumulator

INNER, OUTER = 48, 80
PLAIN = Recipe(scaling="row", gradient=E4M3, eps=1e-6)
SIZES = {
    "uneven": ([5, 0, 17, 8], 30),
    "padded": ([5, 0, 17, 8], 41),
    "one group has all": ([0, 0, 12, 0], 12),
    "all empty, all padding": ([0, 0, 0, 0], 7),
    "no rows": ([0, 0, 0, 0], 0),
}


def drawn(seed: int, tokens: int, dtype: torch.dtype, bias: bool, recipe: Recipe) -> Any:
    """A layer, rows of very different sizes with one of zeros, and an upstream gradient."""
    torch.manual_seed(seed)
    layer = GroupedLinear(4, INNER, OUTER, bias, dtype=dtype, recipe=recipe)
    x, dy = torch.randn(tokens, INNER), torch.randn(tokens, OUTER)
    x *= 10.0 ** torch.randint(-3, 4, (tokens, 1))
    x[1:2], dy[2:3] = 0, 0
    return layer, x.to(dtype).requires_grad_(), dy.to(dtype)


def numbers(x: Tensor, recipe: Recipe) -> Tensor:
    """What rows stand for, once they are quantised."""
    return quantize(x, E4M3, recipe).dequantize()


def by_hand(layer: GroupedLinear, x: Tensor, dy: Tensor, sizes: list[int], recipe: Recipe) -> Any:
    """Output, and the gradients of x, weight and bias."""
    weight, bias = layer.weight.detach(), layer.bias
    y, dx = torch.zeros_like(dy), torch.zeros_like(x)
    dw, db = torch.zeros_like(weight), torch.zeros_like(weight[:, :, 0])
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start + size)
        if size:
            made = numbers(x[part], recipe) @ numbers(weight[g], recipe).t()
            y[part] = made if bias is None else made + bias.detach()[g]
            dx[part] = numbers(dy[part], recipe) @ numbers(weight[g].t(), recipe).t()
            dw[g], db[g] = dy[part].t() @ x[part], dy[part].sum(0)
        start += size
    return y, dx, dw, db


@pytest.mark.parametrize("recipe", [ROW_WISE, PLAIN], ids=["powers", "plain"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_has_the_bits_of_the_recipe_by_hand(
    name: str, dtype: torch.dtype, bias: bool, recipe: Recipe, seed: int
) -> None:
    sizes, tokens = SIZES[name]
    layer, x, dy = drawn(seed, tokens, dtype, bias, recipe)
    if dtype == torch.float16:
        x.data.clamp_(-100, 100)
    total = sum(sizes)
    with torch.no_grad():
        x[total:] = torch.nan  # padding reaches nothing
    dy[total:] = torch.nan
    y = layer(x, sizes)
    y.backward(dy)
    wanted = by_hand(layer, x.detach(), dy, sizes, recipe)
    found = y, x.grad, layer.weight.grad, layer.bias.grad if bias else None
    for one, other in zip(found, wanted, strict=True):
        assert one is None or (one.dtype == dtype and torch.equal(one, other))


def test_gradients_are_within_the_error_of_fp8(seed: int) -> None:
    sizes = [64, 0, 100, 92]
    torch.manual_seed(seed)
    layer = GroupedLinear(4, INNER, OUTER, False, recipe=ROW_WISE)
    x = torch.randn(256, INNER, requires_grad=True)
    layer(x, sizes).sin().sum().backward()
    true = GroupedLinear(4, INNER, OUTER, False, dtype=torch.float64)
    true.weight.data.copy_(layer.weight.data)
    x64: Any = x.detach().double().requires_grad_()
    true(x64, sizes).sin().sum().backward()
    # Each factor is rounded to 4 bits, at 2^-4 of itself at most, and 0.6 of that on the average.
    for found, wanted in ((x.grad, x64.grad), (layer.weight.grad, true.weight.grad)):
        assert found is not None
        assert wanted is not None
        error = (found - wanted).norm() / wanted.norm()
        assert 1e-4 < error < 2 * 2.0**-4


def test_micro_batches_add_into_the_main_gradient(seed: int) -> None:
    sizes = [5, 0, 17, 8]
    layer, x, dy = drawn(seed, 30, torch.bfloat16, False, ROW_WISE)
    main = torch.zeros(layer.weight.shape)
    layer.accumulate_into(GradAccumulator(layer.weight, main))
    for _ in range(2):
        layer(x, sizes).backward(dy)
    assert layer.weight.grad is None
    parts = zip(dy.float().split(sizes), x.detach().float().split(sizes), strict=True)
    for found, (up, rows) in zip(main, parts, strict=True):
        assert torch.equal(found, 2 * (up.t() @ rows))


def test_under_autocast_the_cast_rows_are_quantised(seed: int) -> None:
    sizes = [5, 0, 17, 8]
    layer, x, dy = drawn(seed, 30, torch.float32, True, ROW_WISE)
    cast = copy.deepcopy(layer).bfloat16()
    assert cast.recipe == ROW_WISE
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, sizes)
    y.backward(dy.bfloat16())
    rows: Any = x.detach().bfloat16().requires_grad_()
    wanted = cast(rows, sizes)
    wanted.backward(dy.bfloat16())
    assert torch.equal(y, wanted)
    assert x.grad is not None
    assert rows.grad is not None
    assert torch.equal(x.grad, rows.grad.float())


def test_runs_inside_a_compiled_model(seed: int) -> None:
    layer, x, _ = drawn(seed, 30, torch.float32, True, ROW_WISE)
    sizes = torch.tensor([5, 0, 17, 8])
    compiled: Any = torch.compile(lambda x: layer(x * 2, sizes), backend="eager")
    assert torch.equal(compiled(x), layer(x * 2, sizes))


def test_says_how_it_multiplies(seed: int) -> None:
    layer, x, _ = drawn(seed, 30, torch.bfloat16, True, ROW_WISE)
    assert layer.explain(x).startswith("by loop: the device is cpu")
    assert f"recipe={ROW_WISE}" in repr(layer)


@pytest.mark.parametrize(
    ("inner", "outer", "recipe", "told"),
    [
        (40, 80, ROW_WISE, "`in_features` is 40: .* multiples of 16; pad it"),
        (48, 72, ROW_WISE, "`out_features` is 72: .* multiples of 16"),
        (48, 80, Recipe(gradient=E4M3), "scaling='tensor'.* grouped GEMM takes a scale for each"),
        (48, 80, Recipe(scaling="row", gradient=E5M2), "gradient=torch.float8_e5m2.*ROW_WISE"),
        (48, 80, "row", "`recipe` is 'row': give an interlace.float8.Recipe"),
    ],
)
def test_says_what_it_cannot_take(inner: int, outer: int, recipe: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        GroupedLinear(4, inner, outer, recipe=recipe)


def test_double_is_refused(seed: int) -> None:
    layer = GroupedLinear(4, INNER, OUTER, dtype=torch.float64, recipe=ROW_WISE)
    with pytest.raises(InterlaceError, match=r"x is torch.float64: take one of"):
        layer(torch.randn(30, INNER, dtype=torch.float64), [5, 0, 17, 8])
