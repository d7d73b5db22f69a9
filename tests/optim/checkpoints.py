"""Checkpoints of LayerWise that are saved in mid-flight, and runs that go on from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tests.optim.layerwise import differing
from torch import nn
from torch.distributed.tensor import DTensor

from interlace.optim import LayerWise

Tensors = dict[str, torch.Tensor]
State = dict[str, Tensors]
Run = tuple[State, Tensors, Tensors]
"""State and weights when a checkpoint was saved or loaded, and weights at the end."""
Train = Callable[[range], object]
"""Takes those steps."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; of a DTensor, of all shards."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(module: nn.Module) -> Tensors:
    return {name: whole(value) for name, value in module.state_dict().items()}


def state_of(optimizing: LayerWise) -> State:
    return {
        name: {key: whole(value) for key, value in values.items()}
        for name, values in optimizing.state_dict()["state"].items()
    }


def saved(optimizing: LayerWise, train: Train, folder: str) -> Run:
    """A run that saves a checkpoint in mid-flight and goes on."""
    with optimizing:
        train(range(4))
        dcp.save(_all_of(optimizing), checkpoint_id=folder)
        return _went_on(optimizing, train)


def loaded(optimizing: LayerWise, train: Train, folder: str) -> Run:
    """One that loads it."""
    with optimizing:
        rates = [group["lr"] for group in optimizing.param_groups]
        dcp.load(_all_of(optimizing), checkpoint_id=folder)
        assert [group["lr"] for group in optimizing.param_groups] == rates
        return _went_on(optimizing, train)


def _all_of(optimizing: LayerWise) -> dict[str, Any]:
    return {"model": optimizing.module.state_dict(), "optim": optimizing}


def _went_on(optimizing: LayerWise, train: Train) -> Run:
    held = state_of(optimizing), weights(optimizing.module)
    train(range(4, 6))
    return *held, weights(optimizing.module)


def merged(ranks: list[Run]) -> State:
    """The state of all ranks."""
    state: State = {}
    for own, _, _ in ranks:
        for name in state.keys() & own.keys():
            assert differing(own[name], state[name]) == []
        state |= own
    return state


def check(before: list[Run], after: list[Run], *, same: bool) -> None:
    """All that was loaded is as it was saved; on the `same` ranks the run went on alike."""
    wanted, found = merged(before), merged(after)
    assert any(values for values in wanted.values())
    assert wanted.keys() == found.keys()
    for name, values in wanted.items():
        assert differing(found[name], values) == [], name
    for _, held, ended in after:
        assert differing(held, before[0][1]) == []
        if same:
            assert differing(ended, before[0][2]) == []
