"""Products of quantised matrices: against their references, fp64, and each other's accuracy."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from interlace.errors import InputError
from interlace.float8 import E4M3, E5M2, Float8Data, Recipe, amax_of, matmul, quantize, wgrad
from interlace.float8.data import numbers, scales, width
from interlace.float8.products import multiply_into
from interlace.float8.quantization import turn_into

TEAM = Recipe(scale="team")


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, columns).to(dtype)


def exact(a: Float8Data, b: Float8Data) -> tuple[Tensor, Tensor]:
    """`a @ b.T` of what they stand for in fp64, and the sum of the terms' magnitudes."""
    left, right = (x.data.double() * x.scale_inv.double() for x in (a, b))
    return left @ right.t(), left.abs() @ right.abs().t()


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_three_products_of_a_layer(out: torch.dtype, seed: int) -> None:
    """Forward, dgrad and wgrad, within what fp32 sums and one rounding explain; odd row counts."""
    torch.manual_seed(seed)
    draw, recipe = random.Random(seed), Recipe()
    for _ in range(4):
        m, n, k = draw.randint(1, 70), 16 * draw.randint(1, 5), 16 * draw.randint(1, 5)
        x = quantize(drawn(m, k), E4M3, recipe, transpose=True)
        w = quantize(drawn(n, k), E4M3, recipe, transpose=True)
        dy = quantize(drawn(m, n), recipe.gradient, recipe, transpose=True)
        for a, b in ((x, w), (dy, w.t()), (dy.t(), x.t())):
            made = matmul(a, b, out)
            wanted, size = exact(a, b)
            assert made.shape == wanted.shape
            assert made.dtype == out
            terms = a.data.shape[1] + 4
            room = size * terms * 2.0**-24 + wanted.abs() * torch.finfo(out).eps / 2 + 1e-7
            assert ((made.double() - wanted).abs() <= room).all()


def test_the_copy_is_the_transpose(seed: int) -> None:
    torch.manual_seed(seed)
    x = quantize(drawn(21, 48), E4M3, transpose=True)
    assert torch.equal(x.t().dequantize()[:, :21], x.dequantize().t())
    assert not x.t().dequantize()[:, 21:].any()
    assert torch.equal(x.t().t().dequantize(), x.dequantize())


@pytest.mark.parametrize(("shards", "rows"), [(2, 32), (3, 21), (4, 7), (2, 0), (1, 40)])
def test_wgrad_over_shards(shards: int, rows: int, seed: int) -> None:
    """Each shard by its own scale, of dy and of x, however far apart: within fp32's sums."""
    torch.manual_seed(seed)
    dys = [quantize(drawn(rows, 32) * 10.0**i, E5M2) for i in range(shards)]
    xs = [quantize(drawn(rows, 48) * 10.0 ** (i % 2), E4M3) for i in range(shards)]
    made = wgrad(dys, xs)
    assert made.shape == (32, 48)
    left, right = (torch.cat([one.dequantize().double() for one in ones]) for ones in (dys, xs))
    wanted, size = left.t() @ right, left.abs().t() @ right.abs()
    assert ((made.double() - wanted).abs() <= size * (shards * rows + 4) * 2.0**-24).all()
    assert torch.equal(wgrad(dys, xs, torch.bfloat16), made.bfloat16())


def test_wgrad_of_one_scale_is_one_product(seed: int) -> None:
    """A team's scale need not be a power of two: shares of equal scales are 1."""
    torch.manual_seed(seed)
    dy, x = drawn(96, 32), drawn(96, 48)
    whole = [quantize(t, kind, TEAM, transpose=True) for t, kind in ((dy, E5M2), (x, E4M3))]
    dys, xs = (
        [quantize(part, kind, TEAM, amax=amax_of(t)) for part in t.chunk(3)]
        for t, kind in ((dy, E5M2), (x, E4M3))
    )
    wanted = matmul(whole[0].t(), whole[1].t(), torch.float32)
    _, size = exact(whole[0].t(), whole[1].t())
    assert ((wgrad(dys, xs) - wanted).abs() <= size * 100 * 2.0**-24).all()


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-12])
@pytest.mark.parametrize("gradient", [E5M2, E4M3], ids=str)
def test_a_shard_of_zeros_costs_wgrad_nothing(
    gradient: torch.dtype, size: float, seed: int
) -> None:
    """Of dy or of x, however small the others are; and scales that are far apart in both."""
    torch.manual_seed(seed)
    dy, x = torch.randn(4, 32, 32) * size, torch.randn(4, 32, 48) * size
    dy[1], x[2] = 0, 0
    dy[0], x[0] = dy[0] * 2**9, x[0] / 2**9
    made = wgrad([quantize(part, gradient) for part in dy], [quantize(part, E4M3) for part in x])
    wanted = torch.einsum("smn,smk->nk", dy.double(), x.double())
    assert (made.double() - wanted).norm() <= 0.09 * wanted.norm()
    zeros = [quantize(torch.zeros(16, 16), kind) for kind in (gradient, E4M3)]
    assert not wgrad([zeros[0]] * 2, [zeros[1]] * 2).any()


