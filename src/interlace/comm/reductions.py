"""Reductions in rank order, accumulated in fp32: the same bits on every rank and in every run.

>>> reduce_into(out, [torch.ones(2), torch.ones(2)], "sum")
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.errors import UnsupportedError


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type a reduction accumulates in: fp32 for narrower floats, else the type itself."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow else dtype


def check_reduction(reduce: str, dtype: torch.dtype) -> None:
    """Raises `UnsupportedError` where the reduction has no meaning for the element type."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if reduce == "avg" and exact:
        raise UnsupportedError(
            f"an average of {dtype} is not defined: reduce with sum and divide, or convert first"
        )
    if dtype.is_complex and reduce in ("min", "max"):
        raise UnsupportedError(f"{reduce} of {dtype} is not defined: complex numbers have no order")
    if dtype == torch.bool and reduce not in ("min", "max"):
        raise UnsupportedError(f"{reduce} of {dtype} is not defined: reduce with max (or) or min")


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], reduce: str) -> None:
    """`out` becomes the reduction of `parts`, one after another."""
    wide = accumulator(out.dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        match reduce:
            case "sum" | "avg":
                total += part.to(wide)
            case "prod":
                total *= part.to(wide)
            case "min":
                torch.minimum(total, part.to(wide), out=total)
            case _:
                torch.maximum(total, part.to(wide), out=total)
    if reduce == "avg":
        total /= len(parts)
    out.copy_(total)
