"""The part of an optimizer's state that one rank owns, by the names of Parameters.

found = saved(optimizer, owned, names)        # owned: what it updates, and of which Parameter
load(optimizer, owned, names, found, rank, complete=True)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from interlace.errors import OptimizerError
from interlace.optim.layer_wise.bucket_update import BucketUpdate
from interlace.optim.layer_wise.flat_weights import shown
from interlace.optim.loading import State

Owned = Mapping[nn.Parameter, nn.Parameter]
Names = Mapping[nn.Parameter, str]


def saved(optimizer: Optimizer, owned: Owned, names: Names) -> State:
    """Options of all groups, and the state of what is owned: where there is none, that of a first
    step.
    """
    begun, state = _begin_state(optimizer, owned), optimizer.state
    found = {
        "state": {names[p]: dict(state[p]) for p in owned if state.get(p)},
        "param_groups": [
            {**group, "params": [names[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
    for param in begun:
        state.pop(param, None)
    return found


def load(
    optimizer: Optimizer,
    owned: Owned,
    names: Names,
    state_dict: State,
    rank: int,
    *,
    complete: bool,
) -> None:
    """Loads that. OptimizerError for the state of another rank or of other groups, or, if it is to
    be `complete`, where something that is trained has none.
    """
    given = state_dict["state"]
    wanted = [names[acting] for acting, param in owned.items() if param.requires_grad]
    strange = [name for name in given if name not in {names[param] for param in owned}]
    lacking = [name for name in wanted if name not in given] if given and complete else []
    if strange or lacking:
        raise OptimizerError(
            f"rank {rank} owns other Parameters than those of this state, such as "
            f"{shown([*strange, *lacking])}: it was saved by another rank, or on another "
            "number of them. Save and load it with torch.distributed.checkpoint, which gives "
            "each rank what it owns"
        )
    groups = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    before = [sorted(group["params"]) for group in state_dict["param_groups"]]
    if before != [sorted(group) for group in groups]:
        raise OptimizerError(
            "the state has other groups of Parameters than the optimizer: make it with the "
            "groups that it was saved with"
        )
    numbers = {name: i for i, name in enumerate(name for group in groups for name in group)}
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: value for name, value in given.items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in own]}
                for group, own in zip(state_dict["param_groups"], groups, strict=True)
            ],
        }
    )


@torch.no_grad()
def _begin_state(optimizer: Optimizer, owned: Owned) -> list[nn.Parameter]:
    """Makes state of what is owned, if there is none, by a step whose weights are put back, of a
    part of the optimizer; gives what has such state now.
    """
    fresh = [acting for acting, param in owned.items() if param.requires_grad]
    if not fresh or any(optimizer.state.get(param) for param in fresh):
        return []
    weights, grads = [param.clone() for param in fresh], [param.grad for param in fresh]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if group.get("use_muon")]
    for group, _ in rates:
        group["lr"] = 0.0  # at which Muon takes parts of matrices
    try:
        BucketUpdate(optimizer, owned)({param: torch.zeros_like(param) for param in fresh})
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for param, weight, grad in zip(fresh, weights, grads, strict=True):
            param.copy_(weight)
            param.grad = grad
    for param in fresh:
        if "step" in optimizer.state[param]:
            optimizer.state[param]["step"] *= 0
    return fresh
