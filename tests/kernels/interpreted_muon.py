"""Runs Muon's kernels in Triton's interpreter: see test_interpreted.py.

The interpreter cuts bfloat16 off instead of rounding, so elements are half or float here.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl
from tests.support.interpreting import run
from triton.tools.tensor_descriptor import TensorDescriptor

from interlace.optim.muon.kernel import descend_kernel, momentum_kernel, symmetric_kernel, triangle


@triton.jit
def places(rows, columns, first, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row, column = triangle(first + at)
    tl.store(rows + at, row)
    tl.store(columns + at, column)


def described(matrices: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrices.flatten(0, 1), [rows, columns])


def check(draw: random.Random) -> None:
    """Products of any a and b: the lower triangle of the reference's, and its mirror image."""
    piece = draw.choice([8, 16])
    tile, step = piece * draw.choice([1, 2]), draw.choice([8, 16])
    count, rows = draw.randint(1, 3), 8 * draw.randint(1, 9)
    added, tall = draw.random() < 0.5, draw.random() < 0.5
    inner = rows if added else 8 * draw.randint(1, 9)
    if tall and count > 1:  # see `reads_columns`
        inner = rows = step * draw.randint(1, 4)
    dtype = draw.choice([torch.float16, torch.float32])
    # Whole numbers: their products and sums are exact in fp32, and rounded once at the end.
    a = torch.randint(-3, 4, (count, rows, inner)).to(dtype)
    b = a if draw.random() < 0.3 else torch.randint(-3, 4, a.shape).to(dtype)
    c = torch.randint(-8, 9, (count, rows, rows)).to(dtype)
    y = torch.full((count, rows, rows), torch.nan, dtype=dtype)
    alpha, beta, gamma = (draw.choice([1.0, 0.5, -2.0]) for _ in range(3))
    programs = draw.randint(1, 7)
    given = [t.mT.contiguous() if tall else t for t in (a, b)]
    block = (step, tile) if tall else (tile, step)
    symmetric_kernel[(programs,)](
        described(given[0], *block), described(given[1], *block), described(c, piece, piece), y,
        alpha, beta, gamma, count, rows, inner,
        BM=tile, BK=step, PIECE=piece, ADD=added, TALL=tall,
    )  # fmt: skip
    made = alpha * (a.float() @ b.float().mT)
    if added:
        made += beta * c.float()
    made.diagonal(dim1=-2, dim2=-1).add_(gamma)
    wanted = (made.tril() + made.tril(-1).mT).to(dtype)
    facts = (count, rows, inner, tile, piece, step, dtype, added, programs, tall)
    assert torch.equal(y, wanted), facts


def check_rounding() -> None:
    """What is rounded is rounded once, from fp32, and symmetric bit for bit."""
    x = torch.randn(2, 24, 40).half()
    y = torch.empty(2, 24, 24, dtype=torch.float16)
    symmetric_kernel[(3,)](
        described(x, 16, 16), described(x, 16, 16), described(y, 8, 8), y,
        1.0, 0.0, 0.0, 2, 24, 40,
        BM=16, BK=16, PIECE=8, ADD=False, TALL=False,
    )  # fmt: skip
    assert torch.equal(y, y.mT)
    torch.testing.assert_close(y, (x.float() @ x.float().mT).half(), rtol=1e-3, atol=1e-3)


def check_elementwise(draw: random.Random) -> None:
    """Momentum, look ahead and the sums of squares; decay and step: as the references, in two
    roundings at most where those have one, or one where those have two.
    """
    dtype = draw.choice([torch.float16, torch.float32])
    size, block = 16 * draw.randint(1, 40), 128
    grid = -(-size // block)
    grad, moment = (torch.randn(size).to(dtype) for _ in range(2))
    param, before = torch.randn(size).to(dtype), moment.clone()
    x, squares = torch.full((size,), torch.nan).half(), torch.full((grid,), torch.nan).double()
    average, nesterov = draw.random() < 0.7, draw.random() < 0.5
    momentum = draw.choice([0.3, 0.95])
    momentum_kernel[(grid,)](
        grad, moment, x, squares, size, 1 - momentum, momentum,
        AVERAGE=average, NESTEROV=nesterov, BLOCK=block,
    )  # fmt: skip
    update, wanted = grad, before
    if average:
        wanted = before.lerp(grad, 1 - momentum)
        update = grad.lerp(moment, momentum) if nesterov else moment
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-7}
    torch.testing.assert_close(moment, wanted, **near)
    torch.testing.assert_close(x.to(dtype), update.half().to(dtype), rtol=2**-9, atol=1e-6)
    padded = torch.nn.functional.pad(x.double(), (0, grid * block - size))
    torch.testing.assert_close(squares, padded.view(grid, block).square().sum(1))
    stepped = param.clone()
    descend_kernel[(grid,)](stepped, x, size, 0.75, -0.5, BLOCK=block)
    torch.testing.assert_close(stepped, (param * 0.75).add(x.to(dtype), alpha=-0.5), **near)


def check_triangle() -> None:
    """Every tile once, in order, also where the square root is rounded."""
    rows, columns = (torch.empty(4096, dtype=torch.int32) for _ in range(2))
    for side in (0, 2047, 11584):
        first = side * (side + 1) // 2
        places[(1,)](rows, columns, first, BLOCK=4096)
        for at in range(4096):
            row, column = rows[at].item(), columns[at].item()
            assert 0 <= column <= row
            assert row * (row + 1) // 2 + column == first + at


if __name__ == "__main__":
    run(check, check_elementwise, once=lambda _: (check_rounding(), check_triangle()))
