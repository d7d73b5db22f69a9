"""What a user writes into a bf16 parameter between steps, beside the remainder of its master."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from interlace.optim import AdamW
from interlace.optim.adam.arithmetic import join

INF = float("inf")
WRITES: dict[str, Any] = {
    "zero": lambda p: p.zero_(),
    "negative zero": lambda p: p.zero_().neg_(),
    "clamp": lambda p: p.clamp_(min=0),
    "inf": lambda p: p.fill_(INF),
    "-inf": lambda p: p.fill_(-INF),
    "zeros": lambda p: p.copy_(torch.zeros_like(p)),
    "numbers": lambda p: p.copy_(torch.randn(p.shape)),
}


def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn_like(param)
        optimizer.step()


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_stays(write: str, seed: int) -> None:
    """To within a rounding: no parameter makes a NaN together with an old remainder."""
    torch.manual_seed(seed)
    param = torch.randn(50, 8).bfloat16().requires_grad_()
    optimizer = AdamW([param], lr=1e-3, weight_decay=0.0, master_weights="remainder")
    train(optimizer, 3)
    with torch.no_grad():
        WRITES[write](param)
    written = param.detach().clone()
    state = optimizer.state[param]
    assert not join(param.detach(), state["remainder"].view(torch.int16)).isnan().any()
    state["exp_avg"].zero_()
    param.grad = torch.zeros_like(param)
    optimizer.step()  # which moves nothing
    assert torch.equal(param, written)
    train(optimizer, 2)
    assert not param.isnan().any()
    assert torch.equal(param.isinf(), written.isinf())


def test_a_module_that_is_rolled_back_to_zeros_trains_on(seed: int) -> None:
    """A bias as it was made is 0, beside the remainders of the steps since."""
    torch.manual_seed(seed)
    layer = torch.nn.LayerNorm(512, dtype=torch.bfloat16)
    start = copy.deepcopy(layer.state_dict())
    optimizer = AdamW(layer.parameters(), master_weights="remainder")
    train(optimizer, 3)
    layer.load_state_dict(start)
    assert not layer.bias.any()
    train(optimizer, 2)
    assert not any(param.isnan().any() for param in layer.parameters())
    assert bool((layer.bias != 0).any())
