"""Newton-Schulz iterations: the singular values of a matrix are driven to about one.

    x = update.to(torch.bfloat16)                              # rows <= columns
    x = orthogonalize(x, coefficients((3.4445, -4.7750, 2.0315), 5), eps=1e-7)

A step with coefficients (a, b, c) maps each singular value s to a s + b s^3 + c s^5:

    g = x @ x.mT;   x = a * x + (b * g + c * g @ g) @ x

Note [One factor]
    The kernel adds a to the diagonal before it rounds b g + c g^2, so x is multiplied once and not
    copied for the sum, which addmm does. Where singular values are about one, so is the factor, and
    rounds finer than the difference from a; elsewhere coarser. Errors are the same by size.

Note [Symmetric products]
    They cost about half of dense ones where the kernel `serves`, which computes the lower triangle
    and mirrors it: its results are symmetric bit for bit. The reference is what torch.optim.Muon
    calls, whose results are symmetric within rounding.

Note [Completed square]
    a + b g + c g^2 is c (g + h)^2 + a - b h / 2 with h = b / (2 c), which reads one matrix and not
    two. g + h is rounded where g was: the diagonal by 2^-9 of h, which the factor has b times, so
    b may not be steep. Else the sum is as it stands.

Note [Norm]
    x is divided by its norm, so that its singular values are at most 1. Squares of its elements may
    not be numbers of fp32, nor its products: so x is first divided by a power of two, which changes
    no bits of what follows where all squares are numbers. Where squares are summed in fp64, there
    is no need.

Note [Gram variant]
    Rows by rows matrices are cheaper than x where it is wide. For some steps (RESTART) only
    g = x @ x.mT and the product q of their factors p = a + b g + c g^2 are kept: g becomes p g p,
    and at the end x becomes q @ x. In exact arithmetic that is the same; rounded it is not, so the
    variant is not bit-equal. g has the squares of the singular values, so the small ones drown in
    rounding, and such errors grow by a^2 at each step, as what they fall on does: x is made and g
    computed anew after RESTART steps. The variant computes in float16, which rounds 8 times finer
    than bfloat16; x is scaled so that elements of g are of a size that float16 has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from interlace.errors import OptimizerError
from interlace.kernels.gemm.support import ALIGNMENT, LIMIT, refuse_device

Triple = tuple[float, float, float]
RESTART = 3
"""Steps of the Gram variant between two products with x."""
EXPONENT = 0x7F80
"""The bits of a bfloat16 that are its power of two."""
TINY = torch.finfo(torch.bfloat16).tiny
SCALE = 32.0
"""Scale of x in the Gram variant: a matrix of norm 1 and 4096 rows has a g of some 1/4096."""
STEEP = 8.0
"""The square is completed for smaller |b|."""
STEP = 128
"""A multiple of the columns that each of the kernel's configurations takes at a time."""


def coefficients(given: object, steps: int) -> tuple[Triple, ...]:
    """Coefficients of each step: from one triple for all, or a sequence of triples, whose last
    is repeated. Raises OptimizerError for anything else.
    """
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise OptimizerError(
            f"ns_coefficients={given!r}: give three numbers, or a sequence of three for each step"
        )
    triples = given if isinstance(given[0], Sequence) else (given,)
    if not all(len(triple) == 3 for triple in triples):
        raise OptimizerError(f"ns_coefficients={given!r}: three numbers (a, b, c) a step")
    numbers = [(float(a), float(b), float(c)) for a, b, c in triples]
    return tuple(numbers[min(step, len(numbers) - 1)] for step in range(steps))


def orthogonalize(
    x: Tensor,
    steps: Sequence[Triple],
    *,
    eps: float,
    gram_variant: bool = False,
    symmetric: bool = True,
    squares: Tensor | None = None,
) -> Tensor:
    """The iteration on `x`, bfloat16 of shape [rows, columns] or [batch, rows, columns] with
    rows <= columns, contiguous or a transposed view of what is, which may be overwritten; the
    result has its shape and dtype, and by the kernel its layout.

    `symmetric` lets the kernel make the symmetric products where it serves x. Without it, and
    without `gram_variant`, one matrix has the bits of torch.optim.Muon. `squares`: the squares of
    the matrices' norms, fp64 of shape [batch], where they are known.
    """
    kernel = symmetric and serves(x)
    rows, columns = x.shape[-2:]
    gram = gram_variant and gram_pays(rows, columns, len(steps), symmetric)
    if kernel:
        squares = squared_norms(x) if squares is None else squares
        scale = squares.sqrt().clamp(min=max(eps, TINY)).reciprocal().float()
        x.mul_(scale.view(-1, *[1] * (x.ndim - 1)))
    else:
        normalize(x, eps)
    if gram:
        made = x.mul_(SCALE).to(torch.float16)
        for first in range(0, len(steps), RESTART):
            made = _gram_steps(made, steps[first : first + RESTART], kernel)
        return torch.mul(made, 1 / SCALE, out=x)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in steps:
        if kernel:  # see Note [One factor]
            x = times(factor(x, a, b, c), x)
        else:
            x = add(x, polynomial(x @ x.mT, 0.0, b, c, kernel=False), x, beta=a)
    return x


def squared_norms(x: Tensor) -> Tensor:
    """The square of the norm of each matrix, fp64."""
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64)
    return norms.square().reshape(-1)


