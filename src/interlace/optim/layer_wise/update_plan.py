"""Who updates what: Parameters as they lie, the costs of their updates, and an owner for each.

params = parameters_of(optimizer, module)         # by name
plan = planned(optimizer, params, mesh["dp"], bucket_bytes=1 << 26)
plan.is_mine(0)                                   # whether this rank updates the first Parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from interlace.comm.teams import group_of_mesh
from interlace.errors import OptimizerError, UnsupportedError
from interlace.optim.adam.state import local
from interlace.optim.adamw import Adam, AdamW
from interlace.optim.bucket_runs import NAMES
from interlace.optim.layer_wise.ownership import Ownership, ParameterCost, explained, own
from interlace.optim.loading import ParamGroup
from interlace.torch_private.distributed import CHECKPOINT_PREFIX

ELEMENTWISE = (
    *(Adam, AdamW, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop),
)
"""Optimizers whose update of an element depends on that element alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """Plan of the updates, the same on every rank, and the place of this rank in it."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    costs: tuple[ParameterCost, ...]
    ownership: Ownership
    mesh: DeviceMesh | None
    """Mesh of the shards."""
    rank: int
    shard: int
    """Number of this rank among those that hold shards; `rank` is its number among the owners."""
    shards: int

    @property
    def in_place(self) -> bool:
        """True if Parameters are sharded over the mesh, and each rank updates its shards."""
        return not self.ownership.buckets

    def is_mine(self, number: int) -> bool:
        """True if this rank updates that Parameter."""
        if self.in_place:
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
    bucket_bytes: int,
) -> UpdatePlan:
    """The plan of all ranks; without owners for Parameters that are sharded over `mesh`.

    Raises OptimizerError and UnsupportedError for what cannot be served.
    """
    rank, empty = mesh.get_local_rank(), Ownership((), (), ())
    if any(lies_over(param, mesh) for param in params.values()):
        costs, ownership, over, count, shard = (), empty, None, mesh.size(), rank
    else:
        over = shard_mesh(params, mesh)
        count, shard = (1, 0) if over is None else (over.size(), over.get_local_rank())
        cost: Any = getattr(optimizer, "update_cost", Tensor.numel)
        whole = needs_whole(optimizer)
        costs = tuple(
            cost_of(name, param, cost, homed=whole(param), shards=count)
            for name, param in params.items()
        )
        ownership = own(costs, mesh.size(), bucket_bytes, count)
    return UpdatePlan(
        names=tuple(params),
        params=tuple(params.values()),
        costs=costs,
        ownership=ownership,
        mesh=over,
        rank=rank,
        shard=shard,
        shards=count,
    )


# -- Parameters -----------------------------------------------------------------------------------


def parameters_of(optimizer: Optimizer, module: nn.Module) -> dict[str, nn.Parameter]:
    """The optimizer's Parameters by name, in the order of the module; raises for others."""
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    found = {name: param for name, param in named(module).items() if param in wanted}
    if not found or len(found) < len(wanted):
        raise OptimizerError(
            f"{len(wanted) - len(found)} of {len(wanted)} parameters of the optimizer are not in "
            "the module: nothing would gather them. Give the module that holds them all"
        )
    for name, param in found.items():
        if param.dtype not in NAMES or not param.dtype.is_floating_point:
            raise OptimizerError(f"{name} is {param.dtype}: give fp64, fp32, bf16 or fp16")
    devices = {str(param.device) for param in found.values()}
    if len(devices) > 1:
        raise OptimizerError(f"parameters lie on {sorted(devices)}: give those of one device")
    return found


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that torch's states have: without what torch.compile and
    checkpoint_wrapper wrap around.
    """
    return {
        name.replace("_orig_mod.", "").replace(CHECKPOINT_PREFIX, ""): param
        for name, param in module.named_parameters()
    }


def rounds_at_random(group: ParamGroup) -> bool:
    """True if interlace's Adam draws random bits for the values that a group stores."""
    kinds = [group.get("exp_avg_dtype"), group.get("exp_avg_sq_dtype")]
    if not group.get("master_weights"):
        kinds += [param.dtype for param in group["params"]]
    return bool(group.get("stochastic_rounding")) and torch.bfloat16 in kinds


def uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def hash_of(param: Tensor) -> Tensor:
    """64 bits of a tensor's bits, by their places."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[param.itemsize]
    bits = local(param).detach().flatten().view(words)
    places = torch.arange(bits.numel(), device=param.device) % 65_521 + 1
    return (bits.to(torch.int64) * places).sum()


def shard_mesh(params: Mapping[str, nn.Parameter], data: DeviceMesh) -> DeviceMesh | None:
    """The mesh of one dimension that DTensors lie on; raises for others."""
    replicas: set[int] = {*_ranks(data)}
    found: DeviceMesh | None = None
    for name, param in params.items():
        if not isinstance(param, DTensor):
            continue
        mesh = param.device_mesh
        if len(replicas & set(mesh.mesh.flatten().tolist())) > 1:
            raise UnsupportedError(
                f"{name} is a DTensor on ranks of the data-parallel mesh: its shards have homes "
                "already. Give such parameters a LayerWise of their own (over those ranks, if "
                "fully_shard made them), and this one those that all ranks of `mesh` have alike"
            )
        if mesh.ndim != 1:
            raise UnsupportedError(
                f"{name} is a DTensor on a mesh of {mesh.ndim} dimensions: LayerWise takes those "
                "on a mesh of one, such as mesh['tp']"
            )
        placement, part = param.placements[0], local(param)
        if not placement.is_replicate() and type(placement) is not Shard:
            raise UnsupportedError(f"{name} is laid out as {placement}: give Shard or Replicate")
        if not placement.is_replicate() and not part.is_contiguous():
            raise UnsupportedError(
                f"the shard of {name} has strides {part.stride()}: make the Parameter contiguous"
            )
        if found is not None and _ranks(found) != _ranks(mesh):
            raise OptimizerError(
                f"{name} is sharded over ranks {_ranks(mesh)}, and others over {_ranks(found)}: "
                "make a LayerWise for the Parameters of each mesh, and clip the gradients of all "
                "together by interlace.optim.clip_grad_norm_"
            )
        found = mesh
    return found


def _ranks(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


def is_sharded(param: Tensor) -> bool:
    """True if this rank holds only a shard of the parameter."""
    return isinstance(param, DTensor) and not all(p.is_replicate() for p in param.placements)


def needs_whole(optimizer: Optimizer) -> Callable[[Tensor], bool]:
    """Which sharded parameters are updated whole: as the optimizer's `needs_whole(parameter)` says;
    without it, all unless it is one of `ELEMENTWISE`.
    """
    says: Any = getattr(optimizer, "needs_whole", None)
    whole = says or (lambda _: type(optimizer) not in ELEMENTWISE)
    return lambda param: is_sharded(param) and bool(whole(param))


def cost_of(
    name: str, param: Tensor, cost: Callable[[Tensor], float], *, homed: bool, shards: int
) -> ParameterCost:
    """Cost for a plan: the place of the largest shard, and the cost of one rank's update."""
    numel, times = param.numel(), 1
    if isinstance(param, DTensor) and isinstance(placement := param.placements[0], Shard):
        size = param.shape[placement.dim]
        numel, times = numel // max(size, 1) * -(-size // shards), 1 if homed else shards
    kind, each = NAMES[param.dtype], float(cost(param)) / times
    return ParameterCost(name, numel, kind, param.itemsize, each, homed)


def like(param: Tensor, part: Tensor) -> Tensor:
    """A tensor of which this rank has that part, laid out as a parameter is."""
    if not isinstance(param, DTensor):
        return part
    mesh, placements = param.device_mesh, param.placements
    shape, stride = param.shape, param.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def lies_over(param: Tensor, mesh: DeviceMesh) -> bool:
    """True if a parameter is sharded over the ranks of this mesh, as `fully_shard` does."""
    if not isinstance(param, DTensor):
        return False
    return any(_ranks_of(group) == _ranks(mesh) for group in _shard_groups(param))


def other_shards(
    params: Sequence[Tensor], mesh: DeviceMesh
) -> dict[dist.ProcessGroup, tuple[int, ...]]:
    """Groups of other ranks than the mesh's that Parameters are sharded over (tensor parallelism
    beside `fully_shard`), each with the numbers of these. In an order that all ranks share.
    """
    found: dict[dist.ProcessGroup, tuple[int, ...]] = {}
    for number, param in enumerate(params):
        for group in _shard_groups(param) if isinstance(param, DTensor) else ():
            if group.size() > 1 and _ranks_of(group) != _ranks(mesh):
                found[group] = (*found.get(group, ()), number)
    return found


def lines_of(param: DTensor) -> dict[int, tuple[int, ...]]:
    """The dimensions of its mesh that shard it, each with the ranks that differ in that alone."""
    return {
        axis: tuple(_ranks_of(group_of_mesh(param.device_mesh, axis)))
        for axis, placement in enumerate(param.placements)
        if not placement.is_replicate()
    }


def _shard_groups(param: DTensor) -> list[dist.ProcessGroup]:
    """Groups whose ranks hold different parts, one for each dimension that shards."""
    return [group_of_mesh(param.device_mesh, axis) for axis in lines_of(param)]


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)
