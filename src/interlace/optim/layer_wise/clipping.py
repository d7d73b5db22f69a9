"""The norm of the gradients that several optimizers hold, as one.

clip_grad_norm_([dense, experts], 1.0)        # instead of dense.clip_grad_norm_(1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interlace.errors import GradientError
from interlace.optim.untraced import eager

if TYPE_CHECKING:
    from interlace.optim.layer_wise.optimizer import LayerWise


@eager
@torch.no_grad()
def clip_grad_norm_(
    optimizers: Sequence[LayerWise],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients of all optimizers together, as torch.nn.utils.clip_grad_norm_ does.

    Gives the norm of all gradients, a scalar of fp64, the same on every rank. Collective; once
    a step, after its last backward.
    """
    norms = [optimizer.grad_norm(norm_type) for optimizer in optimizers]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise GradientError(f"the norm of the gradients is {total.item()}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for optimizer in optimizers:
        optimizer.scale_grads(scale)
    return total