def normalize(x: Tensor, eps: float) -> None:
    """Divides each matrix by its norm, or by `eps` where that is larger. With `eps` 0 the result
    does not depend on the scale of x at all, and a matrix of zeros remains one. See Note [Norm].
    """
    each = {} if x.ndim == 2 else {"dim": (-2, -1), "keepdim": True}
    largest = torch.linalg.vector_norm(x, torch.inf, **each)
    power = (largest.view(torch.int16) & EXPONENT).view(x.dtype).clamp(min=TINY)
    x.div_(power)
    least = torch.full_like(power, eps).div_(power).clamp_(min=TINY)
    x.div_(torch.maximum(torch.linalg.vector_norm(x, **each), least))


def _gram_steps(x: Tensor, steps: Sequence[Triple], kernel: bool) -> Tensor:
    """Some steps at once, of a float16 x that is SCALE times as large; see Note [Gram variant]."""
    g = product(x, x.mT, kernel=kernel)
    q: Tensor | None = None
    for left, (a, b, c) in zip(reversed(range(len(steps))), steps, strict=True):
        p = polynomial(g, a, b / SCALE**2, c / SCALE**4, kernel=kernel)
        q = p if q is None else product(q, p, kernel=kernel)
        for _ in range(2 if left else 0):
            g = product(g, p, kernel=kernel)
    assert q is not None
    return times(q, x) if kernel else q @ x


def gram_pays(rows: int, columns: int, steps: int, symmetric: bool) -> bool:
    """True if the Gram variant takes fewer operations for matrices of that size."""
    size = rows, columns, steps
    plain, gram = (flops(*size, gram_variant=g, symmetric=symmetric) for g in (False, True))
    return gram < plain


def flops(rows: int, columns: int, steps: int, *, gram_variant: bool, symmetric: bool) -> float:
    """Floating-point operations of one matrix; a symmetric product takes half, if `symmetric`. The
    Gram variant stands for the plain steps where it takes more.
    """
    rows, columns = sorted((rows, columns))
    share = 0.5 if symmetric else 1.0
    total = steps * 2.0 * rows**2 * (columns + share * (columns + rows))
    if gram_variant:
        gram = 0.0
        for first in range(0, steps, RESTART):
            count = min(RESTART, steps - first)
            gram += columns + share * (columns + rows * (count + 3 * (count - 1)))
        total = min(total, 2.0 * rows**2 * gram)
    return total


# -- products -------------------------------------------------------------------------------------


def product(left: Tensor, right: Tensor, *, kernel: bool) -> Tensor:
    """`left @ right` of matrices or batches of them, where that is symmetric: `right` is `left.mT`,
    or both are symmetric and commute.
    """
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(left, right.mT)
    return left @ right


def factor(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """`a * identity + b * g + c * g @ g`, g being `x @ x.mT`, by the kernel."""
    from interlace.optim.muon.launch import symmetric_product  # imports Triton

    if abs(b) >= min(STEEP, 4 * abs(c)):
        g = symmetric_product(x, x)
        return symmetric_product(g, g, g, alpha=c, beta=b, gamma=a)
    half = b / (2 * c)  # see Note [Completed square]
    g = symmetric_product(x, x, gamma=half)
    return symmetric_product(g, g, alpha=c, gamma=a - half * b / 2)


def polynomial(g: Tensor, a: float, b: float, c: float, *, kernel: bool) -> Tensor:
    """`a * identity + b * g + c * g @ g` of symmetric matrices or batches of them."""
    if kernel:
        from interlace.optim.muon.launch import symmetric_product  # imports Triton

        return symmetric_product(g, g, g, alpha=c, beta=b, gamma=a)
    if c == 0:  # torch 2.13's baddbmm of bfloat16 ignores beta then, on CPUs
        made = g * b
    else:
        made = (torch.addmm if g.ndim == 2 else torch.baddbmm)(g, g, g, beta=b, alpha=c)
    if a:
        made.diagonal(dim1=-2, dim2=-1).add_(a)
    return made


def times(p: Tensor, x: Tensor) -> Tensor:
    """`p @ x` of a symmetric p, laid out as x is."""
    return p @ x if x.is_contiguous() else (x.mT @ p).mT


def reads_columns(count: int, inner: int) -> bool:
    """True if the kernel takes `count` matrices of `inner` columns that are transposed views: a
    step along the columns must not end in the next matrix.
    """
    return count == 1 or inner % STEP == 0


def serves(x: Tensor) -> bool:
    """True if the kernel makes products of x, and of square matrices with its rows."""
    rows, inner = x.shape[-2:]
    whole = rows * x.itemsize % ALIGNMENT == 0 and inner * x.itemsize % ALIGNMENT == 0
    by_columns = x.mT.is_contiguous() and reads_columns(x.shape[:-2].numel(), inner)
    dense = (
        x.dtype in (torch.bfloat16, torch.float16)
        and (x.is_contiguous() or by_columns)
        and x.data_ptr() % ALIGNMENT == 0
    )
    small = x.numel() // max(min(rows, inner), 1) < LIMIT
    return whole and dense and small and x.numel() > 0 and runs_on(x.device)


@cache
def runs_on(device: torch.device) -> bool:
    """True if the kernel runs on this device."""
    return torch.version.hip is None and refuse_device(device, newer=True) is None
