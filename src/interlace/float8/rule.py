"""Current scaling in plain torch, one fp32 operation after another: the reference of kernel.py.

    scale = scale_of(amax_reference(x), 448.0, Recipe())
    data = cast_reference(x, scale, torch.float8_e4m3fn)     # and scale_inv = 1 / scale

The rule is TransformerEngine's `Float8CurrentScaling`, bit for bit (docs/how-to/fp8.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace.float8.recipe import Recipe

MAX = torch.finfo(torch.float32).max


def amax_reference(x: Tensor) -> Tensor:
    """The largest magnitude of all elements [1], fp32: NaN does not count, of nothing it is 0."""
    if not x.numel():
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax().reshape(1).float()


def scale_of(amax: Tensor, largest: float, recipe: Recipe) -> Tensor:
    """The scales (fp32, shape of `amax`) that bring `amax` to the format's `largest` number."""
    eps = torch.full_like(amax, recipe.eps)
    amax = torch.where(amax < eps, eps, amax)
    # A number divided by a tensor would be a reciprocal and a product, which rounds twice.
    scale = torch.full_like(amax, largest) / amax
    scale = scale.clamp(max=MAX)
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
    if recipe.power_of_two:
        scale = (scale.view(torch.int32) >> 23 << 23).view(torch.float32)
    return scale


def cast_reference(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """`x * scale`, saturated and rounded to nearest even; a NaN is byte 0x7F, whatever its sign."""
    most = torch.finfo(kind).max
    scaled = (x.float() * scale).clamp_(-most, most)  # torch's own cast saturates in some versions
    return scaled.masked_fill_(scaled.isnan(), torch.nan).to(kind)
