"""What surrounds the iteration for a large matrix, in one pass over memory each.

    u = momentum averaged with the gradient, and Nesterov's look ahead      # momentum_kernel
    ...                                                                     # Newton-Schulz
    w = w * factor + alpha * u                                              # descend_kernel

The twins are the foreach operators in update.py; values are rounded where those round them.
"""

# Triton's language is not Python to a type checker.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlace.kernels.launch import TYPES, KernelSource

BLOCK = 4096
"""Elements that a block of threads takes."""


@triton.jit
def lerp(start, end, weight):
    """As torch does it: from the nearer end."""
    return tl.where(
        weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight)
    )


@triton.jit
def momentum_kernel(
    update, moment, x, squares, count, weight, momentum,
    AVERAGE: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the update to x, and the sum of the squares of each block of it. With AVERAGE, what is
    given is the gradient: the moment moves towards it by `weight`, and makes the update.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    u = tl.load(update + at, mask=mask, other=0.0)
    if AVERAGE:
        kept: tl.constexpr = u.dtype
        grad = u.to(tl.float32)
        u = lerp(tl.load(moment + at, mask=mask, other=0.0).to(tl.float32), grad, weight).to(kept)
        tl.store(moment + at, u, mask=mask)
        if NESTEROV:
            u = lerp(grad, u.to(tl.float32), momentum).to(kept)
    u = u.to(x.dtype.element_ty)
    tl.store(x + at, u, mask=mask)
    wide = u.to(tl.float64)  # whose squares are numbers
    tl.store(squares + tl.program_id(0), tl.sum(wide * wide))


@triton.jit
def descend_kernel(param, x, count, factor, alpha, BLOCK: tl.constexpr):
    """Multiplies the parameter by `factor`, and adds `alpha * x`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    kept = param.dtype.element_ty
    p = (tl.load(param + at, mask=mask).to(tl.float32) * factor).to(kept)
    p = p.to(tl.float32) + tl.load(x + at, mask=mask).to(tl.float32) * alpha
    tl.store(param + at, p.to(kept), mask=mask)


def momentum_source(dtype: torch.dtype, average: bool, nesterov: bool) -> KernelSource:
    """The kernel for gradients and momentum, or updates, of this dtype; x is bfloat16."""
    return KernelSource(
        kernel=momentum_kernel,
        types={
            **dict.fromkeys(("update", "moment"), "*" + TYPES[dtype]),
            "x": "*bf16",
            "squares": "*fp64",
            "count": "i32",
            **dict.fromkeys(("weight", "momentum"), "fp32"),
        },
        constants={"AVERAGE": average, "NESTEROV": nesterov, "BLOCK": BLOCK},
        num_warps=8,
        divisible={"count": 16, "squares": 8},
    )


def descend_source(param: torch.dtype) -> KernelSource:
    """The kernel for parameters of this dtype; x is bfloat16."""
    return KernelSource(
        kernel=descend_kernel,
        types={
            "param": "*" + TYPES[param],
            "x": "*bf16",
            "count": "i32",
            **dict.fromkeys(("factor", "alpha"), "fp32"),
        },
        constants={"BLOCK": BLOCK},
        num_warps=8,
        divisible={"count": 16},
    )
