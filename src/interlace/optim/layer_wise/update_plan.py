"""Who updates what: Parameters and the costs of their updates, with an owner for each.

plan = planned(optimizer, params, mesh["dp"], shards=None, bucket_bytes=1 << 26)
plan.is_mine(0)                  # whether this rank updates the first Parameter
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from interlace.optim.layer_wise.ownership import Ownership, ParameterCost, explained, own
from interlace.optim.layer_wise.sharded_parameters import cost_of, needs_whole, shard_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What every rank knows, and where this rank is in it."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    costs: tuple[ParameterCost, ...]
    ownership: Ownership
    mesh: DeviceMesh | None
    """That of shards,"""
    rank: int
    shard: int
    """and this rank among the owners, and among those that hold shards."""
    shards: int

    def is_mine(self, number: int) -> bool:
        """Whether this rank updates that Parameter."""
        if not self.ownership.buckets:  # it updates its shards
            return True
        owner, home = self.ownership.owners[number], self.ownership.homes[number]
        return owner == self.rank and home in (None, self.shard)

    def explain(self) -> list[str]:
        """Lines: who owns what."""
        layouts = [
            f", {p.placements[0]} of {'x'.join(map(str, p.shape))}"
            if isinstance(p, DTensor)
            else ""
            for p in self.params
        ]
        return explained(self.costs, self.ownership, self.shards, layouts)


def planned(
    optimizer: Optimizer,
    params: Mapping[str, nn.Parameter],
    mesh: DeviceMesh,
    *,
    shards: DeviceMesh | None,
    bucket_bytes: int,
) -> UpdatePlan:
    """The plan of all ranks.

    Raises OptimizerError and UnsupportedError for what cannot be served.
    """
    over = shard_mesh(params, mesh, shards)
    count, shard = (1, 0) if over is None else (over.size(), over.get_local_rank())
    cost: Any = getattr(optimizer, "update_cost", Tensor.numel)
    whole = needs_whole(optimizer)
    costs = tuple(
        cost_of(name, param, cost, homed=whole(param), shards=count)
        for name, param in params.items()
    )
    return UpdatePlan(
        names=tuple(params),
        params=tuple(params.values()),
        costs=costs,
        ownership=own(costs, mesh.size(), bucket_bytes, count),
        mesh=over,
        rank=mesh.get_local_rank(),
        shard=shard,
        shards=count,
    )


def nothing_planned(params: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> UpdatePlan:
    """The plan of Parameters whose shards, over `mesh`, are updated where they lie."""
    return UpdatePlan(
        names=tuple(params),
        params=tuple(params.values()),
        costs=(),
        ownership=Ownership((), (), ()),
        mesh=None,
        rank=mesh.get_local_rank(),
        shard=mesh.get_local_rank(),
        shards=mesh.size(),
    )
