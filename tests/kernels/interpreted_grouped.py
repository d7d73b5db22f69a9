"""Runs the kernels of grouped linear layers in Triton's interpreter, beside their references.

The interpreter cuts bfloat16 off instead of
rounding, so elements are half or float here.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import random

import torch
from tests.support.interpreting import run
from triton.tools.tensor_descriptor import TensorDescriptor

from interlace.nn.grouped import products as grouped
from interlace.nn.grouped.kernel import ends_kernel, rows_kernel, sums_kernel, wgrad_kernel
from interlace.nn.grouped.products import Groups

BM, BN, BK = 16, 32, 16


def groups_of(draw: random.Random) -> tuple[Groups, torch.Tensor]:
    """Ragged groups, some empty, often with padding; and their ends."""
    num = draw.randint(1, 5)
    sizes = [draw.choice([0, 0, 1, 7, BK, 2 * BK, 37]) for _ in range(num)]
    tokens = max(1, sum(sizes) + draw.choice([0, 0, 5]))
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Groups(num, tokens, tuple(sizes), None, sum(sizes) < tokens), ends


def spoil(matrix: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Padding may hold anything."""
    matrix[groups.total :] = float("nan")
    return matrix


def described(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def check_wgrad(draw: random.Random) -> None:
    groups, ends = groups_of(draw)
    rows, columns = draw.choice([8, 16, 24, 40]), draw.choice([8, 32, 72])
    dtype = draw.choice([torch.float16, torch.float32])
    kind = draw.choice([torch.float32, torch.float64, dtype])
    accumulate = draw.random() < 0.6
    # Whole numbers: their products and sums are exact, and so must the results be.
    dy = spoil(torch.randint(-4, 5, (groups.tokens, rows)).to(dtype), groups)
    x = spoil(torch.randint(-4, 5, (groups.tokens, columns)).to(dtype), groups)
    shape = groups.num, rows, columns
    out = torch.randint(-8, 9, shape).to(kind) / 2 if accumulate else torch.full(shape, torch.nan)
    out = out.to(kind)
    if kind is torch.float64:
        out += 2.0**40  # which fp32 has not beside halves
    wanted = out.clone()
    grid = groups.num * -(-rows // BM) * -(-columns // BN)
    wgrad_kernel[(grid,)](
        described(dy, BK, BM), described(x, BK, BN), dy, x, ends, out, groups.tokens, rows, columns,
        BM=BM, BN=BN, BK=BK, GROUP_M=2, ACCUMULATE=accumulate,
    )  # fmt: skip
    grouped.weight_gradient(dy, x, groups, out=wanted, accumulate=accumulate)
    assert torch.equal(out, wanted), (groups, dtype, kind, accumulate)


def check_rounding(draw: random.Random) -> None:
    """The product is rounded to the buffer's type first, then the sum is, as in the reference."""
    groups, ends = groups_of(draw)
    dy = spoil(torch.randn(groups.tokens, 16).half(), groups)
    x = spoil(torch.randn(groups.tokens, 32).half(), groups)
    before = torch.randn(groups.num, 16, 32).half() * 8
    made, out = torch.empty_like(before), before.clone()
    for into, accumulate in ((made, False), (out, True)):
        wgrad_kernel[(groups.num,)](
            described(dy, BK, BM), described(x, BK, BN), dy, x, ends, into, groups.tokens, 16, 32,
            BM=BM, BN=BN, BK=BK, GROUP_M=2, ACCUMULATE=accumulate,
        )  # fmt: skip
    assert torch.equal(out, before + made), groups
    wanted = torch.empty(before.shape)
    grouped.weight_gradient(dy.float(), x.float(), groups, out=wanted, accumulate=False)
    torch.testing.assert_close(made.float(), wanted, rtol=2e-3, atol=2e-3)


def check_sums(draw: random.Random) -> None:
    groups, ends = groups_of(draw)
    columns = draw.choice([8, 32, 72])
    dy = spoil(torch.randint(-4, 5, (groups.tokens, columns)).half(), groups)
    out = torch.full((groups.num, columns), torch.nan).half()
    sums_kernel[(groups.num * -(-columns // BN),)](
        dy, ends, out, groups.tokens, columns, BK=BK, BN=BN
    )
    assert torch.equal(out, grouped.bias_gradient(dy, groups)), groups


def check_rows(draw: random.Random) -> None:
    groups, ends = groups_of(draw)
    columns, biased = draw.choice([8, 32, 72]), draw.random() < 0.5
    y = spoil(torch.randn(groups.tokens, columns).half(), groups)
    bias = torch.randn(groups.num, columns).half()
    wanted = y.clone()
    wanted[groups.total :] = 0
    for group, start, end in groups.spans():
        if biased:
            wanted[start:end] = (wanted[start:end].float() + bias[group].float()).half()
    rows_kernel[(-(-groups.tokens // BK), -(-columns // BN))](
        y, bias, ends, groups.num, groups.tokens, columns, BIAS=biased, BK=BK, BN=BN
    )
    assert torch.equal(y, wanted), (groups, biased)


def check_ends(draw: random.Random) -> None:
    """What torch makes of them, also where sizes are negative, far too large, or wrap."""
    num, tokens = draw.randint(1, 70), draw.choice([1, 40, 5000])
    dtype = draw.choice([torch.int32, torch.int64])
    most = draw.choice([3, 100, 2**31 - 1, 2**40 if dtype == torch.int64 else 9])
    sizes = torch.randint(draw.choice([0, 0, -most]), most, (num, 3)).to(dtype)
    sizes = sizes[:, 1] if draw.random() < 0.5 else sizes.reshape(-1)[1 : 1 + num]
    ends = torch.full((num + 1,), -7, dtype=torch.int32)
    block = max(32, 1 << (num - 1).bit_length())
    ends_kernel[(1,)](sizes, ends, num, sizes.stride(0), tokens, BLOCK=block)
    wanted = sizes.cumsum(0, dtype=torch.int32).clamp_(0, tokens)
    assert ends.tolist() == [*wanted.tolist(), -7], (sizes, tokens)


def check_bounds(draw: random.Random) -> None:
    """Sizes that ask for more rows than there are read and write nothing out of bounds."""
    tokens, ends = 20, torch.tensor([16, 900, 950], dtype=torch.int32)
    dy = torch.randint(-4, 5, (tokens + 64, 16)).half()
    x = torch.randint(-4, 5, (tokens + 64, 32)).half()
    out = torch.full((3, 16, 32), torch.nan)
    wgrad_kernel[(3,)](
        described(dy[:tokens], BK, BM), described(x[:tokens], BK, BN), dy, x, ends, out,
        tokens, 16, 32, BM=BM, BN=BN, BK=BK, GROUP_M=2, ACCUMULATE=False,
    )  # fmt: skip
    groups = Groups(3, tokens, (16, 4, 0), None, False)
    wanted = torch.empty_like(out)
    grouped.weight_gradient(dy[:tokens], x[:tokens], groups, out=wanted, accumulate=False)
    assert torch.equal(out, wanted)


if __name__ == "__main__":
    run(check_wgrad, check_rounding, check_sums, check_rows, check_ends, once=check_bounds)