def test_what_a_shift_makes_too_small(seed: int) -> None:
    """E5M2 has 30 binades above its subnormal numbers: shares down to 2**-20 lose nothing there."""
    torch.manual_seed(seed)
    rows, near = 16, torch.rand(16, 16) + 1
    dys = [quantize(near * 2.0**-i, E5M2) for i in (0, 20)]
    xs = [quantize(near, E4M3) for _ in dys]
    packed = torch.cat([dy.packed for dy in dys])
    across = packed.new_empty(16, width(2 * rows))
    turn_into(across, packed, torch.cat([x.packed for x in xs]), 2)
    found = numbers(across).float().t() * scales(across)[0]
    wanted = torch.cat([dy.dequantize() * x.scale_inv[0] for dy, x in zip(dys, xs, strict=True)])
    assert torch.equal(found, wanted)


def test_a_shard_with_inf_or_only_zeros_spoils_no_other(seed: int) -> None:
    torch.manual_seed(seed)
    x = drawn(64, 32)
    x[48:] = torch.inf
    x[16:32] = 0
    clean = quantize(x[:16], E4M3)
    shards = [quantize(part, E4M3) for part in x.chunk(4)]
    assert torch.equal(shards[0].dequantize(), clean.dequantize())
    assert shards[1].scale_inv.unique().item() == 2.0**-127  # the least: it shifts no other
    assert shards[3].scale_inv.unique().item() == 1
    assert (shards[3].dequantize() == 448).all()
    w8 = quantize(drawn(16, 32), E4M3)
    assert all(matmul(shard, w8).isfinite().all() for shard in shards)


def operands(m: int = 4, n: int = 16, k: int = 32) -> tuple[Float8Data, Float8Data]:
    return quantize(drawn(m, k), E4M3), quantize(drawn(n, k), E4M3)


def test_what_the_gemm_cannot_take() -> None:
    a, b = operands()
    with pytest.raises(InputError, match=r"K \(columns of a and b\) is 31: .*multiples of 16"):
        matmul(*operands(k=31))
    with pytest.raises(InputError, match=r"N \(rows of b\) is 20: .*multiples of 16"):
        matmul(*operands(n=20))
    with pytest.raises(InputError, match=r"a is \[4, 32\] and b \[16, 48\]"):
        matmul(a, operands(k=48)[1])
    with pytest.raises(InputError, match=r"out_dtype is torch\.float64: take one of"):
        matmul(a, b, torch.float64)
    with pytest.raises(InputError, match=r"both torch\.float8_e5m2"):
        matmul(quantize(drawn(4, 32), E5M2), quantize(drawn(16, 32), E5M2))
    with pytest.raises(InputError, match="4 packed rows are not 0 equal blocks"):
        multiply_into(torch.empty(4, 16), a.packed, b.packed, 0, None, False)
    with pytest.raises(InputError, match="transpose=True"):
        matmul(a, b.t())
    with pytest.raises(InputError, match=r"shards have \[4, 16\] rows"):
        wgrad([a], [b])
    with pytest.raises(InputError, match="inputs are of 2 widths or formats"):
        wgrad([b, b], [b, operands(k=48)[1]])
    with pytest.raises(InputError, match="1 gradients and 0 inputs"):
        wgrad([a], [])


def test_nothing_times_something_is_zero() -> None:
    for m, k in ((0, 32), (3, 0)):
        made = matmul(*operands(m=m, k=k))
        assert made.shape == (m, 16)
        assert not made.any()
