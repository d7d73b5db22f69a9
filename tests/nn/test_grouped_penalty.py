"""GroupedLinear's gradients cannot be differentiated again, and say so where that is asked for."""

from __future__ import annotations

import pytest
import torch

from interlace.errors import UnsupportedError
from interlace.nn import GroupedLinear
from interlace.optim import GradAccumulator

SIZES = [3, 0, 4]


def made(seed: int) -> tuple[GroupedLinear, torch.Tensor]:
    torch.manual_seed(seed)
    return GroupedLinear(3, 8, 16), torch.randn(9, 8, requires_grad=True)


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
def test_a_gradient_penalty_is_refused(of: str, seed: int) -> None:
    """Its term would give no gradient, silently; a graph of the gradient alone does no harm."""
    layer, x = made(seed)
    leaf = {"x": x, "weight": layer.weight, "bias": layer.bias}[of]
    assert leaf is not None
    y = layer(x, SIZES)
    (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x, SIZES).sum(), leaf)
    assert torch.equal(grad, plain)
    assert (grad.requires_grad, plain.requires_grad) == (True, False)
    with pytest.raises(UnsupportedError, match="differentiated again"):
        (y.square().mean() + grad.square().sum()).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_penalty_of_an_accumulated_gradient_is_refused(seed: int) -> None:
    layer, x = made(seed)
    layer.weight.grad = torch.zeros_like(layer.weight)
    _held = GradAccumulator(layer.weight)
    y = layer(x, SIZES).square().mean()
    (grad,) = torch.autograd.grad(y, layer.weight, retain_graph=True)
    y.backward(create_graph=True)
    assert torch.equal(layer.weight.grad, grad)
    with pytest.raises(UnsupportedError, match="differentiated again"):
        layer.weight.grad.square().sum().backward()
    layer.weight.grad = None  # the cycle that torch warns of
