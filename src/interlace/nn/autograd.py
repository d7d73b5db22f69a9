"""Autograd and autocast helpers of layers and losses.

`first_order` makes a gradient raise when it is differentiated again. torch's `once_differentiable`
does so only where the upstream gradient asks for a gradient; where the inputs alone do, what
follows from the gradient would silently have none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from interlace.errors import UnsupportedError


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Switches autocast off for a kind of device; nothing where it is off: entering takes time."""
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


class FirstOrder(torch.autograd.Function):
    """The gradient as it is, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> None:
        raise UnsupportedError(
            "a gradient that a layer or a loss of interlace.nn gave cannot be differentiated again "
            "(for a gradient penalty, say); where you need that, use torch.nn's own there"
        )


def first_order(grad: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient; where a graph of it is made (`create_graph`), one that raises when used."""
    if grad is None or not torch.is_grad_enabled():
        return grad
    return FirstOrder.apply(grad, torch.empty(0, requires_grad=True))
