"""`decoupled_weight_decay` in groups and in torch's checkpoints: the class's, or an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from interlace.errors import OptimizerError
from interlace.optim import Adam, AdamW


def param() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def stepped(optimizer: Any) -> list[float]:
    (tensor,) = optimizer.param_groups[0]["params"]
    tensor.grad = torch.ones(2)
    optimizer.step()
    return tensor.tolist()


@pytest.mark.parametrize(("kind", "decoupled"), [(Adam, True), (AdamW, False)])
def test_a_group_that_says_otherwise_is_refused(kind: Any, decoupled: bool) -> None:
    group = {"params": [param()], "decoupled_weight_decay": decoupled}
    with pytest.raises(OptimizerError, match="decays so"):
        kind([group], weight_decay=0.5)
    optimizer = kind([param()], lr=0.1, weight_decay=0.5)
    with pytest.raises(OptimizerError, match="decays so"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("kind", "decoupled"), [(Adam, False), (AdamW, True)])
def test_a_group_that_says_the_same_is_taken(kind: Any, decoupled: bool) -> None:
    group: Any = {"params": [param()], "decoupled_weight_decay": decoupled}
    theirs = torch.optim.Adam([{**group, "params": [param()]}], lr=0.1, weight_decay=0.5)
    wanted = stepped(theirs)
    assert stepped(kind([group], lr=0.1, weight_decay=0.5)) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_checkpoint_keeps_its_kind_of_decay(kind: Any, theirs: Any) -> None:
    """It is torch's that goes on, or nothing is loaded."""
    source = theirs([param()], lr=0.1, weight_decay=0.5)
    stepped(source)
    given = copy.deepcopy(source.state_dict())
    own = source.param_groups[0]["params"][0].detach().clone().requires_grad_()
    optimizer = kind([own], lr=0.7)
    if kind.__name__ != theirs.__name__:
        with pytest.raises(OptimizerError, match="decays so"):
            optimizer.load_state_dict(given)
        assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == (0.7, 0)
        return
    optimizer.load_state_dict(given)
    assert stepped(optimizer) == pytest.approx(stepped(source), rel=1e-6)
