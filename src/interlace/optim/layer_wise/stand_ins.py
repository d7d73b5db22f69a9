"""What an optimizer updates: Parameters of the module, parts of them, or whole matrices of shards.

stand_ins = StandIns(plan, weights, grads, homes)
stand_ins.enter(optimizer)          # groups have stand-ins; leave(optimizer) undoes that
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from interlace.optim.adam.state import local
from interlace.optim.grad_reducer import Bucket
from interlace.optim.layer_wise.sharded_parameters import ParameterPart, like
from interlace.optim.layer_wise.tensor_homes import TensorHomes
from interlace.optim.layer_wise.update_plan import UpdatePlan


class StandIns:
    """What stands in an optimizer's groups while a LayerWise is open."""

    def __init__(
        self,
        plan: UpdatePlan,
        weights: Sequence[Bucket],
        grads: Sequence[Bucket],
        homes: TensorHomes | None,
    ) -> None:
        """`weights`: the flat buffers, which Parameters become views of; `grads` of gradients."""
        whole, homed = ({}, {}) if homes is None else (homes.whole, homes.grads)
        place_of, grad_of = views_of(weights), views_of(grads)
        self.acting: list[nn.Parameter] = []
        """For each part what is updated: without memory if that is elsewhere."""
        self.owned: dict[nn.Parameter, nn.Parameter] = {}
        """What this rank updates, and of which Parameter each is."""
        self.main_grads: dict[nn.Parameter, Tensor] = {}
        """By which gradients, if LayerWise reduces them."""
        for number, part in enumerate(plan.parts):
            param, mine = part.param, plan.is_mine(number)
            acting = whole.get(param, param)
            if part.rows is not None:
                place = part.of(place_of[param])
                place = place if mine else torch.empty_like(place, device="meta")
                acting = nn.Parameter(place, param.requires_grad)
            self.acting.append(acting)
            if mine:
                self.owned[acting] = param
            if mine and grads:
                self.main_grads[acting] = like(acting, part.of(homed.get(param, grad_of[param])))
        self._parts = plan.parts
        self._here = [owner == plan.rank for owner in plan.ownership.owners]
        """Whether this rank, or one that holds other shards of the same, updates a part."""

    def enter(self, optimizer: Optimizer) -> None:
        """Puts them in the places of Parameters in all groups, with what states there are.

        The states of Parameters that have stand-ins go, so that not all are held twice.
        """
        acting: dict[nn.Parameter, list[nn.Parameter]] = {}
        before = None
        for part, stands, here in zip(self._parts, self.acting, self._here, strict=True):
            acting.setdefault(part.param, []).append(stands)
            if stands is part.param:
                continue
            if part.param is not before:
                before, state = part.param, optimizer.state.pop(part.param, {})
            moved = {n: _of(part, v) for n, v in state.items()} if here else {}
            if moved and stands in self.owned:
                optimizer.state[stands] = moved
        _replace(optimizer, acting)

    def leave(self, optimizer: Optimizer) -> None:
        """Puts the Parameters back, without the states of stand-ins."""
        for part, stands in zip(self._parts, self.acting, strict=True):
            if stands is not part.param:
                optimizer.state.pop(stands, None)
        pairs = zip(self.acting, self._parts, strict=True)
        _replace(optimizer, {stands: [part.param] for stands, part in pairs})


def views_of(buckets: Iterable[Bucket]) -> dict[nn.Parameter, Tensor]:
    return {p: v for bucket in buckets for p, v in zip(bucket.params, bucket.views, strict=True)}


def _replace(optimizer: Optimizer, by: Mapping[nn.Parameter, Sequence[nn.Parameter]]) -> None:
    for group in optimizer.param_groups:
        given = [each for param in group["params"] for each in by.get(param, [param])]
        group["params"][:] = dict.fromkeys(given)


def _of(part: ParameterPart, value: object) -> object:
    """A value of a Parameter's state for what stands in its place."""
    if not isinstance(value, Tensor) or value.shape != part.param.shape:
        return value.clone() if isinstance(value, Tensor) else value
    if part.rows is None and isinstance(value, DTensor):
        return value.full_tensor()
    return part.of(local(value)).clone()
