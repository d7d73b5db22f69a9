"""Who updates what: Parameters, their parts and their costs, with an owner for each.

plan = planned(optimizer, module, mesh["dp"], shards=None, most=1, width=1, bucket_bytes=1 << 26)
plan.is_mine(0)                  # whether this rank updates the first part
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from interlace.errors import OptimizerError
from interlace.optim.layer_wise.ownership import Ownership, ParameterCost, explained, own
from interlace.optim.layer_wise.sharded_parameters import (
    ParameterPart,
    cost_of,
    needs_whole,
    parts_of,
    rows_apart,
    shard_mesh,
)
from interlace.optim.layer_wise.whole_parameters import parameters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What every rank knows, and where this rank is in it."""

    params: dict[str, nn.Parameter]
    parts: tuple[ParameterPart, ...]
    costs: tuple[ParameterCost, ...]
    """One for each part."""
    ownership: Ownership
    mesh: DeviceMesh | None
    """That of shards,"""
    rank: int
    shard: int
    """and this rank among the owners, and among those that hold shards."""
    shards: int

    def is_mine(self, number: int) -> bool:
        """Whether this rank updates that part."""
        owner, home = self.ownership.owners[number], self.ownership.homes[number]
        return owner == self.rank and home in (None, self.shard)

    def explain(self) -> list[str]:
        """Lines: who owns what."""
        layouts = [
            f", {p.placements[0]} of {'x'.join(map(str, p.shape))}"
            if isinstance(p, DTensor)
            else ""
            for p in (part.param for part in self.parts)
        ]
        return explained(self.costs, self.ownership, self.shards, layouts)


def planned(
    optimizer: Optimizer,
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    shards: DeviceMesh | None,
    most: int,
    width: int,
    bucket_bytes: int,
) -> UpdatePlan:
    """The plan of all ranks: of parts, at most so many of a Parameter, or `width` slices of it.

    Raises OptimizerError and UnsupportedError for what cannot be served.
    """
    params = parameters_of(optimizer, module)
    found = shard_mesh(params, mesh, shards)
    count, shard = (1, 0) if found is None else (found.size(), found.get_local_rank())
    slices: Any = getattr(optimizer, "has_slices", None)
    if width > 1 and (slices is None or found is not None or mesh.size() % width):
        raise OptimizerError(
            f"split_matrices={width} is for interlace.optim.Muon, over unsharded Parameters and a "
            f"multiple of as many ranks: these are {mesh.size()}"
        )
    parts = parts_of(
        params,
        most,
        rows_apart(optimizer),
        shard=shard,
        shards=count,
        width=width,
        has_slices=slices,
    )
    cost: Any = getattr(optimizer, "update_cost", Tensor.numel)
    whole = needs_whole(optimizer)
    costs = tuple(cost_of(part, cost, homed=whole(part.param), shards=count) for part in parts)
    return UpdatePlan(
        params=params,
        parts=tuple(parts),
        costs=costs,
        ownership=own(costs, mesh.size(), bucket_bytes, count),
        mesh=found,
        rank=mesh.get_local_rank(),
        shard=shard,
        shards=count,
    )
